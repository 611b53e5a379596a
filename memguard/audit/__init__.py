"""What a checkpoint has memorised of its documents.

Greedy decoding reproduces a continuation if and only if, given everything true before it, every
token of it is the model's first choice. So ONE teacher-forced pass decides verbatim match, first
divergence, extraction strength, the probability of the continuation under any sampling scheme, and
the membership scores. Near-verbatim match is decided on text that is really generated, from the
first divergence on.

asking
    suite.py, probes.py    eval/suites/*.yaml -> probes and their settings; the PROBES table
    selection.py           documents -> windows: long enough, sampled in each bucket, or refused
    extraction.py, grid.py which tokens are continued
    parts.py               which part of a long document is audited
    passages.py            what is fed to a model, and what it says of each token
    scoring.py             passages -> token results, by a model
    decoding.py, beams.py  prompts -> what a model writes (rounds.py: in batches, on any mesh)
    numbers.py, cache.py   rows of numbers, from the shelf where they were made before
    workshop.py            the models, tokenizer, cache and ranks that are worked with
    asking.py              each kind of question that one model is asked
    procedure.py           all of it in order
measuring
    one_pass.py            one pass -> a row of numbers
    near_verbatim.py       greedy text within a few edits of the true one
    overlap.py             written against true text
    probabilistic.py       log-probabilities -> queries
    membership_scores.py, own_passes.py, membership.py, blind.py    trained or not?
    kinds.py               are members and nonmembers one kind of text? before a model is loaded
    canary_scores.py, exposure.py, privacy.py                       random secrets
    writing.py, attacks.py what is written, and what an attacker gets
    mask_consistency.py, reformatting.py     do copies escape the mask?
saying
    document_scores.py     numbers -> a record a document; scores_file.py: -> records.parquet
    bucket_table.py        records -> the main table; every rate of extraction of each bucket
    probe_tables.py, measures.py, doses.py   numbers -> tables, with base and control
    statistics/            rates, means, trends and their intervals
    summary.py, verdict.py, findings.py, banners.py    what leads the page
    probe_runs.py          which probes ran, on how many documents, and why the others did not

A model is asked for through protocols (`Scorer`, `AuditedModel`); who loads it, and on how many
processes it runs, is the caller's matter. Import from the modules: only `scoring`, `decoding`,
`beams`, `attacks` and `rounds` bring torch along.
"""
