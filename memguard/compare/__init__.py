"""Comparison of settings: the runs of a sweep, and their results. No torch.

    SWEEP.yaml -> sweep.py -> runs -> (workflows: train) -> comparison.py -> comparison.json

    sweep.py          expands a sweep into runs, each with the hash of all that decides its outcome;
                      determines which of them are finished and which continue
    expansion.py      builds and checks run configurations, with equal labels if requested
    runs.py           reads a run's report and the scores of its documents, canaries and items
    paired.py         tests each setting against the first one, document by document
    utility.py        the held-out loss or a shared task over seeds, and its differences
    front.py          computes risk and utility over seeds
    recommendation.py chooses a setting by a rule, and says why
    comparison.py     checks that runs are comparable, builds the record, and lists all its rows
    fixes.py          rules that derive new settings from an audit's verdict

Training itself is not imported: `workflows` starts each run as a child process and `report` renders
the record. A run is finished if its record has the content hash of all its inputs, so a sweep that
was interrupted or whose settings were edited trains only the missing runs.
"""

from memguard.compare.comparison import (
    compare_runs,
    describe_compiled,
    list_comparison_rows,
    list_finished,
)
from memguard.compare.expansion import find_early_end
from memguard.compare.fixes import Copies, Findings, Fix, find_fix
from memguard.compare.runs import FinishedRun
from memguard.compare.sweep import (
    Sweep,
    SweepRun,
    describe_sweep,
    find_state,
    is_finished,
    load_sweep,
    mark_finished,
    prepare_folder,
)
