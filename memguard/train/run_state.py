"""What a training is given besides the model: its rows, its folder and its ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from memguard.data.corpus import Corpus
from memguard.data.loader import Loader
from memguard.mitigation.k_schedule import KSchedule
from memguard.records.sealed import FileSum
from memguard.runtime import Console, Runtime
from memguard.train.metrics import MetricsLog


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """The rows of a run in their order, and the mitigations that mask labels or losses."""

    loader: Loader
    k_schedule: KSchedule
    """Mitigations by level: how losses are reduced, how many labels are dropped."""

    @property
    def corpus(self) -> Corpus:
        """Documents of the rows, and those of the held-out loss."""
        return self.loader.corpus


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The folder of a run, what may be resumed from it, and the ranks that train it."""

    folder: Path
    key: str
    """Hash of settings and documents; a checkpoint with another key is refused."""
    runtime: Runtime
    console: Console
    check_folder: Callable[[], None]
    """Raises, on every rank, if the run's folder is no longer the one that was locked."""
    base: Mapping[str, FileSum] = field(default_factory=dict)
    """Files of the model before training; empty if all weights are trained."""
    track: Callable[[MetricsLog], None] | None = None
    """Sends the lines of the log to the trackers of the run."""
    peak_s: tuple[float, ...] | None = None
    """Seconds of matmuls at a GPU's peak for a token, a pair of tokens that attend, and a label;
    None if unknown."""
    must_resume: str | None = None
    """Why the run must resume from a checkpoint; None if it may start at step 0."""
