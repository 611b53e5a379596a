"""Finished runs become one record, or are refused with the run and the reason."""

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from compare_examples import CORRECT, make_canaries, write_manifest, write_run
from damage import cut, flip_byte
from result_examples import auc_row, make_interval, rate_row, value_row

from memguard.compare import (
    FinishedRun,
    compare_runs,
    list_finished,
    load_sweep,
    mark_finished,
    prepare_folder,
)
from memguard.errors import RecordError
from memguard.records import Comparison, Interval, ResultRow, load_record, save_record
from memguard.records.audit_files import save_audit_files
from memguard.records.run_files import sum_trained
from memguard.records.sealed import save_sealed
from memguard.report.comparison_picture import render_comparison_chart
from memguard.report.html import render_comparison

LESS = {0: [3, 5, 2, 8, 4], 4: [9, 9, 9, 9, 9], 16: [45, 44, 20, 20, 20]}


def compare(*runs: FinishedRun) -> Comparison:
    return compare_runs(runs, name="sweep", command="memguard compare sweep.yaml")


def test_the_record_holds_what_a_reader_needs(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    goldfish = write_run(tmp_path / "goldfish", name="goldfish", correct=LESS, nll=2.1)
    comparison = compare(plain, goldfish)
    save_record(comparison, tmp_path / "comparison.json")
    assert load_record(Comparison, tmp_path / "comparison.json") == comparison

    assert [(run.setting, run.run) for run in comparison.runs] == [
        ("plain", "plain"),
        ("goldfish", "goldfish"),
    ]
    one, other = comparison.runs
    assert one.doses == other.doses == {"control": 0, "x4": 4, "x16": 16}
    assert one.cost.dropped_fraction == 0.25
    assert [point.name for point in comparison.front] == ["plain", "goldfish"]
    assert comparison.recommendation.setting is None
    assert (comparison.environment, comparison.documents_sha256) == ({"torch": "2.13.0"}, "cc")
    losses = [
        comparison.find_loss(run, model) for run in (one, other) for model in ("trained", "base")
    ]
    assert [row and row.value for row in losses] == [2.0, 3.0, 2.1, 3.0]

    def count(metric: str, setting: str, bucket: str = "x16", **key: str) -> tuple[Any, ...]:
        row = comparison.tables.find("extraction", metric, bucket, setting=setting, seed=0, **key)
        return row.num_matched, row.num_documents, row.value

    assert count("verbatim", "plain") == (3, 5, 0.6)
    assert count("near_verbatim", "plain") == (4, 5, 0.8)
    # Of the other run's documents one is known to 90 %, token by token, and none is extracted.
    assert count("near_verbatim", "goldfish") == (0, 5, 0.0)
    assert count("teacher_forced_90", "goldfish") == (1, 5, 0.2)
    assert count("token_accuracy", "plain")[2] == pytest.approx(sum(CORRECT[16]) / 250)
    assert count("verbatim", "plain", model="base") == (0, 5, 0.0)
    assert count("verbatim", "plain", "control", model="base") == (0, 5, 0.0)
    # Neither the buckets that are not compared, nor what the page does not show.
    assert not comparison.tables.select("extraction", "verbatim", bucket="background")
    assert [bucket.bucket for bucket in comparison.tables.buckets] == ["control", "x4", "x16"]
    assert len(comparison.tables.tests) == 4


def test_attacks_and_membership_come_along(tmp_path: Path) -> None:
    counts = (("x16", "trained", 4.0), ("x16", "base", None), ("background", "trained", 9.0))
    rows = [
        value_row("sampling", "log10_queries", bucket, cost, statistic="median", model=model)
        for bucket, model, cost in counts
    ]
    rows += [auc_row("loss", None), rate_row("canaries", "verbatim", "(secrets)", 1, 4)]
    rows += [rate_row("extraction", "verbatim", "x16", 1, step=3)]
    attacks = {0: {"beam": (0, 5)}, 4: {}, 16: {"beam": (1, 5), "fill": (2, 5)}}
    comparison = compare(
        write_run(tmp_path / "a", name="a", rows=rows, attacks=attacks),
        write_run(tmp_path / "b", name="b"),
    )
    save_record(comparison, tmp_path / "comparison.json")
    assert load_record(Comparison, tmp_path / "comparison.json") == comparison
    tables = comparison.tables
    costs = tables.select("sampling", "log10_queries", setting="a")
    assert [(row.bucket, row.model, row.value) for row in costs] == list(counts[:2])
    attacked = [
        (row.bucket, row.parameters, row.num_matched)
        for row in tables.select("attacks", "any_answer", setting="a")
    ]
    assert attacked == [
        ("control", "answers=16, attack=beam", 0),
        ("x16", "answers=16, attack=beam", 1),
        ("x16", "answers=16, attack=fill", 2),
    ]
    assert tables.find_metric("attacks", "any_answer", "answers=16, attack=beam") is not None
    assert [row.setting for row in tables.select("membership", "auc")] == ["a"]
    assert [row.setting for row in tables.select("canaries", "verbatim")] == ["a"]
    assert not [row for row in tables.results if row.step is not None]
    assert not tables.select("attacks", "any_answer", setting="b")


def give_change(low: float = 0.3) -> list[ResultRow]:
    """Return gains over the base model, known from ``low`` on, and those beyond the control's."""
    minus = {"control": None, "x4": Interval(value=0.02, ci=(-0.01, 0.05))}
    minus["x16"] = Interval(value=0.5, ci=(0.4, 0.6))
    raised = Interval(value=0.6, ci=(low, 0.9))
    return [
        value_row("extraction", "token_accuracy", bucket, raised, 40, minus=less, against="base")
        for bucket, less in minus.items()
    ]


@pytest.mark.parametrize(
    ("blind", "low", "is_told"),
    [
        ((0.5, 0.1), 0.3, True),
        # The texts alone tell the two apart, in either direction; or nobody knows.
        ((0.7, 0.1), 0.3, False),
        ((0.3, 0.1), 0.3, False),
        (None, 0.3, False),
        # It may not have risen at all; the control fell.
        ((0.5, 0.1), -0.1, False),
    ],
)
def test_what_training_added_beyond_the_control_is_told_where_the_texts_are_alike(
    tmp_path: Path, blind: tuple[float, float] | None, low: float, is_told: bool
) -> None:
    none = {count: [n // 2 for n in right] for count, right in CORRECT.items()}
    auc = auc_row("blind", blind and make_interval(*blind))
    comparison = compare(write_run(tmp_path / "a", correct=none, rows=[auc, *give_change(low)]))
    told = "accuracy by +50.0\u00a0pp more than that of the control (+40.0 to +60.0):"
    assert (told in html.unescape(render_comparison(comparison))) == is_told
    # Of a score that is not the blind baseline nothing follows.
    rows = [auc_row("loss", make_interval(0.5, 0.1)), *give_change()]
    other = compare(write_run(tmp_path / "b", correct=none, rows=rows))
    assert told not in html.unescape(render_comparison(other))


def test_near_verbatim_that_was_not_generated_is_missing_all_the_way(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    other = write_run(tmp_path / "other", name="other", correct=LESS, generated=False)
    comparison = compare(plain, other)
    save_record(comparison, tmp_path / "comparison.json")
    assert load_record(Comparison, tmp_path / "comparison.json") == comparison
    tables = comparison.tables
    for setting, is_known in (("plain", True), ("other", False)):
        near = tables.select("extraction", "near_verbatim", setting=setting, against=None)
        assert {row.is_known for row in near if row.seed == 0} == {is_known}
    # Two tests, not four: Holm raises the smaller p by no more.
    assert [test.metric for test in tables.tests] == ["verbatim", "verbatim"]
    low = min(test.p_value for test in tables.tests)
    assert min(test.p_holm for test in tables.tests) == pytest.approx(2 * low)
    differences = tables.select("extraction", "near_verbatim", against="setting:plain")
    assert {row.missing_because for row in differences} == {"one of the two runs generated no text"}
    alone = compare(other)
    assert render_comparison(comparison)
    assert render_comparison(alone)
    assert render_comparison_chart(alone)


def test_one_run_alone_has_nothing_to_be_tested_against(tmp_path: Path) -> None:
    tables = compare(write_run(tmp_path / "plain")).tables
    assert not tables.tests
    assert not [row for row in tables.results if (row.against or "").startswith("setting:")]
    with pytest.raises(RecordError, match="needs at least one run"):
        compare()


def test_an_audit_without_base_or_control(tmp_path: Path) -> None:
    correct = {4: CORRECT[4]}
    comparison = compare(write_run(tmp_path / "a", correct=correct, base=False))
    assert comparison.runs[0].doses == {"x4": 4}
    assert not comparison.tables.select("extraction", "verbatim", model="base")
    assert render_comparison(comparison)


def test_environments_that_differ_are_both_shown(tmp_path: Path) -> None:
    comparison = compare(
        write_run(tmp_path / "a", name="a", changes={"environment": {"device": "x", "torch": "2"}}),
        write_run(tmp_path / "b", name="b", changes={"environment": {"device": "y", "torch": "2"}}),
    )
    assert comparison.environment == {"device": "x | y", "torch": "2"}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"method.suite": "other"}, "'suite' is other, not extraction"),
        ({"method.suite_version": 2}, "'suite_version' is 2, not 1"),
        ({"method.continuation_tokens": 40}, "'continuation_tokens' is 40, not 50"),
        ({"method.prefix_tokens": 32}, "'prefix_tokens' is 32, not None"),
        ({"method.max_edit_share": 0.2}, "'max_edit_share' is 0.2, not 0.1"),
        ({"method.dtype": "bf16"}, "'dtype' is bf16, not fp32"),
        ({"method.probes": []}, "its suite has other probes"),
        ({"data.sources": ["b.jsonl"]}, "its documents come from other sources"),
        ({"data.documents_sha256": "dd"}, "it has other documents ('documents_sha256')"),
        ({"model.base_weights_sha256": "ee"}, "it started from other weights"),
        (
            {"training.heldout_num_tokens": 7},
            "its held-out loss is over 5 documents (7 tokens), not 5 documents (500 tokens)",
        ),
        (
            {"training.base_heldout_nll": 3.1},
            "its held-out loss before training is 3.1000, not 3.0000",
        ),
        (
            {"method.dtype": "bf16", "method.suite_version": 2},
            "'suite_version' is 2, not 1; 'dtype' is bf16, not fp32",
        ),
    ],
)
def test_what_does_not_answer_the_same_question(
    tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    plain = write_run(tmp_path / "plain")
    other = write_run(tmp_path / "other", name="other", changes=changes)
    with pytest.raises(RecordError) as caught:
        compare(plain, other)
    message = str(caught.value)
    assert message.startswith("'other' (seed 0) cannot be compared with 'plain' (seed 0): ")
    assert difference in message
    assert "\n" not in message


def test_rounding_of_the_base_loss_is_no_difference_and_other_documents_are(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    rounded = {"training.base_heldout_nll": 3.001}
    assert len(compare(plain, write_run(tmp_path / "o", name="other", changes=rounded)).runs) == 2
    # Under the same hash of documents.
    with pytest.raises(RecordError, match="its control documents differ; its trained"):
        compare(plain, write_run(tmp_path / "other", name="other", ids="another"))


def test_settings_without_a_seed_in_common_need_the_same_documents(tmp_path: Path) -> None:
    drawn = {"data.documents_sha256": "dd"}
    plain = write_run(tmp_path / "p", name="plain")
    same = write_run(tmp_path / "s", name="same", seed=1)
    other = write_run(tmp_path / "o", name="other", seed=1, changes=drawn, ids="d")
    assert [point.num_seeds for point in compare(plain, same).front] == [1, 1]
    with pytest.raises(RecordError, match=r"'other' \(seed 1\) cannot be compared with 'plain'"):
        compare(plain, other)
    # Each shares a seed with the first, and none is shared by all.
    third = write_run(tmp_path / "p1", name="plain", seed=1, changes=drawn, ids="d")
    zero = write_run(tmp_path / "z", name="zero")
    with pytest.raises(RecordError, match="documents_sha256"):
        compare(plain, third, zero, other)


def test_the_first_setting_stays_the_first_where_its_first_seed_is_left_out(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{name}{seed}", name=name, seed=seed)
        for name, seed in (("plain", 1), ("fish", 0), ("plain", 0))
    ]
    comparison = compare(*runs)
    assert [point.name for point in comparison.front] == ["plain", "fish"]


def test_another_seed_may_draw_other_documents(tmp_path: Path) -> None:
    drawn = {"data.documents_sha256": "dd", "model.base_weights_sha256": "ee"}
    runs = [
        write_run(tmp_path / "p0", name="plain"),
        write_run(tmp_path / "p1", name="plain", seed=1, changes=drawn, ids="d"),
        write_run(tmp_path / "g0", name="g", correct=LESS),
        write_run(tmp_path / "g1", name="g", correct=LESS, seed=1, changes=drawn, ids="d"),
    ]
    comparison = compare(*runs)
    names = [(run.setting, run.seed) for run in comparison.runs]
    assert names == [("plain", 0), ("plain", 1), ("g", 0), ("g", 1)]
    with pytest.raises(RecordError, match=r"'g' \(seed 1\) cannot be compared with 'plain' \(seed"):
        compare(*runs[:3], write_run(tmp_path / "x", name="g", correct=LESS, seed=1))
    with pytest.raises(RecordError, match=r"'plain' \(seed 0\) is given twice"):
        compare(runs[0], runs[0])


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("training", None, "has no loss of two or more held-out documents before"),
        ("training.heldout_nll", None, "has no loss of two or more held-out documents before"),
        ("training.base_heldout_nll", None, "has no loss of two or more held-out documents before"),
        ("x4", None, "bucket 'x4' were not trained equally often"),
        ("x4", 16, "buckets 'x4' and 'x16' both have 16 repetitions"),
        ("x4", 0, "buckets 'control' and 'x4' both have 0 repetitions"),
        ("correct", {}, "its audit has no trained documents"),
    ],
)
def test_a_run_that_cannot_be_compared(tmp_path: Path, place: str, value: Any, reason: str) -> None:
    given: dict[str, Any] = {"changes": {place: value}}
    if place in ("x4", "correct"):
        given = {"repetitions": {place: value}} if place == "x4" else {place: value}
    run = write_run(tmp_path / "run", **given)
    with pytest.raises(RecordError) as caught:
        compare(run)
    assert str(caught.value).startswith("'plain' (seed 0) cannot be compared: ")
    assert reason in str(caught.value)


