"""Finished runs become one record, or are refused with the run and the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from compare_examples import CORRECT, make_report, write_manifest, write_run
from damage import cut, flip_byte

from memguard.compare import (
    FinishedRun,
    build_comparison,
    compare_runs,
    find_extracted,
    load_sweep,
    mark_finished,
    prepare_folder,
)
from memguard.errors import RecordError
from memguard.records import Comparison, Interval, load_record, save_record
from memguard.records.audit_files import save_audit_files
from memguard.records.run_files import sum_trained
from memguard.records.sealed import save_sealed
from memguard.report import render_comparison, render_comparison_chart

LESS = {0: [3, 5, 2, 8, 4], 4: [9, 9, 9, 9, 9], 16: [45, 44, 20, 20, 20]}


def compare(*runs: FinishedRun) -> Comparison:
    return compare_runs(runs, name="sweep", command="memguard compare sweep.yaml")


def test_the_record_holds_what_a_reader_needs(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    goldfish = write_run(
        tmp_path / "goldfish", name="goldfish", correct=LESS, changes={"training.heldout_nll": 2.1}
    )
    comparison = compare(plain, goldfish)
    save_record(comparison, tmp_path / "comparison.json")
    assert load_record(Comparison, tmp_path / "comparison.json") == comparison

    values = json.loads((tmp_path / "comparison.json").read_text())
    assert values["schema"] == "memguard.comparison/3"
    assert [setting["name"] for setting in values["settings"]] == ["plain", "goldfish"]
    one, other = values["settings"]
    assert one["utility"]["heldout_nll"] == 2.0
    assert other["utility"]["heldout_nll"] == 2.1
    assert one["utility"]["base_heldout_nll"] == 3.0
    assert one["run"] == "plain"
    assert one["cost"]["dropped_fraction"] == 0.25
    assert [point["name"] for point in values["front"]] == ["plain", "goldfish"]
    assert values["recommendation"]["setting"] is None
    assert one["extraction"].keys() == other["extraction"].keys() == {"0", "4", "16"}
    cell = one["extraction"]["16"]
    assert (cell["num_documents"], cell["num_matched"], cell["rate"]) == (5, 3, 0.6)
    assert cell["ci"] == [0.5, 0.7]
    assert cell["near_verbatim"] == {
        "num_matched": 4,
        "rate": 0.8,
        "ci": [0.7000000000000001, 0.9],
        "texts": None,
    }
    # Of the other run's documents one is known to 90 %, token by token, and none is extracted.
    cell = other["extraction"]["16"]
    near = {"num_matched": 0, "rate": 0.0, "ci": [0.0, 0.1], "texts": None}
    assert cell["near_verbatim"] == near
    assert cell["teacher_forced_90"] == {
        "num_matched": 1,
        "rate": 0.2,
        "ci": [0.1, 0.30000000000000004],
        "texts": None,
    }
    cell = one["extraction"]["16"]
    assert cell["mean_token_accuracy"] == pytest.approx(sum(CORRECT[16]) / 250)
    assert values["base_extraction"]["16"]["num_matched"] == 0
    assert values["base_extraction"]["0"]["num_documents"] == 5
    assert values["environment"] == {"torch": "2.13.0"}
    assert values["documents_sha256"] == "cc"
    assert len(values["paired"]) == 2


def test_attacks_and_membership_come_along(tmp_path: Path) -> None:
    rate = {"num_documents": 5, "num_matched": 1, "rate": 0.2, "ci": (0.005, 0.716)}
    cost = {
        "num_documents": 5,
        "num_never": 1,
        "quantile_10": 1,
        "median": 4,
        "quantile_90": None,
        "within": {"1000": rate},
    }
    attacked = {
        "attack": "beam",
        "num_queries": 16,
        "best_verbatim": rate,
        "any_verbatim": rate,
        "mean_token_accuracy": None,
    }
    score = {"score": "loss", "num_members": 10, "num_nonmembers": 5, "auc": None}
    changes = {
        "attack_cost": [
            {"bucket": "background", "model": cost | {"median": 9.0}, "base": None},
            {"bucket": "x16", "model": cost, "base": cost | {"median": None}},
            {"bucket": "x4", "model": cost | {"median": 8}, "base": None},
        ],
        "attacks": [
            {"bucket": bucket, **attacked, "attack": attack}
            for bucket, attack in (("x16", "beam"), ("control", "beam"), ("x16", "fill"))
        ],
        "membership": [score],
    }
    comparison = compare(
        write_run(tmp_path / "a", name="a", changes=changes), write_run(tmp_path / "b", name="b")
    )
    save_record(comparison, tmp_path / "comparison.json")
    assert load_record(Comparison, tmp_path / "comparison.json") == comparison
    one, other = comparison.settings
    found = one.extraction["16"]
    assert (found.attack_cost.median, found.attack_cost.within[1000].num_matched) == (4, 1)
    assert [attack.bucket for attack in found.attacks] == ["x16", "x16"]
    assert [attack.bucket for attack in one.extraction["0"].attacks] == ["control"]
    assert one.extraction["4"].attacks == []
    assert one.extraction["0"].attack_cost is None
    base = comparison.base_extraction["16"]
    assert base.attack_cost.median is None
    assert base.attacks == []
    assert comparison.base_extraction["4"].attack_cost is None
    assert [score.score for score in one.membership] == ["loss"]
    # Their suite did not ask.
    assert (other.extraction["16"].attack_cost, other.membership) == (None, [])


def give_membership(auc: float, half: float) -> dict[str, Any]:
    interval = {"value": auc, "ci": (auc - half, auc + half)}
    return {"score": "blind", "num_members": 10, "num_nonmembers": 5, "auc": interval}


def give_measure(
    probe: str = "extraction", metric: str = "token_accuracy", low: float = 0.3
) -> dict[str, Any]:
    """Return gains over the base model, known from ``low`` on, and those beyond the control's."""
    gains = {"control": None, "x4": (0.02, (-0.01, 0.05)), "x16": (0.5, (0.4, 0.6))}
    raised = {"value": 0.6, "ci": (low, 0.9)}
    return {
        "probe": probe,
        "version": 2,
        "parameters": {},
        "metric": metric,
        "meaning": "",
        "unit": "share",
        "higher_is_better": False,
        "buckets": [
            {
                "bucket": name,
                "num_documents": 5,
                "num_missing": 0,
                "model": None,
                "base": None,
                "change_from_base": raised,
                "minus_control": None,
                "change_from_base_minus_control": gain and {"value": gain[0], "ci": gain[1]},
            }
            for name, gain in gains.items()
        ],
    }


