"""What fits where, and what a run will do, before anything is started.

    machine.py         GPUs, links and network of a machine, from its YAML
    memory.py          what a rank needs for a step, by kind, at the moment it needs most
    cost.py            how long a step takes, roughly: to rank meshes
    traffic.py         what a step sends along each axis, by the formula of `parallel`
    fit.py             which meshes hold a step, and what would make one fit
    plan.py            the answer, as it is written down

    meta_model.py      a model's shape, without its weights
    run_length.py      steps, rows and tokens of a run
    first_row.py       the first row that will be trained, token by token
    reference_hash.py  windows that the published goldfish hash cannot tell apart
    tokenizer_lint.py  what a tokenizer does to these documents that its user may not expect
    disk.py            what a run writes, against what is free
    dry_run.py         all of these, as a record

    configuration -> sizes, mesh, settings -> bytes and seconds           no torch, no GPU
    configuration -> documents, tokenizer  -> the dry run                 no weights

Memory is arithmetic, compared with the engine itself run on fake tensors (simulation/step.py) and
with processes that train (scripts/bench/plan.py). Times are rough; nothing is measured here.
"""
