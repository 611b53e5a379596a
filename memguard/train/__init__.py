"""The training engine: turns rows into trained weights and can resume from every step.

    trainer.py             the loop: steps, metrics, checkpoints
    run_state.py           what a training is given: rows, folder, ranks
    stop_request.py        clean stop on a signal
    prefetch.py            builds the next batch in a background thread
    step.py                one optimizer step, the same on one process and on every mesh
    step_cost.py           tokens a second a GPU, MFU, memory by kind
    profile.py             torch's traces of some steps, and communication by axis
    embedding_noise.py     noise on the embeddings of one forward pass, if a mitigation adds it
    dp_sgd.py              per-row gradient clipping, noise on the sum, and the privacy spent
    checkpoint.py          save and resume, bit for bit; committed by rename
    checkpoint_storage.py  locations of a checkpoint's tensors, as JSON instead of torch's pickle
    resume.py              saves the progress of a run while it goes on, and restores it
    heldout.py             loss on documents never trained; which step is exported
    divergence.py          whose rows a step had that is not finite
    base_nll.py            NLL of every trained token under the initial model
    audit_callback.py      audits during training, and the decisions of a memorization budget
    metrics.py             metrics.jsonl and the progress line
    log_summary.py         what a report says of a log: totals, losses by step, audits
    tracking.py            lines of the log as events of tensorboard, wandb, trackio

The state after a step consists of the weights, AdamW's moments, the step number, the tally of rows
trained and, with a budget, its decisions. Rows, masks, dropout, noise and learning rate are
functions of this state and the run's seed. Mitigations that compare with the initial model also
use its losses, which are measured once and stored with the run.
"""
