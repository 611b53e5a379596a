"""Benchmarks: scripts that end in a verdict, e.g. `python scripts/bench/engine.py --quick`.

engine       training speed and memory, vs transformers' Trainer, FSDP2 and tensor parallelism
load         memory of loading a checkpoint onto four ranks, vs transformers and Accelerate
mitigation   overhead of a goldfish mask in a step
audit        speed of the audit's scores and default suite, vs `generate`
plan         predicted memory, vs simulated and measured memory
gpu          an 8B-shaped Llama on one GPU; started by scripts/gpu_check.sh
harness      ranks as processes, alternating sides, tables and a verdict
workload     random models, packed rows, memguard's step and transformers' Trainer
"""
