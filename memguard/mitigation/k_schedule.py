"""The schedule of k: each document has a level, and k decreases with the level.

    level  0   1   2   3        with goldfish k=8, 'k_by_dose: {16: 3}' and tightening
    k      8   4   3   2        above the last level all labels are dropped

A document's level at the start of training depends on its dose. The level rises if a risk budget
finds that the document is being memorized. Masks of rising levels are nested in modes `hash` and
`hash_reference`, the only modes that support tightening: a label that was dropped stays dropped.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.config import GoldfishConfig, MitigationConfig
from memguard.config.mitigations import find_mitigation
from memguard.mitigation import Mitigations, build_mitigations
from memguard.records import IGNORE_LABEL, ManifestEntry

_TIGHTER_K = (4, 2)
"""The values of k that tightening steps through, if below the k of the document."""


class KSchedule:
    """Masks the labels of each document with the mitigations of its level."""

    def __init__(self, levels: Sequence[Mitigations], level_of: NDArray[np.int8]) -> None:
        """Store the mitigations of each level, the default first, and the level of each document.

        Level ``len(levels)`` drops all labels. ``level_of`` ``[num_documents]`` is changed in
        place, and part of a checkpoint.
        """
        self.levels, self.level_of = tuple(levels), level_of
        self._start = level_of.copy()

    @property
    def num_levels_up(self) -> NDArray[np.int8]:
        """``[num_documents]`` number of levels by which each document has risen."""
        return self.level_of - self._start

    def tighten(self, documents: NDArray[np.integer]) -> int:
        """Move documents one level up; return how many were not yet at the top."""
        movable = documents[self.level_of[documents] < len(self.levels)]
        self.level_of[movable] += 1
        return len(movable)

    def mask_labels(
        self,
        document: int,
        input_ids: NDArray[np.integer],
        labels: NDArray[np.int64],
        generator: np.random.Generator,
    ) -> NDArray[np.int64]:
        """Return a copy of a whole document's labels ``[N]`` with the dropped ones ignored.

        ``document`` is its index in the corpus; labels are in transformers' convention.
        """
        level, last = int(self.level_of[document]), len(self.levels) - 1
        # Every level draws as many numbers, so the masks of other documents do not change.
        masked = self.levels[min(level, last)].mask_labels(input_ids, labels, generator=generator)
        if level > last:
            masked[:] = IGNORE_LABEL
        return masked


def build_k_schedule(
    configs: Sequence[MitigationConfig],
    manifest: Sequence[ManifestEntry],
    *,
    can_tighten: bool,
    special_ids: Sequence[int],
    token_texts: Callable[[], Sequence[str]] | None = None,
) -> KSchedule:
    """Build the levels of a run and assign its documents to them.

    ``can_tighten``: documents may be moved up. The last two arguments are those of
    `build_mitigations`.
    """
    goldfish = find_mitigation(configs, GoldfishConfig)
    k_by_dose = {} if goldfish is None else dict(sorted(goldfish.k_by_dose.items()))
    lower = set(k_by_dose.values()) | (set(_TIGHTER_K) if can_tighten else set())
    ks = sorted((k for k in lower if goldfish is None or k < goldfish.k), reverse=True)
    level_of = np.zeros(len(manifest), dtype=np.int8)
    if k_by_dose:
        dose = compute_doses(manifest)
        for least, k in k_by_dose.items():
            level_of[dose >= least] = 1 + ks.index(k)
    levels = [
        build_mitigations(_with_k(configs, k), special_ids=special_ids, token_texts=token_texts)
        for k in (None, *ks)
    ]
    return KSchedule(levels, level_of)


def compute_doses(manifest: Sequence[ManifestEntry]) -> NDArray[np.int64]:
    """Return the planned repetitions of each document and its near-duplicates, ``[num_documents]``.

    Background documents count once: their number of repetitions is not planned.
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
    """Return the settings with a goldfish of this k; None leaves them unchanged."""
    if k is None:
        return list(configs)
    others = [config for config in configs if not isinstance(config, GoldfishConfig)]
    goldfish = find_mitigation(configs, GoldfishConfig) or GoldfishConfig(name="goldfish")
    return [goldfish.model_copy(update={"k": k, "k_by_dose": {}}), *others]
