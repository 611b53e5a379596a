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
    own_text.py            which texts no other document has, so that no shared form explains them
    passages.py            one model input, and the model's results for its tokens
    batching.py            jobs of scorer and decoder in batches, on any mesh
    scoring.py             passages -> token results, by a model
    decoding.py, beams.py  prompts -> generated tokens, within a limit of time
    following.py           documents continued from the keys of their scoring pass
    token_loop.py          the loop over the new tokens of a batch
    cache.py               rows of numbers, cached on disk and computed once
    context.py             the models, tokenizer, cache and process group of an audit
    probe.py               what a probe is: settings, metrics, measurement, rows, section
    requests.py            what probes ask of a model, and what they receive
    probes/                each probe of memguard in one file, and what it computes
    runner.py              runs probes on one model: merges requests, reads and fills the cache
    run.py                 one audit: the model, its base, the reference; then the summary
results
    metrics.py             a metric, its estimates, its rows of buckets with base and control
    document_scores.py     the columns of all probes -> records.parquet
    findings.py            the documents that came out, one row each, worst first
    statistics/            rates, means, trends and their intervals
    summary.py             what all probes add -> tables and header of a report; training's rows
    verdict.py                 what was extracted -> one of four levels, by tests against control;
                               its second line: do scores separate trained documents?
    verdict_sentences.py       its sentences
    warnings.py                warnings and notes

Models are passed as protocols (`Scorer`, `AuditedModel`); the caller decides how they are loaded
and on how many processes they run. Import from the modules: suites, probes, canaries, membership
and statistics do not import torch.
"""
