"""Benchmark tasks of lm-eval as the utility of a model; lm-eval is imported when a task is opened.

tasks.py          settings -> opened tasks: by name or YAML, offline unless downloads are allowed
isolation.py      lm-eval runs without changing random numbers, logs, output or environment
harness_model.py  lm-eval's HFLM, whose model call is ours: one process or a mesh
evaluation.py     opened tasks and a model -> values, scores of items, samples
answers.py        evaluations on disk, so that no model answers a task twice
items.py          values and paired differences from the scores of items, with intervals
rows.py           results -> rows, paired differences from the base, what the items can show
"""
