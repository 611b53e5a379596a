"""Audits during training, and the actions of a memorization budget.

    step 0     record what greedy decoding extracts from the sample before training
    step n     learned = extracted now and not at step 0;  over the limit: learned / N > limit
    tighten    a document whose teacher-forced accuracy has risen halfway from its value at step 0
               to `EARLY_SIGNAL` moves one level up, together with its near-duplicates. If a larger
               share of a bucket's sample than the limit has reached a level, the bucket's documents
               outside the sample move up too
    stop       the weights of the last step within the limit are kept

Teacher-forced accuracy rises before a document can be extracted and is used as the early signal;
the limit applies to generated text. The sample is the same at every step. All ranks audit
together, get the same numbers and make the same decisions.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memguard.config import BudgetConfig
from memguard.mitigation.k_schedule import KSchedule
from memguard.records import ManifestEntry, ResultRow, WatchedLine, fill_count, fill_row

EARLY_SIGNAL = 0.9
"""Teacher-forced accuracy at which a document counts as about to be extracted (share)."""
_NEVER = -1
# Absorbs floating-point error: halfway from 13 of 50 tokens to 90 % is 29 of 50, which floats do
# not represent exactly. Distinct shares of correct tokens differ by far more than this.
_ROUNDING = 1e-9


def find_over_limit(rates: Mapping[str, float], limit: float) -> list[str]:
    """Return the buckets of which a larger share than the limit is extracted, the worst first."""
    over = [name for name, rate in rates.items() if rate > limit]
    return sorted(over, key=lambda name: -rates[name])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemorizationSnapshot:
    """Extraction results of N documents."""

    token_accuracy_N: NDArray[np.float64]
    """Teacher-forced token accuracy (share)."""
    verbatim_N: NDArray[np.bool_]
    near_verbatim_N: NDArray[np.bool_] | None
    """Extracted near-verbatim by greedy generation; None if nothing is generated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """The documents that are audited during training."""

    document_N: NDArray[np.int64]
    """Indices of the documents in the corpus."""
    sha256: str
    """Hash of the documents, their target tokens and the probe's settings."""
    ask: Callable[[], MemorizationSnapshot]
    """Runs the probe on the current weights; every rank calls it and gets the same result."""


