"""The command line: the only place that sees everything and joins it.

    app.py           the commands and their arguments
    errors.py        every error as one line and the right exit code
    last_words.py    what a process says when it ends with an error, and to whom
    launching.py     --nproc: the same command on several processes, which end as one
    training.py      a run: prepare, train, export, audit
    feeding.py       documents and rows of a run, for training and for the dry run
    watching.py      audits inside training: which documents, and how the model is asked
    start.py         what a run starts from: a checkpoint, or random weights
    run_folder.py    one run, one folder: kept to one process and to its settings
    subjects.py      what the audit of a run measures
    any_checkpoint.py  the same of a model memguard did not train
    auditing.py      one audit: model and base in turn, report and records out
    scorers.py       a model that is loaded when asked and freed after
    audit_request.py what `memguard audit` was asked
    given_paths.py   every path that was given: told before anything is loaded
    plan_request.py  what `memguard plan` was asked
    planning.py      one plan: which meshes hold a step, and what would make one fit
    plan_screen.py   a plan on the screen
    dry_running.py   the dry run of a training configuration
    audit_outlook.py what the audit of a run will be able to say
    dry_run_screen.py  a dry run on the screen
    plan_command.py  `memguard plan`: these together
    mesh_option.py   a mesh on the command line
    sweeping.py      a sweep: every run that is not finished, then the comparison
    children.py      its runs as child processes: some at a time, ended as one
    comparing.py     finished runs side by side: comparison.json, its page and chart
    fixing.py        a finished run again, changed by what its audit found
    forgetting.py    a run that trains its model on until it forgets that
    rendering.py     pages made again from the JSON beside them

Commands import what they need when they run: a wrong setting is told before torch is loaded.
"""

from memguard.cli.errors import run_app


def main() -> None:
    """Run the command line; never returns."""
    run_app()


__all__ = ["main"]
