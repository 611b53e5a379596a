"""The settings of a run, applied in their order to labels and losses."""

from typing import Any, get_args

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from memguard.config import GoldfishConfig, MitigationConfig
from memguard.config.mitigations import TokenDropoutConfig
from memguard.mitigation import DONE_ELSEWHERE, MITIGATIONS, TokenTerms, build_mitigations
from memguard.records import IGNORE_LABEL


def config(**settings: Any) -> GoldfishConfig:
    return GoldfishConfig(name="goldfish", **settings)


def test_every_configurable_mitigation_is_in_the_table() -> None:
    union, _ = get_args(MitigationConfig)
    names = [get_args(each.model_fields["name"].annotation)[0] for each in get_args(union)]
    assert sorted([*MITIGATIONS, *DONE_ELSEWHERE]) == sorted(names)


def test_none_keeps_the_labels_and_copies_them() -> None:
    mitigations = build_mitigations([], special_ids=[0])
    ids = np.arange(5)
    labels = np.array([-100, 1, 2, -100, 4])
    masked = mitigations.mask_labels(ids, labels, generator=np.random.default_rng(0))
    np.testing.assert_array_equal(masked, labels)
    assert not np.shares_memory(masked, labels)
    assert mitigations.needs == {"nll"}


@given(data=st.data(), ids=st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_masks_are_made_of_input_ids_and_never_of_labels(data: st.DataObject, ids: Any) -> None:
    mitigations = build_mitigations([config(k=2, context_width=3)], special_ids=[7])
    input_ids = np.array(ids, dtype=np.int32)
    ignored = np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    everything = input_ids.astype(np.int64)
    some = np.where(ignored, IGNORE_LABEL, everything)
    kept = some.copy()
    full, part = (
        mitigations.mask_labels(input_ids, labels, generator=np.random.default_rng(0))
        for labels in (everything, some)
    )
    np.testing.assert_array_equal(some, kept)
    # Ignored stays ignored, and the other labels are dropped exactly where they are without it.
    np.testing.assert_array_equal(part, np.where(ignored, IGNORE_LABEL, full))
    assert set(full[full != everything]) <= {IGNORE_LABEL}
    assert (full[input_ids == 7] == 7).all()


def test_drop_rates_of_several_settings_combine_as_independent() -> None:
    dropout = TokenDropoutConfig(name="token_dropout", rate=0.25)
    mitigations = build_mitigations([config(k=2, mode="random"), dropout], special_ids=[])
    ids = np.zeros(100_000, dtype=np.int64)
    masked = mitigations.mask_labels(ids, ids, generator=np.random.default_rng(0))
    share = (masked == IGNORE_LABEL).mean()
    # Three standard deviations of a binomial share.
    assert abs(share - 0.625) < 3 * np.sqrt(0.625 * 0.375 / len(ids))


def test_reduce_adds_what_is_left_and_leaves_the_division_to_the_caller() -> None:
    mitigations = build_mitigations([config()], special_ids=[])
    nll_N = torch.tensor([1.0, 2.5], requires_grad=True)
    loss = mitigations.reduce(TokenTerms(nll_N=nll_N))
    assert loss.item() == 3.5
    loss.backward()
    assert nll_N.grad.tolist() == [1, 1]
