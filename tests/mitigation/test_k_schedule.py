"""Levels: a lower k for documents of a high dose, and for those that are moved up."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from record_examples import make_entry

from memguard.config import GoldfishConfig, MitigationConfig
from memguard.config.mitigations import TokenDropoutConfig
from memguard.mitigation import Goldfish, build_mitigations
from memguard.mitigation.k_schedule import KSchedule, build_k_schedule, compute_doses
from memguard.records import IGNORE_LABEL, ManifestEntry

IDS = np.random.default_rng(0).integers(0, 500, 400).astype(np.int32)


def entry(cluster: int, planned: int, role: Any = "trained") -> ManifestEntry:
    return make_entry(
        f"d{cluster}-{planned}", role=role, planned_repetitions=planned, cluster=cluster
    )


MANIFEST = [entry(0, 1), entry(1, 16), entry(2, 64), entry(3, 9), entry(3, 9)]


def goldfish(**fields: Any) -> GoldfishConfig:
    return GoldfishConfig.model_validate({"name": "goldfish", **fields})


def build(*configs: MitigationConfig, can_tighten: bool = False) -> KSchedule:
    return build_k_schedule(configs, MANIFEST, can_tighten=can_tighten, special_ids=[])


def dropped(k_schedule: KSchedule, document: int) -> NDArray[np.bool_]:
    labels = k_schedule.mask_labels(document, IDS, IDS.astype(np.int64), np.random.default_rng(0))
    mask: NDArray[np.bool_] = labels == IGNORE_LABEL
    return mask


def dropped_by(config: GoldfishConfig) -> NDArray[np.bool_]:
    alone = build_mitigations([config], special_ids=[])
    labels = alone.mask_labels(IDS, IDS.astype(np.int64), generator=np.random.default_rng(0))
    mask: NDArray[np.bool_] = labels == IGNORE_LABEL
    return mask


def test_a_dose_counts_near_duplicates_and_background_once() -> None:
    manifest = [*MANIFEST, entry(7, 0, "background"), entry(8, 0, "control")]
    assert compute_doses(manifest).tolist() == [1, 16, 64, 18, 18, 1, 0]


def test_each_document_has_the_k_of_its_dose() -> None:
    k_schedule = build(goldfish(k=8, k_by_dose={64: 2, 16: 3}))
    for document, k in enumerate((8, 3, 2, 3, 3)):
        assert (dropped(k_schedule, document) == dropped_by(goldfish(k=k))).all()
    assert not k_schedule.num_levels_up.any()


def test_the_mask_of_a_dose_is_that_of_its_documents() -> None:
    config = goldfish(k=8, k_by_dose={64: 2, 16: 3})
    k_schedule, fish = build(config), Goldfish(config, special_ids=[])
    for document, dose in enumerate((1, 16, 64, 18, 18)):
        mask = fish.at_dose(dose).drop_mask(IDS, None, np.random.default_rng(0))
        assert (dropped(k_schedule, document) == mask).all()


def test_without_doses_all_documents_have_the_k_of_the_settings() -> None:
    k_schedule = build(goldfish(k=3))
    assert (dropped(k_schedule, 2) == dropped_by(goldfish(k=3))).all()


@pytest.mark.parametrize("mode", ["hash", "hash_reference"])
@pytest.mark.parametrize("start", [None, 8, 4, 3, 2])
def test_tightening_drops_more_labels_at_each_level_and_all_at_the_last(
    start: int | None, mode: str
) -> None:
    # The published key is a product: of few ids it is seldom 0.
    configs = [] if start is None else [goldfish(k=start, mode=mode, context_width=2)]
    k_schedule = build(*configs, can_tighten=True)
    before, document = dropped(k_schedule, 1), np.array([1])
    assert before.mean() == pytest.approx(0 if start is None else 1 / start, abs=0.08)
    while k_schedule.tighten(document):
        now = dropped(k_schedule, 1)
        assert (now >= before).all()  # masks are nested
        assert now.sum() > before.sum()
        before = now
    assert before.all()
    assert k_schedule.num_levels_up.tolist() == [0, len(k_schedule.levels), 0, 0, 0]
    # The others are where they were.
    assert (dropped(k_schedule, 0) == dropped(build(*configs), 0)).all()


def test_tightening_keeps_the_other_mitigations() -> None:
    k_schedule = build(
        goldfish(k=8, context_width=5),
        TokenDropoutConfig(name="token_dropout", rate=0.5),
        can_tighten=True,
    )
    k_schedule.tighten(np.array([0]))
    fish = dropped_by(goldfish(k=4, context_width=5))
    mask = dropped(k_schedule, 0)
    assert (mask >= fish).all()
    # Half of what goldfish leaves; 300 labels, four standard deviations.
    assert mask[~fish].mean() == pytest.approx(0.5, abs=0.12)


def test_documents_later_in_a_row_have_the_same_mask_at_every_level() -> None:
    """Labels are rebuilt when they are counted, after documents have moved to other levels."""
    k_schedule = build(TokenDropoutConfig(name="token_dropout", rate=0.5), can_tighten=True)
    masks = []
    for is_at_top in (False, False, False, True):
        draw = np.random.default_rng(0)
        for document in (0, 1):
            labels = k_schedule.mask_labels(document, IDS, IDS.astype(np.int64), draw)
        masks.append(labels == IGNORE_LABEL)
        assert bool(k_schedule.level_of[0] == len(k_schedule.levels)) == is_at_top
        k_schedule.tighten(np.array([0]))
    assert 0 < masks[0].mean() < 1
    for mask in masks[1:]:
        np.testing.assert_array_equal(mask, masks[0])


def test_a_k_that_does_not_fall_is_refused() -> None:
    for fields in ({"k": 4, "k_by_dose": {16: 4}}, {"k": 8, "k_by_dose": {4: 2, 16: 3}}):
        with pytest.raises(ValueError, match="'k_by_dose' must lower k with every dose"):
            goldfish(**fields)
