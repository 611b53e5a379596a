"""One function per command, readable from top to bottom. The command line calls nothing else.

train.py           a run: prepares, trains, exports, audits
setup.py           process group, device, model and mesh of a run
row_clipping.py    clipping and noise of a run with dp_sgd
data.py            documents and rows of a run, for training and for the dry run
control_outlook.py what the control of a run can show, or why there is none
run_folder.py      one folder per run: locks it and checks its settings and files
audit.py           one audit: measures model and base model, writes report and records
audit_request.py   checks the arguments of `audit` before torch is imported
audit_arguments.py the arguments of an audit as Python has them
format_arguments.py the format of an audit's documents: options, and arguments of a call
audit_inputs.py    documents and model for the audit of a run, read from the run folder
audit_report.py    the report of an audit from what was measured
audit_utility.py   benchmark tasks of an audit: opens them, runs them while a model is loaded, saves
audit_output.py    pages of an audit; renders them again from its report
any_model.py       documents and model for the audit of a model memguard did not train
trained_counts.py  how often documents were trained, as a callback counted it
wrapped_models.py  models in memory that peft, torch.compile or DDP wraps
model_in_memory.py a model of the program that calls memguard, and how it is borrowed
model_identity.py  names and hashes of the models of an audit
audited_model.py   a model of an audit, loaded at first use and freed afterwards
audit_context.py   resources of an audit other than its models
audit_progress.py  shows how much of each stage of an audit is done
audit_callback.py  audits during training: selects documents and scores them
compare.py         a sweep, finished runs or the fix of a run; renders pages again from JSON
sweep.py           trains the unfinished runs of a sweep in child processes, then compares
report_links.py    links the reports of a sweep to its comparison
sweep_progress.py  what a run of a sweep does, read from its files
gate.py            judges an audit by a policy, and writes the result as one set
bundle_format.py   the archive of a bundle, its statement, and the check of both
bundle.py          packs the files of an audit, with their hashes, into one archive
compare_runs.py    compares finished runs: comparison.json, its page and chart
fix.py             trains a finished run again, changed according to its audit
export.py          merges an adapter into its base model and compares the logits
hub.py             sends a run's model or adapter to the hub, with a card, or lists what it would
list_probes.py     the installed probes, their needs and metrics
plan.py            estimates memory and lists the meshes that fit a training step
doctor.py          libraries, devices and collectives of this machine
backends.py        starts ranks that test a backend's collectives, and reads their reports
collective_checks.py  what one of these ranks runs
dry_run.py         what a run will train on and what its audit can measure, without weights
verify.py          compares a run's files with their recorded hashes
requests.py        checks the arguments of other commands, and paths, before torch is imported
run_checks.py      checks settings against processes, libraries and the model's positions
launch.py          --nproc: runs one command as several processes and reports errors
compile_choice.py  decides whether a run's blocks are compiled
block_probe.py     compiles one block on each rank alone, to find whether that works
memory_check.py    replaces `auto`, refuses a run that cannot fit, explains a lack of memory
processes.py       number of processes of a command on this machine, or of torchrun
results.py         what the commands return to Python
python_arguments.py  functions for programs: checked arguments, quiet libraries, our errors
"""
