"""Benchmarks; each is a script, `python scripts/bench/engine.py --quick`, and ends with a verdict.

engine       speed and memory of training beside transformers' Trainer, FSDP2, tensor parallelism
load         memory of loading a checkpoint onto four ranks, beside transformers and Accelerate
mitigation   what a goldfish's mask adds to a step
audit        the audit's scores and default suite beside `generate`
plan         predicted memory beside simulated and measured
gpu          an 8B-shaped Llama on one GPU; scripts/gpu_check.sh starts it
harness      ranks as processes, sides that take turns, tables and a verdict
workload     random models, packed rows, memguard's step and transformers' Trainer
"""
