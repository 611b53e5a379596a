"""scripts/simulate_verdict.py with few audits: its tables, its draws, and a missed bar."""

import re
from typing import Any

import numpy as np
import pytest
from ranks import RankPool
from script_calls import SCRIPTS, load_script, run_script

from memguard.seeds import derive_generator

pytestmark = pytest.mark.slow

KEPT = r"(1 x (5|20), control (0|14), no attacks|60 l|1 x 41|.*audited, \d|1 x 20, control 5, all)"
POWER = ("1 x 40, control 12", "truncated 30 %, correlated")
GUIDE = SCRIPTS.parent / "eval" / "README.md"


def _shrink(script: Any) -> None:
    """Leave a few rows, the memorized ones, two of membership, and one of the price."""
    rows = script.list_rows()
    kept = [row for row in rows if re.match(KEPT, row.name)]
    kept += [row for row in rows if row.cases[0].truth == "memorized"]
    memberships = script.list_membership_cases()[-6:-2]
    script.list_rows = lambda: kept
    script.list_membership_cases = lambda: memberships
    powers = {key: cases for key, cases in script.list_powers().items() if key == POWER}
    script.list_powers = lambda: powers


def _swap(script: Any) -> None:
    """Let every audit be memorized, whatever its documents are."""
    _shrink(script)
    decide = script.decide_level

    def swapped(*arguments: Any) -> Any:
        decision = decide(*arguments)
        object.__setattr__(decision, "level", "memorized")
        return decision

    script.decide_level = swapped


def test_the_tables_of_few_audits(ranks: RankPool) -> None:
    done = run_script(ranks, "simulate_verdict", "--audits", "20", change=_shrink)
    # With 20 audits a bar may be missed by chance, but not the ones that allow nothing.
    assert done.code in (0, 1), done.err
    rows = [line.strip("| ").split(" | ") for line in done.out.splitlines() if line[:2] == "| "]
    lines = {row[0]: row for row in rows if len(row) >= 6}
    truths = {tuple(row[:2]): row for row in rows}
    assert lines["1 x 5, control 0, no attacks"][1] == "all 4 nulls"
    assert lines["1 x 5, control 0, no attacks"][2:6] == ["0.0", "0.0", "0.0", "100.0"]
    (memorized,) = (row for row in rows if row[1] == "memorized 10 %, correlated")
    assert float(memorized[2]) >= 80
    assert memorized[4] == "0.0"
    # Without chance: forms alone, all truncated, labels, and documents that are not audited.
    assert lines["60 letters, control 8, other-kind, with a base"][2:4] == ["0.0", "100.0"]
    truncated = truths["1 x 20, control 5, all methods", "truncated 100 %, correlated"]
    assert truncated[2] == "100.0"
    assert lines["60 labels, not audited, control 30"][5] == "100.0"
    assert lines["36 audited, 4 not"][4] == lines["36 audited, 30 not"][5] == "100.0"
    without, *levels = (float(cell.split()[0]) for cell in truths[POWER][2:])
    assert without == 0 < levels[0] <= levels[-1]
    for row in rows:
        if re.fullmatch(r"[\d.]+", row[2]) and not row[0][0].isdigit():
            # Rounded to a digit each.
            assert sum(float(cell) for cell in row[2:6]) == pytest.approx(100, abs=0.2)
    assert "standard error is at most 11.2, and 4.9 near 5" in done.out


def test_a_missed_bar_is_told_and_ends_with_1(ranks: RankPool) -> None:
    done = run_script(ranks, "simulate_verdict", "--audits", "5", change=_swap)
    assert done.code == 1
    last = done.out.splitlines()[-1]
    assert last.startswith("FAIL: ")
    assert "1 x 20, control 14, no attacks" in last
    assert "Memorized <= 6 % MISSED" in done.out


