"""The engine: rows in, trained weights out, resumable at every step.

    trainer.py             the loop: steps, metrics, checkpoints, stopped cleanly by a signal
    step.py                one optimizer step, the same on one process and on every mesh
    dropout.py             set wherever the model's family has it
    embedding_noise.py     noise on the embeddings of one forward pass, where a mitigation asks
    dp_sgd.py              gradients clipped row by row, noise on their sum, and the privacy spent
    optim.py               AdamW, its parameter groups and the learning rate of a step
    checkpoint.py          save and resume, bit for bit; committed by rename
    checkpoint_storage.py  where a checkpoint's tensors lie: JSON in place of torch's pickle
    resume.py              what a run has done so far, saved and restored
    heldout.py             mean loss on documents that are never trained
    base_nll.py            NLL of every trained token under the starting model
    audit_callback.py      audits during training, and the decisions of a risk budget
    metrics.py             metrics.jsonl and the line on the screen

A step's state is (weights, AdamW's moments, step number, tally of rows fed, and with a budget what
it has decided). Everything else is a function of these and the run's seed: rows, masks, dropout,
noise and learning rate; and, where a setting compares with it, of what the starting model said,
which is measured once and kept beside them.
"""