class MemorizationMonitor:
    """Audits the sample every few steps and applies a budget."""

    def __init__(
        self,
        sample: Sample,
        manifest: Sequence[ManifestEntry],
        k_schedule: KSchedule,
        *,
        every_steps: int,
        budget: BudgetConfig | None = None,
    ) -> None:
        """Set the sample, the interval and the budget."""
        self.every_steps, self.budget = every_steps, budget
        self._sample, self._k_schedule = sample, k_schedule
        self._buckets = np.array([entry.bucket for entry in manifest], dtype=object)
        self._roles = np.array([entry.role for entry in manifest], dtype=object)
        self._clusters = np.array([entry.cluster for entry in manifest], dtype=np.int64)
        size = len(sample.document_N)
        self._accuracy_before_N = np.full(size, np.nan)
        self._extracted_before_N = np.zeros(size, dtype=bool)
        self._last_good = np.full(1, _NEVER, dtype=np.int64)

    @property
    def arrays(self) -> Mapping[str, NDArray[np.generic]]:
        """Arrays that a checkpoint must store; filled in place when a run resumes."""
        return {
            "level": self._k_schedule.level_of,
            "watch.accuracy_before": self._accuracy_before_N,
            "watch.back_before": self._extracted_before_N,
            "watch.last_good_step": self._last_good,
        }

    @property
    def sample_sha256(self) -> str:
        """Hash that identifies the sample."""
        return self._sample.sha256

    @property
    def last_good_step(self) -> int | None:
        """The last audited step within the limit; None if there is none yet."""
        step = int(self._last_good[0])
        return None if step == _NEVER else step

    @property
    def stops(self) -> bool:
        """Whether training stops when the limit is exceeded."""
        return self.budget is not None and self.budget.action == "stop"

    @property
    def tightens(self) -> bool:
        """Whether audits may change the mitigations of documents."""
        return self.budget is not None and self.budget.action == "tighten"

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether to audit after this step; the last step is always audited."""
        return is_last or step % self.every_steps == 0

    def audit(self, step: int, *, is_last: bool = False) -> WatchedLine:
        """Audit the sample; move documents up if the budget requires it and steps follow."""
        started = time.perf_counter()
        now = self._sample.ask()
        extracted_N = self._find_extracted(now)
        if step == 0:
            self._accuracy_before_N[:] = now.token_accuracy_N
            self._extracted_before_N[:] = extracted_N
        assert not np.isnan(self._accuracy_before_N).any(), "step 0 is audited first"
        learned_N = extracted_N & ~self._extracted_before_N
        over_limit = self._find_over_limit(learned_N)
        if not over_limit:
            self._last_good[0] = step
        if self.tightens and step > 0 and not is_last:
            self._tighten(now)
        names = self._list_buckets()
        num_up = self._k_schedule.num_levels_up
        return WatchedLine(
            step=step,
            results=tuple(row for n in names for row in self._tabulate(n, step, now, learned_N)),
            trained=self._list_buckets("trained"),
            num_tightened={n: int((num_up[self._buckets == n] > 0).sum()) for n in names},
            over_limit=over_limit,
            audit_s=round(time.perf_counter() - started, 3),
        )

    def _find_extracted(self, now: MemorizationSnapshot) -> NDArray[np.bool_]:
        if now.near_verbatim_N is None:
            return now.verbatim_N
        verbatim = self.budget is not None and self.budget.metric == "verbatim"
        return now.verbatim_N if verbatim else now.near_verbatim_N

    def _find_over_limit(self, learned_N: NDArray[np.bool_]) -> list[str]:
        if self.budget is None:
            return []
        names = self._list_buckets("trained")
        rates = {name: float(learned_N[self._in_bucket(name)].mean()) for name in names}
        return find_over_limit(rates, self.budget.limit)

    def _tighten(self, now: MemorizationSnapshot) -> None:
        """Move up documents whose teacher-forced accuracy is halfway to extraction."""
        assert self.budget is not None, "only a budget tightens"
        goal = EARLY_SIGNAL if self.budget.metric != "verbatim" else 1.0
        halfway_N = now.token_accuracy_N >= (self._accuracy_before_N + goal) / 2 - _ROUNDING
        halfway_N &= ~self._extracted_before_N
        document_N = self._sample.document_N
        self._move_up(document_N[halfway_N & (self._roles[document_N] == "trained")])
        num_up = self._k_schedule.num_levels_up
        behind = np.zeros(len(num_up), dtype=bool)
        for name in self._list_buckets("trained"):
            num_up_N = num_up[document_N[self._in_bucket(name)]]
            reached = [up for up in num_up_N if (num_up_N >= up).mean() > self.budget.limit]
            behind |= (self._buckets == name) & (num_up < max(reached, default=0))
        behind[document_N] = False
        self._move_up(np.flatnonzero(behind))

    def _move_up(self, documents: NDArray[np.int64]) -> None:
        """Move documents and their trained near-duplicates one level up."""
        in_cluster = np.isin(self._clusters, self._clusters[documents])
        in_cluster &= np.isin(self._roles, ("trained", "background"))
        self._k_schedule.tighten(np.flatnonzero(in_cluster))

    def _list_buckets(self, role: str | None = None) -> list[str]:
        """Return the names of the sample's buckets, in the order of its documents."""
        document_N = self._sample.document_N
        if role is not None:
            document_N = document_N[self._roles[document_N] == role]
        return list(dict.fromkeys(self._buckets[document_N]))

    def _in_bucket(self, name: str) -> NDArray[np.bool_]:
        in_bucket_N: NDArray[np.bool_] = self._buckets[self._sample.document_N] == name
        return in_bucket_N

    def _tabulate(
        self, name: str, step: int, now: MemorizationSnapshot, learned_N: NDArray[np.bool_]
    ) -> Iterator[ResultRow]:
        """Yield the rows of a bucket."""
        in_bucket_N = self._in_bucket(name)
        row = ResultRow(
            step=step,
            probe="extraction",
            metric="verbatim",
            statistic="rate",
            bucket=name,
            num_documents=int(in_bucket_N.sum()),
        )
        yield fill_count(row, int(now.verbatim_N[in_bucket_N].sum()))
        near = replace(row, metric="near_verbatim")
        if now.near_verbatim_N is None:
            yield fill_row(near, None, "", why_not="no text was generated")
        else:
            yield fill_count(near, int(now.near_verbatim_N[in_bucket_N].sum()))
        yield fill_count(replace(row, metric="learned"), int(learned_N[in_bucket_N].sum()))
        accuracy = replace(row, metric="token_accuracy", statistic="mean")
        yield fill_row(accuracy, float(now.token_accuracy_N[in_bucket_N].mean()), "")