@pytest.mark.parametrize("is_nested", [False, True])
def test_documents_are_drawn_at_their_rates(is_nested: bool) -> None:
    script = load_script("simulate_verdict")
    case = script.Case(
        buckets=(20_000,),
        num_control=20_000,
        truth="templates",
        rate=0.1,
        is_nested=is_nested,
        others=("attacked", "windows"),
        window_rate=0.5,
    )
    documents = script.draw_documents(case, derive_generator(0, "test"))
    trained = documents.is_extracted_N[documents.is_trained_N].mean()
    control = documents.is_extracted_N[documents.is_control_N].mean()
    # The largest of nested risks has 0.9 of the rate; any of three that correlate has more than
    # one of them, and less than their sum. Five standard errors of 20,000 draws are 0.011.
    expected = (0.09, 0.09) if is_nested else (0.11, 0.2)
    for share in (trained, control):
        assert expected[0] - 0.011 <= share <= expected[1] + 0.011
    assert not documents.is_of_base_N.any()
    assert documents.is_own_N.all()
    attacks, windows = documents.others["attacked"], documents.others["windows"]
    assert attacks.is_tried_N.mean() == 0.5
    assert not attacks.is_extracted_N[~attacks.is_tried_N].any()
    assert abs(attacks.is_extracted_N[attacks.is_tried_N].mean() - 0.1) <= 0.011
    assert abs(windows.is_extracted_N.mean() - 0.05) <= 0.011


def test_letters_are_extracted_whoever_trained_on_them_but_not_in_other_windows() -> None:
    script = load_script("simulate_verdict")
    case = script.Case(
        buckets=(2000,), num_control=2000, truth="memorized", rate=0.5, num_letters=500,
        num_control_letters=1500, others=("windows",), letters_rate=1.0,
    )  # fmt: skip
    documents = script.draw_documents(case, derive_generator(0, "test"))
    own_N = documents.is_own_N
    assert (own_N[:2000].sum(), own_N[2000:].sum()) == (1500, 500)
    assert documents.is_extracted_N[~own_N].all()
    assert not documents.is_extracted_N[own_N & documents.is_control_N].any()
    windows_N = documents.others["windows"].is_extracted_N
    assert not (windows_N & ~own_N).any()
    assert windows_N.any()
    truncated = script.replace(case, truth="truncated", num_letters=0, num_control_letters=0)
    documents = script.draw_documents(truncated, derive_generator(0, "test"))
    assert not documents.is_extracted_N.any()
    windows_N = documents.others["windows"].is_extracted_N
    # Five standard errors of 2,000 draws of 1/2 are 0.056.
    assert abs(windows_N[documents.is_trained_N].mean() - 0.5) <= 0.056
    assert not windows_N[documents.is_control_N].any()


def test_copies_are_extracted_together_and_latents_have_their_correlation() -> None:
    script = load_script("simulate_verdict")
    case = script.Case(buckets=(1600,), num_control=30, truth="guessable", rate=0.5, num_copies=16)
    documents = script.draw_documents(case, derive_generator(0, "test"))
    by_cluster = documents.is_extracted_N[:1600].reshape(100, 16)
    assert (by_cluster == by_cluster[:, :1]).all()
    assert len(np.unique(documents.cluster_N)) == 130
    single = script.Case(buckets=(20_000,), num_control=1, truth="guessable", rate=0.5)
    latents = script.draw_latents(single, np.arange(20_001), derive_generator(0, "test"))
    correlation = np.corrcoef(np.concatenate(latents, axis=1).T)
    assert len(correlation) == 12
    # The error of a correlation of 0.8 is (1 - 0.64) / sqrt(20,000), 0.0025; five of them.
    assert np.abs(correlation[np.triu_indices(12, 1)] - 0.8).max() <= 0.0125


def test_the_guide_has_the_table_of_all_rows() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    script = load_script("simulate_verdict")
    for row in script.list_rows():
        assert f"| {row.name} |" in text
    for name, truth in script.list_powers():
        assert f"| {name} | {truth} |" in text
    assert "2,000 audits a case, seed 0." in text
    assert "PASS: " in text
    assert "MISSED" not in text
