"""Which documents are trained with a lower k: rungs, one above the other.

    rung   0   1   2   3        with goldfish k=8, 'k_by_dose: {16: 3}' and tightening
    k      8   4   3   2        and above the last rung no label is left

A document's rung depends on its dose when training starts, and rises where a risk budget finds that
it is being learnt by heart. Masks of rising rungs are nested in modes `hash` and `hash_reference`,
the only ones that go with tightening: a label that was dropped stays dropped.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.config import GoldfishConfig, MitigationConfig
from memguard.config.mitigations import find_mitigation
from memguard.mitigation import Mitigations, build_mitigations
from memguard.records import IGNORE_LABEL, ManifestEntry

_TIGHTER_K = (4, 2)
"""What tightening steps through, below the k a document was trained with."""


class Ladder:
    """Masks the labels of each document as its rung says."""

    def __init__(self, rungs: Sequence[Mitigations], rung_of: NDArray[np.int8]) -> None:
        """Take the rungs and where each document stands.

        Args:
            rungs: from what most documents are trained with to the strictest.
            rung_of: ``[num_documents]`` rung of each; ``len(rungs)`` leaves no label. Changed in
                place, and part of a checkpoint.
        """
        self.rungs, self.rung_of = tuple(rungs), rung_of
        self._start = rung_of.copy()

    @property
    def target_drop_rate(self) -> float | None:
        """Share of the labels that should be dropped; None where documents differ in it."""
        return None if self.rung_of.any() else self.rungs[0].target_drop_rate

    @property
    def num_rungs_up(self) -> NDArray[np.int8]:
        """``[num_documents]`` rungs each stands above where it started."""
        return self.rung_of - self._start

    def tighten(self, documents: NDArray[np.integer]) -> int:
        """Move documents one rung up; return how many were not at the top yet."""
        movable = documents[self.rung_of[documents] < len(self.rungs)]
        self.rung_of[movable] += 1
        return len(movable)

    def mask_labels(
        self,
        document: int,
        input_ids: NDArray[np.integer],
        labels: NDArray[np.int64],
        generator: np.random.Generator,
    ) -> NDArray[np.int64]:
        """Return a copy of a whole document's labels with the dropped ones ignored.

        Args:
            document: its index in the corpus.
            input_ids: ``[N]`` its tokens.
            labels: ``[N]`` in transformers' convention.
            generator: for the settings that draw.
        """
        rung, last = int(self.rung_of[document]), len(self.rungs) - 1
        # Every rung draws as much: what else is in a row loses the labels it would have lost.
        masked = self.rungs[min(rung, last)].mask_labels(input_ids, labels, generator=generator)
        if rung > last:
            masked[:] = IGNORE_LABEL
        return masked


def build_ladder(
    configs: Sequence[MitigationConfig],
    manifest: Sequence[ManifestEntry],
    *,
    can_tighten: bool,
    special_ids: Sequence[int],
    token_texts: Callable[[], Sequence[str]] | None = None,
) -> Ladder:
    """Make the rungs of a run and put its documents on them.

    Args:
        configs: entries of `mitigations:`.
        manifest: of the run's documents.
        can_tighten: whether documents may be moved up.
        special_ids: see `build_mitigations`.
        token_texts: see `build_mitigations`.
    """
    goldfish = find_mitigation(configs, GoldfishConfig)
    k_by_dose = {} if goldfish is None else dict(sorted(goldfish.k_by_dose.items()))
    lower = set(k_by_dose.values()) | (set(_TIGHTER_K) if can_tighten else set())
    ks = sorted((k for k in lower if goldfish is None or k < goldfish.k), reverse=True)
    rung_of = np.zeros(len(manifest), dtype=np.int8)
    if k_by_dose:
        dose = compute_doses(manifest)
        for least, k in k_by_dose.items():
            rung_of[dose >= least] = 1 + ks.index(k)
    rungs = [
        build_mitigations(_with_k(configs, k), special_ids=special_ids, token_texts=token_texts)
        for k in (None, *ks)
    ]
    return Ladder(rungs, rung_of)


def compute_doses(manifest: Sequence[ManifestEntry]) -> NDArray[np.int64]:
    """Return ``[num_documents]`` how often each is planned to be trained, near-duplicates counted.

    Background documents count once: how often the schedule takes them is not planned.
    """
    planned = np.array(
        [1 if entry.role == "background" else entry.planned_repetitions for entry in manifest],
        dtype=np.int64,
    )
    cluster = np.array([entry.cluster for entry in manifest], dtype=np.int64)
    _, cluster = np.unique(cluster, return_inverse=True)
    doses: NDArray[np.int64] = np.bincount(cluster, weights=planned).astype(np.int64)[cluster]
    return doses


def _with_k(configs: Sequence[MitigationConfig], k: int | None) -> list[MitigationConfig]:
    """Return the settings with a goldfish of this k; None leaves them as they are."""
    if k is None:
        return list(configs)
    others = [each for each in configs if not isinstance(each, GoldfishConfig)]
    goldfish = find_mitigation(configs, GoldfishConfig) or GoldfishConfig(name="goldfish")
    return [goldfish.model_copy(update={"k": k, "k_by_dose": {}}), *others]
