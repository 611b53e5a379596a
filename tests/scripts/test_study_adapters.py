"""The study of adapters: learning rates for equal held-out losses, its sweeps, a quick run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_examples import write_texts
from ranks import RankPool
from result_examples import make_tables, value_row
from script_calls import list_cells, load_script, run_study

from memguard.compare import load_sweep
from memguard.config import load_yaml
from memguard.config.optimizers import OPTIMIZERS
from memguard.records import ComparedRun, Comparison, Cost

pytestmark = pytest.mark.slow

STUDY = Path(__file__).resolve().parents[2] / "eval" / "studies" / "adapters.yaml"


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("study_adapters")


def test_the_study_has_each_setting_with_and_without_goldfish() -> None:
    sweep = load_sweep(STUDY)
    plain = [setting for setting in sweep.config.settings if not setting.mitigations]
    names = ["full", "lora-r4", "lora-r16", "lora-r64", "head"]
    assert [setting.name for setting in plain] == names
    masked = [setting for setting in sweep.config.settings if setting.mitigations]
    for before, after in zip(plain, masked, strict=True):
        assert after.name == f"{before.name}-goldfish"
        assert after.overrides == before.overrides
        assert after.mitigations[0].model_dump()["k"] == 4
    assert len(sweep.runs) == 30


def test_one_loss_has_a_low_and_a_high_rate(script: Any) -> None:
    # A parabola in log(rate), with its minimum at 1e-3.
    rates = [10 ** (power / 2) for power in range(-10, -2)]
    curve = [(rate, math.log10(rate / 1e-3) ** 2 - 2) for rate in rates]
    low, high = script.find_rates(curve, -1.0)
    # At nodes of the interpolation, to the three digits of a rate.
    assert low == pytest.approx(1e-4, rel=5e-3)
    assert high == pytest.approx(1e-2, rel=5e-3)
    low, high = script.find_rates(curve, -1.5)
    # Between nodes half a decade apart: a cubic is near a parabola.
    assert low == pytest.approx(10 ** (-3 - math.sqrt(0.5)), rel=0.05)
    assert high == pytest.approx(10 ** (-3 + math.sqrt(0.5)), rel=0.05)
    assert script.find_rates(curve, -2.0) == (1e-3, None), "the minimum is one rate"


def test_a_curve_that_does_not_rise_again_has_no_high_rate(script: Any) -> None:
    assert script.find_rates([(1e-4, -0.1), (1e-3, -0.3), (1e-2, -0.2)], -0.1) == (1e-4, None)
    assert script.find_rates([(1e-3, -0.3)], -0.3) == (1e-3, None)


def test_the_target_is_the_worst_of_the_minima(script: Any) -> None:
    curves = {
        "full": [(1e-4, -0.1), (1e-3, -0.5), (1e-2, 0.2)],
        "lora-r4": [(1e-3, -0.1), (2e-3, -0.3), (4e-3, -0.2)],
    }
    target, choices = script.choose_rates(curves)
    assert target == -0.3
    assert 1e-4 < choices["full"].rate < 1e-3 < choices["full"].high_rate < 1e-2
    assert (choices["full"].best_rate, choices["full"].best_change) == (1e-3, -0.5)
    assert (choices["lora-r4"].rate, choices["lora-r4"].high_rate) == (2e-3, None)


def test_the_sweeps_are_valid_and_differ_in_what_they_should(script: Any, tmp_path: Path) -> None:
    values = load_yaml(STUDY).values
    searching = script.build_rates(values)
    assert searching["seeds"] == [script.RATES_SEED]
    assert script.RATES_SEED not in values["seeds"]
    names = [setting["name"] for setting in searching["settings"]]
    assert len(names) == len(set(names)) == 60
    choices = {
        setting["name"]: script.Choice(
            rate=3e-3,
            high_rate=9e-3 if setting["name"] == "full" else None,
            best_rate=1,
            best_change=0,
        )
        for setting in values["settings"]
    }
    matched = script.build_matched(values, script.list_rates(choices), tmp_path / "base")
    assert "pretrain" not in matched
    for sweep in (searching, matched):
        path = tmp_path / f"{sweep['name']}.yaml"
        path.write_text(script.yaml.safe_dump(sweep))
        loaded = load_sweep(path)
        runs = {run.setting: run.config for run in loaded.runs}
        assert {run.data.model_dump_json() for run in runs.values()} == {
            loaded.runs[0].config.data.model_dump_json()
        }
        if sweep is matched:
            lrs = {name: run.optim.lr for name, run in runs.items()}
            assert lrs.pop("full_high") == 9e-3
            assert len(lrs) == 10
            assert set(lrs.values()) == {3e-3}
            assert {run.model.path for run in runs.values()} == {str(tmp_path / "base")}
        else:
            assert runs["lora-r4_0.003"].optim.lr == 3e-3
            assert runs["lora-r4_0.003"].adapter is not None


def make_compared(losses: Mapping[str, Sequence[float]]) -> Comparison:
    """Return runs with these losses by setting and seed; the loss before training is 5."""
    runs, rows = [], []
    for name, nlls in losses.items():
        for seed, nll in enumerate(nlls):
            place = {"setting": name, "seed": seed}
            cost = Cost.model_construct(train_s=10.0 + seed)
            run = ComparedRun.model_construct(**place, run=f"{name}-{seed}", doses={}, cost=cost)
            runs.append(run)
            for model, loss in (("trained", nll), ("base", 5.0)):
                rows.append(value_row("heldout", "nll", "heldout", loss, model=model, **place))
    return Comparison.model_construct(runs=runs, front=[], tables=make_tables(rows))


def test_a_setting_whose_loss_is_off_the_target_is_marked(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "read_peak", lambda folder: 3 * 2**20)
    monkeypatch.setattr(script, "count_trained", lambda folder: 1234)
    choice = script.Choice(rate=1e-3, high_rate=4e-3, best_rate=2e-3, best_change=-0.7)
    losses = {"full": (4.52, 4.5), "full_high": (4.5, 4.62)}
    choices = {"full": choice}
    rates = script.list_rates(choices)
    table = script.write_matching(make_compared(losses), choices, rates, -0.5, Path("x"))
    rows = list_cells(table)
    assert [row[2] for row in rows] == ["0.001", "0.004"]
    assert rows[0][3:5] == ["-0.490 [-0.500, -0.480]", "+0.010"]
    assert rows[1][4] == "+0.060 **not matched**"
    assert rows[0][5:] == ["-0.700 at 0.002", "10 s", "3 MiB"]


def test_rates_off_the_target_are_corrected_by_the_means_of_the_seeds(script: Any) -> None:
    rates = {"full": 1e-3, "head": 1e-3, "head_high": 1e-1}
    curves = {
        "full": [(1e-3, -0.4), (1e-2, -0.8)],
        "head": [(1e-3, -0.1), (1e-2, -0.5), (1e-1, -0.1), (1.0, 0.9)],
    }
    losses = {"full": 4.6, "head": 4.89, "head_high": 4.6}
    compared = make_compared({name: (nll, nll) for name, nll in losses.items()})
    measured = script.measure(compared, rates, {})
    assert measured["full"] == pytest.approx({1e-3: -0.4})
    corrected = script.correct_rates(curves, rates, measured, -0.1)
    assert corrected.keys() == {"full", "head_high"}, "the head is within the tolerance"
    # Proportional to the rate below the grid: a quarter of the change at a quarter of the rate.
    assert corrected["full"] == pytest.approx(2.5e-4, rel=5e-3)
    # The mean is 0.3 below the other seed's curve, which at 1 is then 0.6: the target is between.
    assert 1e-1 < corrected["head_high"] < 1
    again = make_compared({"full": (4.9, 4.9)})
    replaced = script.replace_runs(compared, again)
    assert [run.setting for run in replaced.runs] == [run.setting for run in compared.runs]
    assert script.measure(replaced, rates, {})["full"] == pytest.approx({1e-3: -0.1})
    assert (
        script.correct_rates(
            {"full": curves["full"]},
            {"full": corrected["full"]},
            script.measure(again, corrected, measured),
            -0.1,
        )
        == {}
    )


def test_a_quick_run_trains_matches_and_prints_its_tables(
    script: Any, ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / "documents.jsonl", 60)
    page = script.STUDIES / "adapters.md"
    before = page.read_bytes()
    run_study(
        "adapters",
        "--quick",
        f"--output-dir={tmp_path}",
        f"run.data.train=[{texts}]",
        f"pretrain.data.train=[{texts}]",
        # These documents have about 100 tokens.
        "run.data.min_document_tokens=60",
        # Two of its three settings.
        "settings=[{name: lora-r4, overrides: {adapter: {name: lora, r: 4, lora_alpha: 8}}}, "
        "{name: head, overrides: {train.trainable_modules: [lm_head]}}]",
    )
    printed = capsys.readouterr().out
    assert page.read_bytes() == before, "a quick run is no result"
    folder = tmp_path / "adapters-quick"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"lora-r4", "head"}
    rows = [row for row in printed.splitlines() if row.startswith(("| lora", "| head"))]
    assert len(rows) == 3 * 2, "three tables of two settings"
    trained = {row.split(" | ")[0][2:]: row.split(" | ")[1] for row in rows[:2]}
    assert trained["head"] == f"{32 * 400:,}"
    # Queries, keys, values and output of 32 x 32, three matrices of 32 x 48, rank 4.
    assert trained["lora-r4"] == f"{4 * (4 * 64 + 3 * 80):,}"


def test_each_optimizer_has_a_rate_and_differs_in_nothing_else(tmp_path: Path) -> None:
    script = load_script("study_optimizers")
    assert list(script.RATES) == list(OPTIMIZERS)
    path = tmp_path / "optimizers.yaml"
    values = {**load_yaml(STUDY).values, "settings": script.build_settings()}
    path.write_text(yaml.safe_dump(values))
    runs = load_sweep(path).runs
    assert len(runs) == 3 * len(OPTIMIZERS)
    for run in runs:
        assert (run.config.optim.name, run.config.optim.lr) == (
            run.setting,
            script.RATES[run.setting],
        )
        may_clip = not OPTIMIZERS[run.setting].why_no_clipping
        assert (run.config.optim.max_grad_norm is not None) == may_clip
        others = {"name", "seed", "output_dir", "optim"}
        first = runs[0].config.model_dump(exclude=others)
        assert run.config.model_dump(exclude=others) == first


def test_the_part_on_optimizers_writes_only_between_its_own_marks(
    ranks: RankPool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = write_texts(tmp_path / "documents.jsonl", 60)
    monkeypatch.setattr(load_script("study_optimizers"), "RATES", {"adamw": 1e-3, "lomo": 0.1})
    run_study(
        "adapters",
        "--part=optimizers",
        "--quick",
        f"--output-dir={tmp_path}",
        f"run.data.train=[{texts}]",
        f"pretrain.data.train=[{texts}]",
        "run.data.min_document_tokens=60",
    )
    tables = capsys.readouterr().out
    assert "**not matched in loss**" in tables
    rows = {row[0]: row for row in list_cells(tables)}
    assert list(rows) == ["before training", "adamw", "lomo"]
    assert rows["lomo"][1] == "0.1"
    page = tmp_path / "page.md"
    text = (STUDY.parent / "adapters.md").read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    load_script("study_common").replace_tables(page, "TABLE", part="optimizers")
    before, mark, rest = text.partition("<!-- tables: scripts/study.py --part optimizers -->")
    after = rest.partition("<!-- end of tables -->")[2]
    expected = f"{before}{mark}\n\nTABLE\n\n<!-- end of tables -->{after}"
    assert page.read_text(encoding="utf-8") == expected
