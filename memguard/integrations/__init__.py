"""memguard in other people's training and decoding: thin, on the same masks, losses and audits.

    transformers.py   GoldfishCollator and losses for `Trainer` and whatever inherits from it
    trainer_audit.py  the callback that audits what a `Trainer` has trained
    memfree.py        MemFreeLogitsProcessor for `generate`: no n-gram of the documents is written

What is not the same there is said by each class; whatever needs the whole step, the mesh or the
manifest needs memguard's own trainer.
"""
