"""Settings side by side: which runs a sweep needs, and what they found. No torch.

    SWEEP.yaml -> sweep.py -> runs -> (workflows: train) -> comparison.py -> comparison.json

    sweep.py          a sweep's settings as runs, each with the hash of all that decides its outcome
    expansion.py      its blocks into checked run configurations, of equal tokens where requested
    state.py          which runs of a sweep are finished, and which go on
    audited.py        a run's report and document scores, and what runs must share
    comparison.py     finished runs into one comparison record, with paired tests
    front.py          risk against utility over seeds, and which setting is recommended
    fixes.py          from an audit's verdict to other settings: a table of rules

Training itself is not imported: `workflows` starts each run as a child process and `report`
renders the record. A run is
finished when its record has the content hash of everything that went into it, so a sweep that was
stopped, or whose settings were edited, trains only what is missing.
"""

from memguard.compare.audited import FinishedRun, find_recited
from memguard.compare.comparison import build_comparison, compare_runs
from memguard.compare.expansion import find_early_end
from memguard.compare.fixes import Copies, Findings, Fix, find_fix
from memguard.compare.state import (
    describe_sweep,
    find_state,
    is_finished,
    mark_finished,
    prepare_folder,
    read_finished,
)
from memguard.compare.sweep import Sweep, SweepRun, load_sweep
