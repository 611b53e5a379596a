"""memguard inside other people's training: thin, on the same masks, losses and audits.

    transformers.py   GoldfishCollator and losses for `Trainer` and whatever inherits from it
    trainer_audit.py  the callback that audits what a `Trainer` has trained

What is not the same there is said by each class; whatever needs the whole step, the mesh or the
manifest needs memguard's own trainer.
"""
