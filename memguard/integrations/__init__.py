"""memguard's masks, losses and audits in transformers' training and decoding.

    transformers.py   all that is for `Trainer` and its subclasses, and losses
    goldfish.py       GoldfishCollator, wrap_collator, goldfish_dataset: dropped labels are -100
    trainer_audit.py  a callback that audits the model that a `Trainer` trains
    trained_rows.py   counts the documents that it really trains, for this callback
    token_runs.py     recognises documents in rows that are cut, split, packed or padded
    split.py          split_for_audit: draws a control before training
    axolotl.py        goldfish and audits as a plugin of axolotl
    memfree.py        MemFreeLogitsProcessor for `generate`: blocks n-grams of the documents

Each class documents its differences from memguard's own trainer. Features that need the whole step,
the mesh or the manifest require memguard's own trainer.
"""
