"""Estimates before a run: the meshes that fit, and what a run will train and write.

    machine.py         GPUs, links and network of a machine, from its YAML
    step_settings.py   settings of a step that its estimates depend on
    parameters.py      parameters of a rank: how they are stored, and which of them a step trains
    memory.py          peak memory of a rank in a step, by kind
    activations.py     activations of a block on a rank
    compute.py         computing time of a step on one rank, from published speeds of kernels
    cost.py            time of a step with its communication
    traffic.py         communication of a step along each axis, by the formula of `parallel`
    fit.py             meshes on which a step fits, and changes that would make one fit
    assumptions.py     what the estimates assume, and how near they are to published runs
    plan.py            the plan: which meshes fit, and what would help if none does

    meta_model.py      a model's shape, without its weights
    rows.py            steps, rows and tokens of a run; its first row, token by token
    drop_shares.py     share of the labels that goldfish drops, by document
    dry_run.py         record of all these, and the disk space that a run needs

    configuration -> sizes, mesh, settings -> bytes and seconds           no torch, no GPU
    configuration -> documents, tokenizer  -> the dry run                 no weights

Arguments that most functions take:

    sizes      of the model
    mesh       one that `check_mesh` accepts
    settings   of a step on a mesh; ``work``: of a step before its mesh is chosen
    machine    each GPU of which, or process on a CPU, runs one rank
    seq_len    tokens of a row

Memory is computed by formulas, which were compared with the engine on fake tensors
(scripts/fake_step.py) and with real training processes (scripts/bench/plan.py,
scripts/bench/memory_pools.py). Times are estimates with four constants that are fitted to published
training runs, and compared with others (scripts/bench/published.py); nothing is measured here.
"""
