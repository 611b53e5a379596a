"""One training run, in this order: checks, documents, model, training, export, audit.

checks.py          `CheckedRun`: settings that passed every check that needs no torch
train.py           a run: prepares, trains, exports, audits
memory.py          replaces `auto`, refuses a run that cannot fit, explains a lack of memory
data.py            documents, rows and control of a run, for training and for the dry run
compile.py         decides whether a run's blocks are compiled, after trying one on each rank
monitor.py         audits during training: selects documents and scores them
export.py          writes a step's model, or an adapter merged into its base
seeds.py           writes the model of a mezo run from its base and the numbers of its seeds
hub.py             sends a run's model or adapter to the hub, with a card, or lists what it would
dry_run.py         what a run will train on and what its audit can measure, without weights
"""
