"""What a checkpoint has memorised of its documents.

Greedy decoding reproduces a continuation if and only if, given everything true before it, every
token of it is the model's first choice. So nothing is generated: ONE teacher-forced pass over
prefix + continuation decides verbatim and near-verbatim match, first divergence, extraction
strength, log-probability and the membership scores.

    suite.py        eval/suites/*.yaml -> probes and their settings; the PROBES table
    selection.py    documents -> windows: long enough, sampled in each bucket, or refused
    extraction.py   the extraction probe: which tokens are continued, what that says
    scoring.py      windows -> token results, by a model (the only file here that needs torch)
    membership.py   the membership probe: do trained documents score above the control?
    statistics.py   rates, differences, means and AUCs with their intervals
    summary.py      document scores -> the report's table, and everything below
    verdict.py      table -> the sentence that leads the page
    findings.py     document scores -> the worst documents
    banners.py      what a reader must know before the numbers
    scores_file.py  document scores <-> records.parquet
    procedure.py    all of it in order

A model is asked for through the `Scorer` protocol; who loads it, and on how many processes it runs,
is the caller's matter. Import from the modules: only `scoring` brings torch along.
"""
