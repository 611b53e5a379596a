"""One function per command, readable from top to bottom. The command line calls nothing else.

common/     what audits and training runs share: folders, ranks, checks of settings
auditing/   `memguard audit`: checks, documents, models, measuring, the report
training/   `memguard train`: checks, documents, training, export, audits meanwhile

compare.py         a sweep, finished runs or the fix of a run; renders pages again from JSON
sweep.py           trains the unfinished runs of a sweep in child processes, and shows them
compare_runs.py    compares finished runs: comparison.json, its page and chart
fix.py             trains a finished run again, changed according to its audit
gate.py            judges an audit by a policy, and writes the result as one set
bundle_format.py   the archive of a bundle, its statement, and the check of both
bundle.py          packs the files of an audit, with their hashes, into one archive
plan.py            estimates memory and lists the meshes that fit a training step
doctor.py          libraries, devices and collectives of this machine
collective_checks.py  starts ranks that test a backend's collectives, and reads their reports
verify.py          compares a run's files with their recorded hashes
results.py         what the commands return to Python

Rooms import downwards: training, auditing, common.
"""
