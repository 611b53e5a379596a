"""Benchmarks: scripts that end in a verdict, e.g. `python scripts/bench/engine.py --quick`.

engine       training speed and memory, vs transformers' Trainer, FSDP2 and tensor parallelism
adapters     training a LoRA adapter, vs peft and transformers' Trainer
checkpoint   time of a save in the background, vs a copy, a save that is waited for, async_save
load         memory of loading a checkpoint onto four ranks, vs transformers and Accelerate
mitigation   overhead of a goldfish mask in a step
audit        speed of the audit's scores and default suite, vs `generate`
near_duplicates  copies that are found, on texts of which it is known what they are
plan         predicted memory, vs simulated and measured memory
published    estimated speed, vs published training runs
gpu          facts about one GPU, step by step; started by scripts/gpu_check.sh
gpu_steps    its steps machine, check, run; gpu_speed, gpu_kernels, gpu_qlora, gpu_audit, gpu_tests
gpu_facts    a fact of a step, printed when it is known
gpu_many     an 8B-shaped Llama on several GPUs; started by scripts/gpu_check_many.sh
gpu_sizes    sizes of the model, FLOP a token, peak rates of GPUs
gpu_rows     what a rank measures: a step checked, rounds of steps timed
gpu_parity   tiny models on every mesh, vs one process
gpu_overlap  collectives that computation hides, from a profiler's trace
gpu_work     measurements in new processes, started by memguard's launcher
gpu_session  one run of gpu_many: tables, verdict and JSON
harness      ranks as processes, alternating sides, tables and a verdict
workload     random models, packed rows, memguard's step and transformers' Trainer
"""
