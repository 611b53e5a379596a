"""Measures how much of its documents a checkpoint has memorized.

Greedy decoding reproduces a continuation if and only if, given the true tokens before it, every
token of it is the model's first choice. ONE teacher-forced pass therefore determines verbatim
match, first divergence, extraction strength, the probability of the continuation under any sampling
scheme, and the membership scores. Near-verbatim match is determined on generated text, from the
first divergence on.

running the probes
    suite.py               eval/suites/*.yaml -> probes and their settings; the PROBES table
    selection.py           documents -> windows: long enough, sampled in each bucket, or rejected
    extraction.py          which tokens are the prefix and which the continuation
    parts.py               which part of a long document is audited
    passages.py            one model input, and the model's results for its tokens
    batching.py            jobs of scorer and decoder in batches, on any mesh
    scoring.py             passages -> token results, by a model
    decoding.py, beams.py  prompts -> generated tokens
    cache.py               rows of numbers, cached on disk and computed once
    context.py             the models, tokenizer, cache and process group of an audit
    probe.py               what a probe is, and the requests it makes of a model
    probes/                each probe: its settings and its measurement
    runner.py              runs probes on one model: merges requests, reads and fills the cache
    variants.py            forms of one model, such as quantised ones, and paired differences
    run.py                 one audit: the model, its base, the reference; then the summary
measuring
    near_verbatim.py       generated text within a few edits of the true one
    overlap.py             overlap of generated and true text
    probabilistic.py       log-probabilities -> number of queries
    membership_scores.py, membership.py    membership inference, with a baseline on words only;
                           are members and nonmembers one kind of text?
    canaries.py            random secrets: extraction and exposure
    epsilon_bound.py       a lower bound on epsilon, from guesses of the canaries' coins
    attacks.py             extraction by an attacker with many queries, or with the mask
    mask_consistency.py    do near-copies and reformatted copies escape the mask?
results
    document_scores.py     numbers -> a column per field, a row per document -> records.parquet
    metrics.py             the metrics of a document, and how they are estimated over documents
    tables.py              numbers of documents -> rows of buckets, with base model and control
    statistics/            rates, means, trends and their intervals
    summary.py             all results -> the parts of a report; dose-response, which probes ran
    verdict.py                 what was extracted -> one of four levels, by tests against control;
                               its second line: do scores separate trained documents?
    verdict_sentences.py       its sentences
    findings.py, warnings.py   extracted documents, worst first; warnings and notes

Models are passed as protocols (`Scorer`, `AuditedModel`); the caller decides how they are loaded
and on how many processes they run. Import from the modules: suites, probes, canaries, membership
and statistics do not import torch.
"""