@pytest.mark.parametrize(
    ("membership", "measures", "known"),
    [
        ([give_membership(0.5, 0.1)], [give_measure("grid"), give_measure()], True),
        # The texts alone tell the two apart, in either direction; or nobody knows.
        ([give_membership(0.7, 0.1)], [give_measure()], False),
        ([give_membership(0.3, 0.1)], [give_measure()], False),
        ([{**give_membership(0.5, 0.1), "auc": None}], [give_measure()], False),
        ([{**give_membership(0.5, 0.1), "score": "loss"}], [give_measure()], False),
        ([], [give_measure()], False),
        ([give_membership(0.5, 0.1)], [give_measure("grid")], False),
        ([give_membership(0.5, 0.1)], [give_measure(metric="logprob")], False),
        ([give_membership(0.5, 0.1)], [], False),
        # It may not have risen at all; the control fell.
        ([give_membership(0.5, 0.1)], [give_measure(low=-0.1)], False),
    ],
)
def test_what_training_added_beyond_the_control_is_known_where_the_texts_are_alike(
    tmp_path: Path, membership: list[dict[str, Any]], measures: list[dict[str, Any]], known: bool
) -> None:
    changes = {"membership": membership, "measures": measures}
    comparison = compare(write_run(tmp_path / "a", changes=changes))
    (setting,) = comparison.settings
    gains = {dose: cell.gain_minus_control for dose, cell in setting.extraction.items()}
    assert gains["0"] is None
    assert (gains["16"] is not None) == (gains["4"] is not None) == known
    if known:
        assert gains["16"] == Interval(value=0.5, ci=(0.4, 0.6))
    assert all(cell.gain_minus_control is None for cell in comparison.base_extraction.values())


