"""memguard's masks, losses and audits in transformers' training and decoding.

    transformers.py   GoldfishCollator and losses for `Trainer` and its subclasses
    trainer_audit.py  a callback that audits the model trained by a `Trainer`
    memfree.py        MemFreeLogitsProcessor for `generate`: blocks n-grams of the documents

Each class documents its differences from memguard's own trainer. Features that need the whole step,
the mesh or the manifest require memguard's own trainer.
"""