def test_a_run_without_readable_files(tmp_path: Path) -> None:
    run = FinishedRun(name="plain", seed=0, folder=tmp_path / "none", overrides={})
    with pytest.raises(RecordError, match=r"'.*report\.json' does not exist\. Run the command"):
        compare(run)
    run = write_run(tmp_path / "run")
    path = run.folder / "audit" / "records.parquet"
    pq.write_table(pa.table({"id": ["a"]}), path)
    for content in (path.read_bytes(), b"PAR1 not really"):
        path.write_bytes(content)
        save_audit_files(path.parent, has_card=False)
        with pytest.raises(RecordError, match="does not contain document scores"):
            compare(run)
    path.unlink()
    with pytest.raises(RecordError, match=r"records\.parquet' is damaged: it is missing"):
        compare(run)


@pytest.mark.parametrize("damage", [flip_byte, cut])
@pytest.mark.parametrize(
    "name", ["report.json", "records.parquet", "canaries.parquet", "audit.json"]
)
def test_a_damaged_audit_is_not_compared(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    run = write_run(tmp_path / "run", canaries=make_canaries([1.0], [False]))
    damage(run.folder / "audit" / name)
    with pytest.raises(RecordError, match=rf"{name}' is damaged.*Run 'memguard audit' again"):
        compare(run)


def test_a_damaged_manifest_is_not_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_manifest(run)
    (run.folder / "metrics.jsonl").touch()
    save_sealed(sum_trained(run.folder, run_key="", step=1), run.folder / "trained.json")
    compare(run)
    path = run.folder / "manifest.jsonl"
    path.write_text(path.read_text().replace("doc-4-2", "doc-4-9"))
    with pytest.raises(RecordError, match=r"manifest\.jsonl' is not what was written"):
        compare(run)


@pytest.mark.parametrize("change", ["fewer", "twice"])
def test_scores_of_another_audit(tmp_path: Path, change: str) -> None:
    run = write_run(tmp_path / "run")
    path = run.folder / "audit" / "records.parquet"
    rows = pq.read_table(path).to_pylist()
    pq.write_table(
        pa.Table.from_pylist(rows[1:] if change == "fewer" else [rows[1], *rows[1:]]), path
    )
    save_audit_files(path.parent, has_card=False)
    with pytest.raises(RecordError, match="bucket 'control' has 4 documents, not 5"):
        compare(run)


def test_rows_may_come_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    plain = write_run(tmp_path / "plain")
    one = compare(plain, write_run(tmp_path / "b", name="b", correct=LESS))
    other = compare(plain, write_run(tmp_path / "b", name="b", correct=LESS, reverse_rows=True))
    assert one == other


def test_a_sweep_from_file_to_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(
        "name: sweep\n"
        "run: {model: {path: m}, data: {train: a.jsonl}}\n"
        "settings: [{name: plain}, {name: slow, overrides: {optim.lr: 0.5}}]\n"
        "seeds: [0, 1]\n"
    )
    sweep = load_sweep("sweep.yaml")
    for number, run in enumerate(sweep.runs):
        with pytest.raises(RecordError, match=r"'sweep' is not finished; missing: .*slow-seed1\."):
            list_finished(sweep)
        prepare_folder(run)
        write_run(run.folder, correct=LESS if number > 1 else CORRECT)
        mark_finished(run.folder, run.key)
    comparison = compare_runs(
        list_finished(sweep), name=sweep.name, command="memguard compare sweep.yaml"
    )
    assert comparison.name == "sweep"
    assert comparison.command == "memguard compare sweep.yaml"
    assert [(run.setting, run.seed, run.run, run.overrides) for run in comparison.runs] == [
        ("plain", 0, "plain-seed0", {}),
        ("plain", 1, "plain-seed1", {}),
        ("slow", 0, "slow-seed0", {"optim.lr": 0.5}),
        ("slow", 1, "slow-seed1", {"optim.lr": 0.5}),
    ]
    assert {(test.setting, test.seed, test.bucket) for test in comparison.tables.tests} == {
        ("slow", seed, f"(trained {count} times)") for seed in (0, 1) for count in (4, 16)
    }
