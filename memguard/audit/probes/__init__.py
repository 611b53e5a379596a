"""The probes: one file each, with settings, metrics, measurement, rows and section. No torch.

    extraction.py        the documents' continuations: verbatim and near-verbatim
    grid.py              other windows of the same documents
    sampling.py          cost of sampling the continuation
    membership.py        trained against control documents
    canaries.py          random secrets, trained or not at random
    generation.py        overlap of greedy and sampled text with the true one
    attacks.py           beam search, and an attacker who knows the mask
    mask_consistency.py  whether reformatted copies escape the mask

    window_scores.py     numbers of one continuation: teacher-forced, and overlap of generated text
    near_verbatim.py     generated text within a few edits of the true one
    membership_scores.py scores of membership, and the passages that they need
    canary_results.py    exposure and extraction of secrets, and a lower bound on epsilon
    masks.py             masks of labels, as an attacker computes them, and in copies of a text

`audit/probe.py` says what a probe is. To remove one, delete its file, its tests, its lines in
eval/suites and its line of `_PLACES` in audit/suite.py. If the definition of a probe's results
changes, its VERSION changes; every record contains it.
"""
