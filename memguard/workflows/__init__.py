"""One function per command, each reading top to bottom. The command line calls nothing else.

train.py           prepare, train, export, audit: a run
setup.py           process group, device, model and mesh of a run
data.py            documents and rows of a run, for training and for the dry run
run_folder.py      one run, one folder: locked, and kept to its settings
audit.py           one audit: model and base model in turn; report and records written
audit_inputs.py    what the audit of a run measures, read from the run folder
audit_output.py    pages of an audit, and its end; rendered again from its report
any_model.py       the same for a model memguard did not train
audit_context.py   what an audit works with; models are loaded at their first use and freed after
audit_callback.py  audits during training: which documents, and how they are scored
compare.py         a sweep, finished runs or the fix of one; pages rendered again from JSON
sweep.py           a sweep: its unfinished runs in child processes, then the comparison
compare_runs.py    finished runs compared: comparison.json, its page and chart
fix.py             a finished run again, changed by what its audit found
plan.py            which meshes hold a training step
dry_run.py         what a run will do and what its audit can say, without weights
verify.py          what of a run is still what was written
requests.py        arguments, and the paths in them, checked before torch is imported
run_checks.py      settings that the processes, libraries or the model's positions rule out
launch.py          --nproc: one command on several processes, and their errors
process_limits.py  how many processes this machine takes
"""
