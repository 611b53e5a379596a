"""One audit, in this order: checks, target, models, measuring, report, pages.

audit.py           measures model and base model, writes report and records
checks.py          checks the arguments of `audit` before torch is imported
arguments.py       the arguments of an audit as Python has them
target.py          documents and model for the audit of a run, read from the run folder
documents.py       documents and model for the audit of a model memguard did not train
models.py          a model of an audit, loaded at first use and freed afterwards
model_identity.py  names and hashes of the models of an audit
resources.py       resources of an audit other than its models
utility.py         benchmark tasks: opens them, runs them while a model is loaded, saves
progress.py        shows how much of each stage of an audit is done
report.py          the report of an audit from what was measured
pages.py           pages of an audit; renders them again from its report
model_in_memory.py a model of the program that calls memguard, and how it is borrowed
wrapped_models.py  models in memory that peft, torch.compile or DDP wraps
"""
