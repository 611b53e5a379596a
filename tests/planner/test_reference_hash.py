"""What is told of windows whose product of ids is 0, against a count in Python's own integers."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from row_examples import make_corpus

from memguard.config import GoldfishConfig
from memguard.config.mitigations import FocalConfig
from memguard.data.corpus import Corpus
from memguard.mitigation.goldfish import Goldfish
from memguard.planner.dry_run import Remark
from memguard.planner.rows import remark_on_reference_hash


class _Names:
    """A tokenizer, as far as it is asked."""

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return "!" if token_id == 0 else "?"


def put_zeros(corpus: Corpus, every: int) -> Corpus:
    ids = corpus.input_ids.copy()
    ids[::every] = 0
    return dataclasses.replace(corpus, input_ids=ids)


def remarks(corpus: Corpus, **settings: Any) -> list[Remark]:
    settings = {"mode": "hash_reference", **settings}
    return remark_on_reference_hash(corpus, _Names(), [GoldfishConfig(name="goldfish", **settings)])


def count_plainly(corpus: Corpus, width: int) -> tuple[int, int]:
    """Return windows whose product is 0, and all, document by document, in big integers."""
    num_zero = num_windows = 0
    for index in range(corpus.num_documents):
        ids = corpus.document(index).input_ids.tolist()
        for label in range(width, len(ids)):
            product = 1
            for token in ids[label - width + 1 : label + 1]:
                product = product * token % 2**64
            num_windows += 1
            num_zero += product == 0
    return num_zero, num_windows


@pytest.mark.parametrize("width", [2, 4, 13])
@pytest.mark.parametrize("every", [7, 40])
def test_the_windows_are_counted_as_plain_python_counts_them(width: int, every: int) -> None:
    corpus = put_zeros(make_corpus([30, 3, 64, 13, 14, 41]), every)
    num_zero, num_windows = count_plainly(corpus, width)
    (remark,) = remarks(corpus, context_width=width)
    assert remark.level == "warning"
    assert (
        f"{num_zero} of {num_windows} windows ({100 * num_zero / num_windows:.1f} %)" in remark.text
    )
    assert f"'!', occurs {int((corpus.input_ids == 0).sum())} times" in remark.text


@pytest.mark.parametrize(("k", "fate"), [(4, "None of the labels"), (5, "receive loss")])
def test_what_becomes_of_these_labels_is_what_the_mask_does(k: int, fate: str) -> None:
    corpus = put_zeros(make_corpus([200]), 3)
    (remark,) = remarks(corpus, k=k)
    assert fate in remark.text
    config = GoldfishConfig(name="goldfish", mode="hash_reference", k=k)
    dropped: NDArray[np.bool_] = Goldfish(config).drop_mask(
        corpus.input_ids, None, np.random.default_rng(0)
    )
    # Every third id is 0, so every window has the product 0.
    assert dropped[13:].all() if k == 4 else not dropped.any()


def test_documents_of_different_doses_can_fare_differently() -> None:
    (remark,) = remarks(put_zeros(make_corpus([200]), 3), k=8, k_by_dose={16: 3})
    assert "With k up to 3 all labels of these windows are left out" in remark.text


def test_many_factors_of_two_are_a_zero_as_well() -> None:
    corpus = make_corpus([200])
    corpus = dataclasses.replace(corpus, input_ids=np.full(200, 64, dtype=np.int32))
    (remark,) = remarks(corpus)  # 2^(6 * 13) is a multiple of 2^64
    assert "187 of 187 windows (100.0 %)" in remark.text
    assert "have the product 0: it overflows. None of the labels" in remark.text


def test_rare_or_no_zeros_are_a_note_and_documents_that_are_not_trained_do_not_count() -> None:
    corpus = make_corpus([3000, 200])
    assert [each.level for each in remarks(corpus)] == ["info"]
    ids = corpus.input_ids.copy()
    ids[100] = 0
    rare = dataclasses.replace(corpus, input_ids=ids)
    (remark,) = remarks(rare)
    assert (remark.level, "13 of 3,174 windows" in remark.text) == ("info", True)
    ids[3000:] = 0
    control = corpus.manifest[1].model_copy(update={"role": "control", "planned_repetitions": 0})
    held = dataclasses.replace(rare, input_ids=ids, manifest=[corpus.manifest[0], control])
    (remark,) = remarks(held)
    assert (remark.level, "13 of 2,987 windows" in remark.text) == ("info", True)


def test_other_modes_and_mitigations_say_nothing() -> None:
    corpus = put_zeros(make_corpus([200]), 3)
    assert remarks(corpus, mode="hash") == []
    assert remark_on_reference_hash(corpus, _Names(), [FocalConfig(name="focal")]) == []
