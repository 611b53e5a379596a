"""Measures how much of its documents a checkpoint has memorized.

Greedy decoding reproduces a continuation if and only if, given the true tokens before it, every
token of it is the model's first choice. ONE teacher-forced pass therefore determines verbatim
match, first divergence, extraction strength, the probability of the continuation under any sampling
scheme, and the membership scores. Near-verbatim match is determined on generated text, from the
first divergence on.

running the probes
    suite.py               eval/suites/*.yaml -> probes and their settings; the PROBES table
    plugins.py             probes of other packages: an error ends the probe, not the audit
    plan.py                what is measured: documents, windows, suite, tasks; equal on all ranks
    selection.py           documents -> windows: parts, long enough, sampled in each bucket
    windows.py             which tokens are the prefix and which the continuation
    passages.py            one model input, and the model's results for its tokens
    batching.py            jobs of scorer and decoder in batches, on any mesh
    scoring.py             passages -> token results, by a model
    decoding.py, beams.py  prompts -> generated tokens
    token_loop.py          the loop over the new tokens of a batch
    generation_time.py     its limit of time where weights are gathered for each token
    cache.py               rows of numbers, cached on disk and computed once
    context.py             the models, tokenizer, cache and process group of an audit
    probe.py               what a probe is: settings, metrics, measurement, rows, section
    requests.py            what probes ask of a model, and what they receive
    probes/                each probe of memguard in one file
    runner.py              runs probes on one model: merges requests, reads and fills the cache
    run.py                 one audit: the model, its base, the reference; then the summary
measuring
    window_scores.py       the numbers of one window: verbatim, first divergence, longest run ...
    near_verbatim.py       generated text within a few edits of the true one
    overlap.py             overlap of generated and true text
    membership_scores.py, membership_passes.py    scores of membership, those with a pass
                           of their own, and a baseline on words only
    canary_results.py      random secrets, and which of them are extracted
    epsilon_bound.py       a lower bound on epsilon, from guesses of the canaries' coins
    known_mask.py          which tokens a goldfish dropped, as an attacker computes it
    mask_consistency.py    rewritten copies of a text, and how they change its mask
results
    metrics.py             a metric of documents, and how it is estimated over documents
    evidence.py            values of documents -> rows of buckets, with base model and control
    training.py            audits during training, and the held-out loss -> rows
    document_scores.py     the columns of all probes -> records.parquet
    statistics/            rates, means, trends and their intervals
    summary.py             what all probes add -> the tables and the header of a report
    verdict.py                 what was extracted -> one of four levels, by tests against control;
                               its second line: do scores separate trained documents?
    verdict_sentences.py       its sentences
    findings.py, warnings.py   extracted documents, worst first; warnings and notes

Models are passed as protocols (`Scorer`, `AuditedModel`); the caller decides how they are loaded
and on how many processes they run. Import from the modules: suites, probes, canaries, membership
and statistics do not import torch.
"""
