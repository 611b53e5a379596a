"""Audits during training, and what a risk budget does about them.

    step 0     what greedy decoding extracts of the sample before training
    step n     learnt = extracted now, and not at step 0;  over the limit: learnt / N > limit
    tighten    a document whose teacher-forced accuracy has come halfway from that at step 0 to
               `EARLY_SIGNAL` goes one rung up, and its near-duplicates with it; as far as more of
               a bucket's sample has gone than the limit allows, so do its other documents
    stop       the weights of the last step within the limit are kept

Teacher-forced accuracy rises before anything can be extracted: it is the early signal, and the
limit is held against generated text. The sample is the same at every step. All ranks audit
together, get the same numbers and decide alike.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.config import BudgetConfig
from memguard.mitigation.k_schedule import Ladder
from memguard.records import ManifestEntry, WatchedBucket, WatchedStep

EARLY_SIGNAL = 0.9
"""Teacher-forced accuracy at which a document counts as about to be extracted (share)."""
_NEVER = -1
# Shares of right tokens differ by far more: of 13 of 50, halfway to 90 % is 29 of 50 in tokens, but
# not in floating point.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recited:
    """What is extracted and known of N documents."""

    token_accuracy_N: NDArray[np.float64]
    """Teacher-forced (share)."""
    verbatim_N: NDArray[np.bool_]
    near_verbatim_N: NDArray[np.bool_] | None
    """By greedy generation; None where nothing is generated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """The documents that are asked for."""

    document_N: NDArray[np.int64]
    """Their indices in the corpus."""
    sha256: str
    """Of the documents, their tokens that are asked for and the settings of the probe."""
    ask: Callable[[], Recited]
    """Asks the model as it is now; every rank calls it and gets the same."""


