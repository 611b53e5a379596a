"""Paired tests against hand-computed cases and brute force."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from compare_examples import make_canaries, write_manifest, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from memguard.compare import FinishedRun, compare_runs
from memguard.errors import RecordError
from memguard.records import ResultRow, TestRow
from memguard.report.html import render_comparison

pytestmark = pytest.mark.slow

Pair = dict[str, ResultRow | TestRow]
"""Tests by metric, and the difference of the token accuracy."""


def pair(*runs: FinishedRun) -> dict[tuple[str, int, str], Pair]:
    """Return what is paired, by setting, seed and group of documents."""
    tables = compare_runs(runs, name="x", command="").tables
    pairs: dict[tuple[str, int, str], Pair] = {}
    for row in (
        *tables.select("extraction", "token_accuracy", against="setting:plain"),
        *tables.tests,
    ):
        pairs.setdefault((row.setting, row.seed, row.bucket), {})[row.metric] = row
    return pairs


def split(test: TestRow) -> tuple[int, int]:
    """Return how many documents only the first setting extracts, and only the other one."""
    return test.num_only_against, test.num_only_here


def find_ends(difference: NDArray[np.float64], most: float) -> tuple[float, float]:
    """Return the ends by the jackknife of the logit between -most and most, 2 artanh(d / most)."""
    count = len(difference)
    centre = np.arctanh(difference.mean() / most)
    without = np.arctanh([np.delete(difference, n).mean() / most for n in range(count)])
    error = np.sqrt((count - 1) / count * ((without - centre) ** 2).sum())
    reach = stats.t.ppf(0.975, count - 1) * error
    return most * np.tanh(centre - reach), most * np.tanh(centre + reach)


def test_settings_on_the_same_documents(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", correct={0: [1, 1], 4: [50] * 6 + [45, 10], 16: [50] * 8})
    other = write_run(
        tmp_path / "other",
        name="other",
        # Verbatim: five lost, one won. Near-verbatim (45 of 50): three lost, one won.
        correct={0: [1, 1], 4: [50, 46, 46, 20, 20, 20, 45, 50], 16: [50] * 8},
    )
    pairs = pair(plain, other)
    assert list(pairs) == [("other", 0, "(trained 4 times)"), ("other", 0, "(trained 16 times)")]
    low, high = pairs.values()
    assert {row.num_documents for one in (low, high) for row in one.values()} == {8}
    assert split(low["verbatim"]) == (5, 1)
    assert low["verbatim"].p_value == pytest.approx(2 * 7 / 64)
    assert low["verbatim"].p_holm == pytest.approx(4 * 2 * 7 / 64)
    assert split(low["near_verbatim"]) == (3, 1)
    assert low["near_verbatim"].p_value == pytest.approx(2 * 5 / 16)
    assert low["near_verbatim"].p_holm == 1.0
    assert split(high["verbatim"]) == (0, 0)
    assert high["verbatim"].p_value == 1.0
    difference = np.array([0, -4, -4, -30, -30, -30, 0, 40]) / 50
    assert low["token_accuracy"].value == pytest.approx(difference.mean())
    assert low["token_accuracy"].ci == pytest.approx(find_ends(difference, 1))
    assert high["token_accuracy"].value == 0
    # Equal differences are no certainty: 0 of 8, in either direction.
    assert high["token_accuracy"].ci == pytest.approx((-0.3694, 0.3694), abs=5e-5)


def test_documents_are_matched_by_id_and_not_by_row(tmp_path: Path) -> None:
    correct = {4: [50, 50, 1, 1, 1, 1]}
    plain = write_run(tmp_path / "plain", correct=correct)
    same = write_run(tmp_path / "same", name="same", correct=correct, reverse_rows=True)
    (result,) = pair(plain, same).values()
    assert split(result["verbatim"]) == (0, 0)


def test_near_duplicates_are_one_piece_of_evidence(tmp_path: Path) -> None:
    widths = []
    for clusters in (None, [n // 5 for n in range(20)]):
        runs = [
            write_run(tmp_path / name, name=name, correct={4: right}, clusters=clusters)
            for name, right in (("plain", [25] * 20), ("other", [50] * 10 + [0] * 10))
        ]
        (result,) = pair(*runs).values()
        low, high = result["token_accuracy"].ci
        widths.append(high - low)
        assert result["token_accuracy"].num_clusters == (4 if clusters else None)
    # Four clusters of five equal documents: as much evidence as four documents, twice as wide.
    assert widths[1] > 1.7 * widths[0]


def test_what_one_run_removed_is_left_out_of_all(tmp_path: Path) -> None:
    correct = {0: [0, 0], 4: [50, 50, 1, 1]}
    plain = write_run(tmp_path / "plain", correct=correct)
    fewer = write_run(tmp_path / "fewer", name="fewer", correct={0: [0, 0], 4: [50, 50, 1]})
    with pytest.raises(RecordError, match="its trained documents differ"):
        pair(plain, fewer)
    write_manifest(fewer, removed=["doc-4-3"])
    comparison = compare_runs([plain, fewer], name="x", command="")
    assert comparison.num_removed == 1
    assert {test.num_documents for test in comparison.tables.tests} == {3}
    assert [point.num_documents for point in comparison.front] == [3, 3]
    # The rows of a run are what its own report says.
    row = comparison.tables.find("extraction", "verbatim", "x4", setting="plain", seed=0)
    assert row.num_documents == 4


def test_trained_secrets_are_paired_by_exposure(tmp_path: Path) -> None:
    bits = ([3.0, 4.0, 5.0, 1.0], [1.0, 2.5, 4.0, 1.0])
    runs = [
        write_run(
            tmp_path / name,
            name=name,
            correct={4: [50, 1]},
            canaries=make_canaries(own, [n < num for n in range(4)]),
        )
        for name, own, num in zip(("plain", "other"), bits, (4, 1), strict=True)
    ]
    comparison = compare_runs(runs, name="x", command="")
    (test,) = (test for test in comparison.tables.tests if test.probe == "canaries")
    assert (test.setting, test.bucket, test.num_documents) == ("other", "(secrets)", 4)
    assert split(test) == (3, 0)
    assert test.p_value == pytest.approx(2 / 8)
    # Holm: the smallest of three tests, two of them on documents that do not differ.
    assert test.p_holm == pytest.approx(3 * 2 / 8)
    (bits_row,) = comparison.tables.select("canaries", "exposure_bits", against="setting:plain")
    assert bits_row.value == pytest.approx(-4.5 / 4)
    # Of 32 references, by log2(32 / 33) to 5 bits each; four secrets: the interval holds 0.
    ends = find_ends(np.subtract(bits[1], bits[0]), np.log2(33))
    assert ends[0] < 0 < ends[1]
    assert bits_row.ci == pytest.approx(ends)
    words = render_comparison(comparison)
    assert "same secrets" in words


def test_a_bucket_is_paired_with_itself_however_often_it_was_trained(tmp_path: Path) -> None:
    few = {0: [1, 1], 4: [50, 1]}
    plain = write_run(tmp_path / "plain", correct=few)
    fewer = write_run(tmp_path / "l", name="fewer", correct=few, repetitions={"x4": 2})
    ((place, result),) = pair(plain, fewer).items()
    assert (place[2], result["verbatim"].num_documents) == ("(trained 4 times)", 2)
    page = render_comparison(compare_runs([plain, fewer], name="x", command=""))
    assert "no document in this bucket" not in page
    assert "trained 2 times" in page


def test_seeds_are_not_pooled(tmp_path: Path) -> None:
    few = {0: [1, 1], 4: [50, 1]}
    runs = [
        write_run(tmp_path / f"{name}{seed}", name=name, seed=seed, correct=few)
        for name, seed in itertools.product(("plain", "other"), (0, 1))
    ]
    # A seed that plain lacks.
    runs.append(write_run(tmp_path / "m", name="more", seed=2, correct=few))
    assert [place[:2] for place in pair(*runs)] == [("other", 0), ("other", 1)]


@settings(max_examples=25)
@given(flags=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_counts_by_brute_force(
    tmp_path_factory: pytest.TempPathFactory, flags: list[tuple[bool, bool]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    sides = zip(*flags, strict=True)
    runs = [
        write_run(folder / name, name=name, correct={4: [50 if flag else 0 for flag in side]})
        for name, side in zip(("plain", "other"), sides, strict=True)
    ]
    (result,) = pair(*runs).values()
    assert result["verbatim"].num_documents == len(flags)
    assert split(result["verbatim"]) == (
        sum(a and not b for a, b in flags),
        sum(b and not a for a, b in flags),
    )