def test_near_verbatim_that_was_not_generated_is_null_all_the_way(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    other = write_run(tmp_path / "other", name="other", correct=LESS, generated=False)
    comparison = compare(plain, other)
    save_record(comparison, tmp_path / "comparison.json")
    assert load_record(Comparison, tmp_path / "comparison.json") == comparison
    one, missing = comparison.settings
    assert all(cell.near_verbatim is not None for cell in one.extraction.values())
    assert all(cell.near_verbatim is None for cell in missing.extraction.values())
    assert missing.extraction["16"].teacher_forced_90.num_matched == 1
    assert [pair.near_verbatim for pair in comparison.paired] == [None, None]
    # Two tests, not four: Holm raises the smaller p by no more.
    low = min(pair.verbatim.p_value for pair in comparison.paired)
    assert min(pair.verbatim.p_holm for pair in comparison.paired) == pytest.approx(2 * low)
    alone = compare(other)
    assert all(cell.near_verbatim is None for cell in alone.base_extraction.values())
    assert render_comparison(comparison)
    assert render_comparison(alone)
    assert render_comparison_chart(alone)


@pytest.mark.parametrize("generated", [True, False])
def test_documents_that_greedy_decoding_extracts_are_found_again(
    tmp_path: Path, generated: bool
) -> None:
    correct = {0: [50, 3], 4: [50, 46, 45]}
    run = write_run(tmp_path / "run", correct=correct, generated=generated)
    found = find_extracted(run.folder)
    # The control is no part of it; 46 of 50 right is near-verbatim where that was generated.
    assert found == {"doc-4-0": True, "doc-4-1": generated, "doc-4-2": False}


def test_one_run_alone_has_nothing_to_be_tested_against(tmp_path: Path) -> None:
    comparison = compare(write_run(tmp_path / "plain"))
    assert comparison.paired == []
    with pytest.raises(RecordError, match="needs at least one run"):
        compare()


def test_an_audit_without_base_or_control(tmp_path: Path) -> None:
    correct = {4: CORRECT[4]}
    comparison = compare(
        write_run(tmp_path / "a", correct=correct, changes={"buckets.0.base": None})
    )
    assert comparison.base_extraction == {}
    assert comparison.settings[0].extraction.keys() == {"4"}


def test_environments_that_differ_are_both_shown(tmp_path: Path) -> None:
    comparison = compare(
        write_run(tmp_path / "a", name="a", changes={"environment": {"device": "x", "torch": "2"}}),
        write_run(tmp_path / "b", name="b", changes={"environment": {"device": "y", "torch": "2"}}),
    )
    assert comparison.environment == {"device": "x | y", "torch": "2"}


@pytest.mark.parametrize(
    ("place", "value", "difference"),
    [
        ("method.suite", "other", "'suite' is other, not extraction"),
        ("method.suite_version", 2, "'suite_version' is 2, not 1"),
        ("method.continuation_tokens", 40, "'continuation_tokens' is 40, not 50"),
        ("method.prefix_tokens", 32, "'prefix_tokens' is 32, not None"),
        ("method.max_edit_share", 0.2, "'max_edit_share' is 0.2, not 0.1"),
        ("method.dtype", "bf16", "'dtype' is bf16, not fp32"),
        ("method.probes", [], "its suite has other probes"),
        ("data.sources", ["b.jsonl"], "its documents come from other sources"),
        ("data.documents_sha256", "dd", "it has other documents ('documents_sha256')"),
        ("model.base_weights_sha256", "ee", "it started from other weights"),
        (
            "training.heldout_num_tokens",
            7,
            "its held-out loss is over 5 documents (7 tokens), not 5 documents (500 tokens)",
        ),
        (
            "training.base_heldout_nll",
            3.1,
            "its held-out loss before training is 3.1000, not 3.0000",
        ),
    ],
)
def test_what_does_not_answer_the_same_question(
    tmp_path: Path, place: str, value: Any, difference: str
) -> None:
    plain = write_run(tmp_path / "plain")
    other = write_run(tmp_path / "other", name="other", changes={place: value})
    with pytest.raises(RecordError) as caught:
        compare(plain, other)
    message = str(caught.value)
    assert message.startswith("'other' (seed 0) cannot be compared with 'plain' (seed 0): ")
    assert difference in message
    assert "\n" not in message


def test_all_differences_are_told(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    other = write_run(
        tmp_path / "other", name="o", changes={"method.dtype": "bf16", "method.suite_version": 2}
    )
    with pytest.raises(RecordError, match=r"'suite_version' is 2, not 1; 'dtype' is bf16"):
        compare(plain, other)


def test_rounding_of_the_base_loss_is_no_difference(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    other = write_run(
        tmp_path / "other", name="other", changes={"training.base_heldout_nll": 3.001}
    )
    assert len(compare(plain, other).settings) == 2


def test_other_documents_under_the_same_hash(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    other = write_run(tmp_path / "other", name="other", ids="another")
    with pytest.raises(RecordError, match="its control documents differ; its trained"):
        compare(plain, other)


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
    assert [(s.name, s.seed) for s in comparison.settings] == [
        ("plain", 0),
        ("plain", 1),
        ("g", 0),
        ("g", 1),
    ]
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
        ("buckets.1.num_repetitions", None, "bucket 'x4' were not trained equally often"),
        ("buckets.1.num_repetitions", 16, "buckets 'x4' and 'x16' both have 16 repetitions"),
        ("buckets.1.num_repetitions", 0, "buckets 'control' and 'x4' both have 0 repetitions"),
        ("buckets", [], "its audit has no trained documents"),
    ],
)
def test_a_run_that_cannot_be_compared(tmp_path: Path, place: str, value: Any, reason: str) -> None:
    run = write_run(tmp_path / "run", changes={place: value})
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
    path.write_bytes(b"PAR1 not really")
    save_audit_files(path.parent, has_card=False)
    with pytest.raises(RecordError, match="does not contain document scores"):
        compare(run)
    pq.write_table(pa.table({"id": ["a"]}), path)
    save_audit_files(path.parent, has_card=False)
    with pytest.raises(RecordError, match="does not contain document scores"):
        compare(run)
    path.unlink()
    with pytest.raises(RecordError, match=r"records\.parquet' is damaged: it is missing"):
        compare(run)


@pytest.mark.parametrize("damage", [flip_byte, cut])
@pytest.mark.parametrize("name", ["report.json", "records.parquet", "audit.json"])
def test_a_damaged_audit_is_not_compared(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    run = write_run(tmp_path / "run")
    damage(run.folder / "audit" / name)
    with pytest.raises(RecordError, match=rf"{name}' is damaged.*Run 'memguard audit' again"):
        compare(run)


def test_a_damaged_manifest_is_not_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_manifest(run, clusters=[1, 2, 3, 4, 5])
    (run.folder / "metrics.jsonl").touch()
    save_sealed(sum_trained(run.folder, run_key="", step=1), run.folder / "trained.json")
    compare(run)
    path = run.folder / "manifest.jsonl"
    path.write_text(path.read_text().replace('"cluster":2', '"cluster":1'))
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
            build_comparison(sweep, command="")
        prepare_folder(run)
        write_run(run.folder, correct=LESS if number > 1 else CORRECT)
        mark_finished(run.folder, run.key)
    comparison = build_comparison(sweep, command="memguard compare sweep.yaml")
    assert comparison.name == "sweep"
    assert comparison.command == "memguard compare sweep.yaml"
    assert [(s.name, s.seed, s.run, s.overrides) for s in comparison.settings] == [
        ("plain", 0, "plain-seed0", {}),
        ("plain", 1, "plain-seed1", {}),
        ("slow", 0, "slow-seed0", {"optim.lr": 0.5}),
        ("slow", 1, "slow-seed1", {"optim.lr": 0.5}),
    ]
    assert {(p.setting, p.seed, p.num_repetitions) for p in comparison.paired} == {
        ("slow", seed, count) for seed in (0, 1) for count in (4, 16)
    }


def test_the_examples_are_reports() -> None:
    # The made-up reports stand for real ones: `write_run` validates, this guards the bucket names.
    names = [bucket["bucket"] for bucket in make_report(CORRECT)["buckets"]]
    assert names == ["control", "x4", "x16", "background"]