class Watch:
    """Asks the sample every few steps and acts on a budget."""

    def __init__(
        self,
        sample: Sample,
        manifest: Sequence[ManifestEntry],
        ladder: Ladder,
        *,
        every_steps: int,
        budget: BudgetConfig | None = None,
    ) -> None:
        """Take what is asked and what may be done about it.

        Args:
            sample: the documents.
            manifest: of all documents of the run.
            ladder: moved by action ``tighten``.
            every_steps: steps between audits.
            budget: None only looks.
        """
        self.every_steps, self.budget = every_steps, budget
        self._sample, self._ladder = sample, ladder
        self._buckets = np.array([entry.bucket for entry in manifest], dtype=object)
        self._roles = np.array([entry.role for entry in manifest], dtype=object)
        self._clusters = np.array([entry.cluster for entry in manifest], dtype=np.int64)
        size = len(sample.document_N)
        self._accuracy_before_N = np.full(size, np.nan)
        self._back_before_N = np.zeros(size, dtype=bool)
        self._last_good = np.full(1, _NEVER, dtype=np.int64)

    @property
    def arrays(self) -> Mapping[str, NDArray[np.generic]]:
        """What a checkpoint must hold; filled in place when a run goes on."""
        return {
            "rung": self._ladder.rung_of,
            "watch.accuracy_before": self._accuracy_before_N,
            "watch.back_before": self._back_before_N,
            "watch.last_good_step": self._last_good,
        }

    @property
    def sample_sha256(self) -> str:
        """What tells the sample from another one."""
        return self._sample.sha256

    @property
    def last_good_step(self) -> int | None:
        """The last audited step within the limit; None before there is one."""
        step = int(self._last_good[0])
        return None if step == _NEVER else step

    @property
    def stops(self) -> bool:
        """Whether a broken limit ends the training."""
        return self.budget is not None and self.budget.action == "stop"

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether an audit belongs after this step; after the last one it always does."""
        return is_last or step % self.every_steps == 0

    def look(self, step: int, *, is_last: bool = False) -> WatchedStep:
        """Audit the sample after ``step`` steps and move documents up where the budget asks.

        Args:
            step: steps taken.
            is_last: whether no step follows, for which documents could be moved.
        """
        started = time.perf_counter()
        now = self._sample.ask()
        back_N = self._find_extracted(now)
        if step == 0:
            self._accuracy_before_N[:] = now.token_accuracy_N
            self._back_before_N[:] = back_N
        assert not np.isnan(self._accuracy_before_N).any(), "step 0 is audited first"
        learnt_N = back_N & ~self._back_before_N
        over_limit = self._find_over_limit(learnt_N)
        if not over_limit:
            self._last_good[0] = step
        tightens = self.budget is not None and self.budget.action == "tighten"
        if tightens and step > 0 and not is_last:
            self._tighten(now)
        return WatchedStep(
            step=step,
            buckets=[self._describe(name, now, learnt_N) for name in self._list_buckets()],
            over_limit=over_limit,
            audit_s=round(time.perf_counter() - started, 3),
        )

    def _find_extracted(self, now: Recited) -> NDArray[np.bool_]:
        if now.near_verbatim_N is None:
            return now.verbatim_N
        verbatim = self.budget is not None and self.budget.metric == "verbatim"
        return now.verbatim_N if verbatim else now.near_verbatim_N

    def _find_over_limit(self, learnt_N: NDArray[np.bool_]) -> list[str]:
        if self.budget is None:
            return []
        return [
            name
            for name in self._list_buckets("trained")
            if learnt_N[self._in_bucket(name)].mean() > self.budget.limit
        ]

    def _tighten(self, now: Recited) -> None:
        """Move up what is halfway to being extracted, by its teacher-forced accuracy."""
        assert self.budget is not None, "a budget asks for it"
        goal = EARLY_SIGNAL if self.budget.metric != "verbatim" else 1.0
        halfway_N = now.token_accuracy_N >= (self._accuracy_before_N + goal) / 2 - _ROUNDING
        halfway_N &= ~self._back_before_N
        document_N = self._sample.document_N
        self._move_up(document_N[halfway_N & (self._roles[document_N] == "trained")])
        num_up = self._ladder.num_rungs_up
        behind = np.zeros(len(num_up), dtype=bool)
        for name in self._list_buckets("trained"):
            num_up_N = num_up[document_N[self._in_bucket(name)]]
            reached = [up for up in num_up_N if (num_up_N >= up).mean() > self.budget.limit]
            behind |= (self._buckets == name) & (num_up < max(reached, default=0))
        behind[document_N] = False
        self._move_up(np.flatnonzero(behind))

    def _move_up(self, documents: NDArray[np.int64]) -> None:
        """Move documents one rung up, and what is nearly the same and trained as well."""
        alike = np.isin(self._clusters, self._clusters[documents])
        alike &= np.isin(self._roles, ("trained", "background"))
        self._ladder.tighten(np.flatnonzero(alike))

    def _list_buckets(self, role: str | None = None) -> list[str]:
        """Return the names of the sample's buckets, in the order of its documents."""
        document_N = self._sample.document_N
        if role is not None:
            document_N = document_N[self._roles[document_N] == role]
        return list(dict.fromkeys(self._buckets[document_N]))

    def _in_bucket(self, name: str) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._buckets[self._sample.document_N] == name
        return found

    def _describe(self, name: str, now: Recited, learnt_N: NDArray[np.bool_]) -> WatchedBucket:
        here_N = self._in_bucket(name)
        return WatchedBucket(
            bucket=name,
            role=self._roles[self._sample.document_N[here_N][0]],
            num_documents=int(here_N.sum()),
            num_verbatim=int(now.verbatim_N[here_N].sum()),
            num_near_verbatim=None
            if now.near_verbatim_N is None
            else int(now.near_verbatim_N[here_N].sum()),
            num_learned=int(learnt_N[here_N].sum()),
            mean_token_accuracy=float(now.token_accuracy_N[here_N].mean()),
            num_tightened=int((self._ladder.num_rungs_up[self._buckets == name] > 0).sum()),
        )
