"""`memguard compare RUN RUN ...`: finished runs beside each other, or why they cannot stand so."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from compare_examples import CORRECT, write_run

from memguard.config import RunConfig, dump_yaml
from memguard.errors import ConfigError, RecordError
from memguard.records.comparison import load_comparison
from memguard.records.run_files import CompileChoice, add_hash_line
from memguard.workflows.compare_runs import compare_folders

pytestmark = pytest.mark.slow


def write(folder: Path, name: str, *, seed: int = 0, better: bool = False, **changes: Any) -> str:
    """Write a finished run: its settings, report and scores."""
    correct = {count: [n // 2 for n in right] for count, right in CORRECT.items()}
    write_run(folder / name, correct=correct if better else CORRECT, name=name, seed=seed)
    values: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "output_dir": str(folder),
        "model": {"path": "base"},
        "data": {"train": "a.jsonl"},
    }
    config = RunConfig.model_validate({**values, **changes})
    (folder / name / "config.yaml").write_text(add_hash_line(dump_yaml(config)))
    return str(folder / name)


def test_runs_are_compared_as_settings_of_a_sweep_are(tmp_path: Path) -> None:
    plain = write(tmp_path, "plain")
    other = write(
        tmp_path,
        "other",
        better=True,
        mitigations=[{"name": "goldfish", "k": 3}],
        optim={"lr": 1e-3},
    )
    page, comparison = compare_folders([plain, other], tmp_path / "out")
    assert page == tmp_path / "out" / "comparison.html"
    assert comparison == load_comparison(page.with_suffix(".json"))
    assert comparison.name == "plain, other"
    assert [each.run for each in comparison.runs] == ["plain", "other"]
    # What differs but for the mitigations, which stand beside it.
    assert comparison.runs[1].overrides == {"optim.lr": 1e-3}
    assert comparison.runs[0].overrides == {}
    assert comparison.tables.tests
    for name in ("comparison.html", "comparison.svg"):
        assert page.with_name(name).stat().st_size > 1000


def test_without_out_it_goes_beside_the_first_run(tmp_path: Path) -> None:
    page, _ = compare_folders([write(tmp_path, "plain")], None)
    assert page == tmp_path / "comparison" / "comparison.html"


@pytest.mark.quick
def test_runs_that_differ_in_their_seed_are_one_setting(tmp_path: Path) -> None:
    folders = [
        write(tmp_path, "plain-0"),
        write(tmp_path, "plain-1", seed=1),
        write(tmp_path, "other-0", better=True, optim={"lr": 1e-3}),
        write(tmp_path, "other-1", better=True, optim={"lr": 1e-3}, seed=1),
    ]
    _, comparison = compare_folders(folders, tmp_path / "out")
    names = [(each.setting, each.seed) for each in comparison.runs]
    assert names == [("plain-0", 0), ("plain-0", 1), ("other-0", 0), ("other-0", 1)]


def test_what_fitted_in_memory_is_no_setting(tmp_path: Path) -> None:
    halved = {"micro_batch_size": 4, "activation_checkpointing": "full"}
    folders = [write(tmp_path, "a"), write(tmp_path, "b", seed=1, train=halved)]
    _, comparison = compare_folders(folders, tmp_path / "out")
    assert [(each.setting, each.seed) for each in comparison.runs] == [("a", 0), ("a", 1)]
    assert not any(each.overrides for each in comparison.runs)


def test_settings_that_differ_in_whether_blocks_were_compiled_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` decides for each run: runs of one setting may differ, and stay one setting."""
    seeds, faster = {"a": 0, "b": 1, "c": 0, "d": 1}, {"optim": {"lr": 1e-3}}
    folders = [
        write(tmp_path, name, seed=seed, **(faster if name in "cd" else {}))
        for name, seed in seeds.items()
    ]

    def compare(is_on: dict[str, bool]) -> tuple[list[object], str, str]:
        for name in seeds:
            (tmp_path / name / "environment.json").unlink(missing_ok=True)
        for name, value in is_on.items():
            content = CompileChoice(is_on=value, reason="any").add_to({"torch": "2"})
            (tmp_path / name / "environment.json").write_text(json.dumps(content))
        page, comparison = compare_folders(folders, tmp_path / "out")
        settings = [(run.setting, run.seed) for run in comparison.runs]
        assert settings == [("a", 0), ("a", 1), ("c", 0), ("c", 1)]
        overrides = [run.overrides.get("train.compile") for run in comparison.runs]
        return overrides, page.read_text(), capsys.readouterr().err

    overrides, page, said = compare({"a": True, "b": False, "c": True})
    assert overrides == [True, False, True, None]
    assert "compile yes" in page
    assert "compile no" in page
    assert (
        "'train.compile': 'a' (seed 0), 'c' (seed 0) were compiled, 'a' (seed 1) were not" in said
    )
    for is_on in (dict.fromkeys(seeds, False), {"a": True}, {}):
        overrides, page, said = compare(is_on)
        assert overrides == [None] * 4
        assert "compile" not in said
        assert "compile yes" not in page


def test_other_settings_in_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / "low", "none"),
        write(tmp_path / "high", "none", seed=1, optim={"lr": 1e-3}),
        write(tmp_path / "high" / "again", "none", better=True, optim={"lr": 2e-3}),
    ]
    _, comparison = compare_folders(folders, tmp_path / "out")
    names = [(each.setting, each.seed) for each in comparison.runs]
    assert names == [("none", 0), ("high/none", 1), ("again/none", 0)]


def test_what_cannot_be_compared_is_told_in_one_line(tmp_path: Path) -> None:
    plain = write(tmp_path, "plain")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        compare_folders([plain, str(tmp_path / "nowhere")], None)
    with pytest.raises(ConfigError, match="given twice"):
        compare_folders([plain, f"{plain}/."], None)
    # The same settings and seed under another name.
    shutil.copytree(plain, tmp_path / "again")
    with pytest.raises(RecordError, match="'plain' \\(seed 0\\) is given twice"):
        compare_folders([plain, str(tmp_path / "again")], None)
    other = write(tmp_path, "other", optim={"lr": 1e-3})
    write_run(tmp_path / "other", changes={"method.continuation_tokens": 40})
    with pytest.raises(RecordError, match="'continuation_tokens' is 40, not 50"):
        compare_folders([plain, other], None)
