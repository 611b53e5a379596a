"""What each setting really buys: means over seeds, with what is missing named."""

from collections.abc import Sequence
from dataclasses import replace

import comparison_examples as examples
import evidence_examples as evidence
from page_checks import check_page
from result_examples import make_tables

from memguard import records as r
from memguard.pages.page import Cell, Row, Table
from memguard.records.comparison import HELDOUT
from memguard.report.comparison_tables import build_gains
from memguard.report.html import render_comparison
from memguard.report.seed_means import Setting, compute_change, list_settings, show_cost, show_loss


def get_table(comparison: r.Comparison) -> Table:
    section = build_gains(comparison)
    (table,) = section.tables
    return table


def parts(row: Row) -> list[tuple[str, str, str]]:
    return [
        (
            cell.text.replace("\u00a0", " ").replace("\u2212", "-"),
            cell.detail.replace("\u00a0", " ").replace("\u2212", "-"),
            cell.note.replace("\u00a0", " "),
        )
        for cell in row.cells
    ]


def test_one_seed_shows_intervals_and_the_control() -> None:
    table = get_table(examples.make_full_comparison())
    assert [column.text for column in table.columns] == [
        "Setting",
        "Verbatim",
        "Near-verbatim",
        "Token accuracy",
        "Attack cost",
        "Sampling",
        "Beam search",
        "Fill in dropped tokens",
        "Membership AUC",
        "Held-out loss",
    ]
    assert table.columns[-2].detail == "Loss"
    assert [row.head.text for row in table.rows] == [
        "plain",
        "goldfish-k4",
        "goldfish-k2",
        "Base model",
    ]
    cells = parts(table.rows[1])
    assert cells[:3] == [
        ("0 %", "0–8.8 %", "control 0 %"),
        ("15.0 %", "5.7–29.8 %", "control 0 %"),
        ("82.3 %", "", "control 19.2 %"),
    ]
    # 40 / 64 + 3.2, and 1.7 below to 3.3 above it, each rounded up.
    assert cells[3] == ("4.0", "3.0 to 8.0", "floor 2.0, control never")
    assert cells[6] == ("95.0 %", "83.1–99.4 %", "control 0 %")
    assert cells[7:] == [("0.884", "0.834–0.934", "blind 0.530"), ("4.581", "+4.8 %", "")]
    base = parts(table.rows[3])
    assert base[3][0] == "never"
    assert base[4:8] == [("", "", "")] * 4
    assert base[8][0] == "5.012"
    assert any("Knows which tokens the mitigation drops" in note for note in table.notes)


def test_several_seeds_are_averaged_with_their_ends() -> None:
    comparison = examples.make_full_comparison(3)
    table = get_table(comparison)
    assert [(row.head.text, row.head.detail) for row in table.rows][:3] == [
        ("plain", "3 seeds"),
        ("goldfish-k4", "3 seeds"),
        ("goldfish-k2", "3 seeds"),
    ]
    cells = parts(table.rows[1])
    # 3.825, 3.925 and 4.025, rounded up.
    assert cells[3] == ("4.3", "4.0 to 5.0", "floor 2.0, control never")
    assert cells[1] == ("15.0 %", "", "control 0 %")  # the seeds are alike
    mine, first = (comparison.find_mean(HELDOUT, name) for name in ("goldfish-k4", "plain"))
    assert cells[8][:2] == (f"{mine:.3f}", f"+{100 * (mine / first - 1):.1f} %")


def test_seeds_that_differ_show_their_ends() -> None:
    def change(row: r.ResultRow) -> r.ResultRow:
        is_changed = (row.metric, row.bucket, row.model) == ("verbatim", "r64", "trained")
        return replace(row, value=(0.25, 0.75)[row.seed]) if is_changed else row

    table = get_table(examples.change_rows(examples.make_full_comparison(2), change))
    assert parts(table.rows[0])[0] == ("50.0 %", "25.0–75.0 %", "control 0 %")


def test_a_median_that_is_never_drawn_has_no_mean() -> None:
    def show(medians: Sequence[float | None], control: Sequence[float | None] = ()) -> Cell:
        runs, rows = [], []
        for seed in range(max(len(medians), len(control))):
            doses = {}
            for bucket, costs in (("control", control), ("r4", medians)):
                if seed < len(costs):
                    doses[bucket] = 4 if bucket == "r4" else 0
                    rows += evidence.list_costs(bucket, costs[seed], setting="plain", seed=seed)
            run, _ = examples.list_parts()[0]
            runs.append(run.model_copy(update={"seed": seed, "doses": doses}))
        made = examples.make_comparison().model_copy(update={"tables": make_tables(rows)})
        return show_cost(Setting("plain", runs, made))

    assert show([4.0, None]).text == "never"
    assert show([4.0, None]).detail == "in 1\u00a0of\u00a02 seeds"
    assert show([None], [4.0]).note == "floor 20.0, control 4.0"
    assert show([]).detail == "not measured"
    assert show([4.0], [4.0, None]).note == "floor 2.0, control never"


def test_comparisons_without_attacks() -> None:
    old = examples.make_comparison()
    assert build_gains(old) is None
    page = render_comparison(old)
    check_page(page)
    assert "#gains" not in page
    assert "Attack cost" not in page
    full = examples.make_full_comparison()
    quiet = ("attacks", "membership")
    table = get_table(examples.change_rows(full, lambda row: None if row.probe in quiet else row))
    assert [column.text for column in table.columns][4:] == ["Attack cost", "Held-out loss"]
    assert any("No attacks ran" in note for note in table.notes)


def test_one_attacked_setting_among_others() -> None:
    first, *others = examples.list_parts()
    mixed = examples.assemble([examples.attack(first), *others])
    table = get_table(mixed)
    assert parts(table.rows[1])[3:8] == [
        ("n/a", "not measured", ""),
        *[("n/a", "not attacked", "")] * 3,
        ("n/a", "could not be computed", ""),
    ]
    check_page(render_comparison(mixed))


def test_losses_without_bounds_have_a_mean() -> None:
    comparison = examples.make_comparison(2)

    def change(loss: float) -> Setting:
        def change_loss(row: r.ResultRow) -> r.ResultRow | None:
            if row.metric == "nll_change":
                return None
            is_changed = (row.metric, row.model) == ("nll", "trained")
            return replace(row, value=loss) if is_changed else row

        changed = examples.change_rows(comparison, change_loss)
        front = [point.model_copy(update={"utility": loss}) for point in comparison.front]
        changed = changed.model_copy(update={"front": front})
        return list_settings(changed)[-1]

    # The sum of two overflows, their mean does not.
    setting = change(1e308)
    assert len(setting.runs) == 2
    assert show_loss(setting).text == "1.00e+308"
    assert compute_change(setting) == 0
    setting = change(0.0)
    assert show_loss(setting).text == "0.000"
    assert compute_change(setting) is None
