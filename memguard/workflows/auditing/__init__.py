"""One audit, in this order: checks, plan, models, measuring, report, pages.

checks.py          `CheckedAudit`: arguments that passed every check which needs no torch
arguments.py       the arguments of an audit as Python has them
audit.py           one audit from top to bottom
target.py          what is audited of a run: plan, models, what the report says of them
documents.py       the same of a model memguard did not train
trained_counts.py  how often its documents were trained, as a callback counted it
models.py          the models: named and hashed, loaded at first use and freed afterwards
model_in_memory.py a model of the program that calls memguard, and how it is borrowed
wrapped_models.py  models in memory that peft, torch.compile or DDP wraps
resources.py       tokenizer, cached scores, masks, progress
utility.py         benchmark tasks: opens them, runs them while a model is loaded, saves
report.py          the report from what was measured
pages.py           its pages; renders them again from the report
"""
