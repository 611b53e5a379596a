"""A sweep expands into checked runs; what is wrong is told at its place before anything runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from memguard.compare import Sweep, load_sweep
from memguard.compare.sweep import hash_inputs
from memguard.config import BudgetConfig, OptimConfig, RunConfig
from memguard.errors import ConfigError, DataError

SWEEP: dict[str, Any] = {
    "name": "sweep",
    "output_dir": "out",
    "run": {
        "model": {"path": "checkpoint"},
        "data": {"train": "a.jsonl", "heldout_documents": 10},
        "optim": {"lr": 0.001},
    },
    "settings": [
        {"name": "plain"},
        {"name": "goldfish-k4", "mitigations": [{"name": "goldfish", "k": 4}]},
    ],
}
PRETRAIN: dict[str, Any] = {
    "model": {"scratch": {"config": {"model_type": "llama"}}},
    "data": {"train": "b.jsonl"},
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(values: dict[str, Any] | str, *overrides: str) -> Sweep:
    text = values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False)
    Path("sweep.yaml").write_text(text)
    return load_sweep("sweep.yaml", overrides)


def problems_of(values: dict[str, Any] | str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(values, *overrides)
    return list(caught.value.problems)


def with_run(**changes: Any) -> dict[str, Any]:
    return SWEEP | {"run": SWEEP["run"] | changes}


def test_one_run_for_each_setting() -> None:
    sweep = load(SWEEP)
    assert sweep.pretrain is None
    assert sweep.in_order == sweep.runs
    assert [run.name for run in sweep.runs] == ["plain", "goldfish-k4"]
    plain, goldfish = sweep.runs
    assert plain.folder == Path("out/sweep/plain")
    assert Path(plain.config.output_dir) / plain.config.name == plain.folder
    assert plain.config.mitigations == ()
    assert goldfish.config.mitigations[0].k == 4
    assert goldfish.config.model_copy(update={"mitigations": (), "name": "plain"}) == plain.config


def test_each_setting_with_each_seed() -> None:
    sweep = load(SWEEP | {"seeds": [1, 7]})
    assert [(run.name, run.setting, run.seed, run.config.seed) for run in sweep.runs] == [
        ("plain-seed1", "plain", 1, 1),
        ("plain-seed7", "plain", 7, 7),
        ("goldfish-k4-seed1", "goldfish-k4", 1, 1),
        ("goldfish-k4-seed7", "goldfish-k4", 7, 7),
    ]
    assert load(SWEEP | {"seeds": [5]}).runs[0].config.seed == 5


def test_settings_start_from_the_pretrained_model() -> None:
    run = {"data": {"train": "a.jsonl"}, "model": {"attn_implementation": "eager"}}
    sweep = load(SWEEP | {"run": run, "pretrain": PRETRAIN})
    base = sweep.pretrain
    assert sweep.in_order == (base, *sweep.runs)
    assert (base.name, base.folder, base.seed) == ("base", Path("out/sweep/base"), 0)
    assert not base.config.audit.enabled
    for started in sweep.runs:
        assert started.config.model.path == "out/sweep/base/model"
        assert started.config.model.attn_implementation == "eager"
    del run["model"]
    audited = PRETRAIN | {"audit": {"enabled": True}, "seed": 3}
    sweep = load(SWEEP | {"run": run, "pretrain": audited})
    assert sweep.pretrain.config.audit.enabled
    assert sweep.pretrain.seed == 3


def test_overrides_dotted_and_nested_alike() -> None:
    dotted = SWEEP["settings"] + [{"name": "c", "overrides": {"optim.lr": 1, "train.epochs": 2}}]
    nested = SWEEP["settings"] + [
        {"name": "c", "overrides": {"optim": {"lr": 1}, "train": {"epochs": 2}}}
    ]
    one, other = (load(SWEEP | {"settings": s}).runs[2].config for s in (dotted, nested))
    assert one == other
    assert (one.optim.lr, one.train.epochs) == (1.0, 2)
    assert load(SWEEP | {"settings": dotted}).runs[0].config.optim.lr == 0.001


def test_the_command_line_reaches_into_the_sweep() -> None:
    sweep = load(
        SWEEP, "run.optim.lr=0.5", "settings[1].mitigations[0].k=8", "output_dir=elsewhere"
    )
    assert {run.config.optim.lr for run in sweep.runs} == {0.5}
    assert sweep.runs[1].config.mitigations[0].k == 8
    assert sweep.folder == Path("elsewhere/sweep")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("data.seq_len", 64, "settings are compared on the same documents; set it in 'run'"),
        ("model.path", "m", "settings start from the same weights; set it in 'run'"),
        ("audit.base", False, "settings are compared under the same probes; set it in 'run'"),
        ("seed", 1, "settings are compared with the same seeds; set 'seeds'"),
        ("name", "n", "the setting has a 'name' of its own"),
        ("output_dir", "n", "set the sweep's own 'output_dir'"),
        ("mitigations[0].k", 2, "the setting has 'mitigations' of its own"),
    ],
)
def test_what_no_setting_may_change(key: str, value: Any, reason: str) -> None:
    settings = [{"name": "plain"}, {"name": "x", "overrides": {key: value}}]
    (problem,) = problems_of(SWEEP | {"settings": settings})
    assert problem.startswith("sweep.yaml:15:5 ")
    assert problem.endswith(f"'{key}' must not differ between settings: {reason}")


@pytest.mark.parametrize("key", ["name", "output_dir", "mitigations", "seed"])
def test_what_the_sweep_decides(key: str) -> None:
    (problem,) = problems_of(with_run(**{key: "x"}))
    assert problem.startswith(f"sweep.yaml:11:3 'run.{key}' must not be set here: ")


def test_an_empty_section_is_an_override() -> None:
    settings = SWEEP["settings"] + [
        {"name": "c", "overrides": {"budget": {}, "train.audit_every_steps": 10, "optim": {}}}
    ]
    plain, *_, run = load(SWEEP | {"settings": settings}).runs
    assert plain.config.budget is None
    assert run.config.budget == BudgetConfig()
    # As 'optim={}' on a command line.
    assert run.config.optim == OptimConfig()
    assert plain.config.optim != OptimConfig()


def test_places_of_wrong_overrides() -> None:
    text = """\
name: sweep
run:
  model: {path: m}
  data: {train: a.jsonl}
  optim: {lr: 0.1}
settings:
  - name: plain
  - name: faster
    overrides:
      optim.lr: -1
      train: {lr: 3}
      name.x: 2
  - name: {long_name}
seeds: [0, 1]
""".replace("{long_name}", "n" * 95)
    # What a sweep itself may not have is said before its runs are looked at.
    assert problems_of(text.replace("[0, 1]", "[0, 9223372036854775808]")) == [
        "sweep.yaml:14:12 'seeds[1]' should be less than or equal to 9223372036854775807; "
        "got 9223372036854775808"
    ]
    problems = problems_of(text)
    assert problems == [
        "sweep.yaml:12:7 'name.x' must not differ between settings: the setting has a 'name' of "
        "its own",
        "sweep.yaml:10:7 'run.optim.lr' should be greater than 0; got -1",
        "sweep.yaml:11:15 'run.train.lr' is not a setting; did you mean 'run.optim.lr'?",
        *(
            f"sweep.yaml:13:5 'run.name' should have at most 100 characters; got '{'n' * 56}..."
            f"{'n' * 13}-seed{seed}'"
            for seed in (0, 1)
        ),
    ]


def test_all_problems_come_together_also_around_the_blocks() -> None:
    problems = problems_of(
        {
            "name": "a b",
            "run": SWEEP["run"] | {"seed": 1, "optim": {"lr": -1}},
            "settings": [],
            "seed": 3,
        },
        "pretrain.data.train=b.jsonl",
    )
    text = "\n".join(problems)
    for expected in (
        "'name' should be letters",
        "'settings' should have at least 1 item",
        "'seed' is not a setting; did you mean 'seeds'?",
        "'run.seed' must not be set here",
        "'run.optim.lr' should be greater than 0",
        "'run.model.path' must not be set with 'pretrain'",
        "'pretrain.model' is missing",
    ):
        assert expected in text
    assert len(problems) == len(set(problems)) == 7


def test_settings_that_differ_stand_in_overrides() -> None:
    settings = [{"name": name, "optim": {"lr": 0.1}} for name in ("a", "b")]
    problems = problems_of(SWEEP | {"settings": settings})
    assert len(problems) == 2, "and not that there is no setting"
    assert all(
        "put its settings that differ into 'overrides', as {optim.KEY: VALUE}" in one
        for one in problems
    )


EARLY = {"train.audit_every_steps": 5, "budget": {"action": "stop"}}
BEST = {"train": {"heldout_every_steps": 1, "keep": "best", "export": "best"}}
FROM_BASE = {"run": {"data": {"train": "a.jsonl"}}, "pretrain": PRETRAIN}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"settings": [{"name": "plain"}, {"name": "early", "overrides": EARLY}]},
            "'budget.action: stop' ends training early",
        ),
        (
            {"settings": [{"name": "plain"}, {"name": "best", "overrides": BEST}]},
            "'train.export: best' ends training early",
        ),
        (
            FROM_BASE | {"pretrain": PRETRAIN | {"name": "x"}},
            "'pretrain.name' must not be set here: the sweep names its runs",
        ),
        ({"pretrain": PRETRAIN}, "'run.model.path' must not be set with 'pretrain'"),
        ({"settings": [{"name": "base"}]}, "'settings[0].name' must not be 'base'"),
        ({"seeds": [1, 2, 1]}, "'seeds[2]' is 1 a second time"),
        (with_run(audit={"enabled": False}), "'run.audit.enabled' must be true"),
        *(
            ({"settings": [{"name": "plain", "overrides": {key: 3}}]}, "is not a setting")
            for key in ("", ".")
        ),
        *(({"run": run}, "'run' should be a block of settings") for run in (None, 3, "text", [1])),
        ({"run": {0: 1}}, "should be a valid string|should be a word"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_one_problem(values: dict[str, Any], problem: str) -> None:
    (found,) = problems_of(SWEEP | values)
    assert any(each in found for each in problem.split("|"))


def test_a_run_is_not_a_sweep() -> None:
    (problem,) = problems_of({"name": "x", **SWEEP["run"]})
    assert problem == "sweep.yaml contains a run, not a sweep: use 'memguard train sweep.yaml'"


def key_of(values: dict[str, Any], *overrides: str) -> str:
    return load(values, *overrides).runs[0].key


def test_keys_follow_what_decides_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of(SWEEP)
    assert len(key) == 32
    assert key == key_of(SWEEP)
    assert key == key_of(SWEEP, "output_dir=moved")
    assert key == key_of(SWEEP, "run.parallel.x=2")
    assert key == key_of(SWEEP | {"settings": SWEEP["settings"][:1]})
    assert key != key_of(SWEEP, "run.optim.lr=0.5")
    assert key != key_of(SWEEP, "settings[0].mitigations=[{name: goldfish}]")
    assert key != key_of(SWEEP, "seeds=[1]")
    assert len({run.key for run in load(SWEEP | {"seeds": [0, 1]}).runs}) == 4
    monkeypatch.setattr("memguard.compare.sweep.__version__", "9")
    assert key != key_of(SWEEP)


def test_keys_follow_the_documents() -> None:
    missing = key_of(SWEEP)
    Path("a.jsonl").write_text("{}")
    key = key_of(SWEEP)
    assert key != missing
    Path("a.jsonl").write_text("{ }")
    assert key_of(SWEEP) != key
    Path("a.jsonl").write_text("{}")
    assert key_of(SWEEP) == key

    Path("folder/deep").mkdir(parents=True)
    in_folder = with_run(data={"train": "folder"})
    empty = key_of(in_folder)
    Path("folder/deep/a.txt").write_text("a")
    assert key_of(in_folder) != empty
    # No path at all: names far longer than a file may have.
    assert key_of(with_run(data={"train": "docstrings:" + "json," * 200}))


def test_an_unreadable_source(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.jsonl").write_text("{}")
    load_values = SWEEP

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("memguard.compare.sweep.hashlib.file_digest", refuse)
    with pytest.raises(DataError, match=r"'a\.jsonl' cannot be read: Permission denied"):
        load(load_values)


def test_a_changed_pretrain_changes_every_run() -> None:
    values = SWEEP | {"run": {"data": {"train": "a.jsonl"}}, "pretrain": PRETRAIN}
    before = [run.key for run in load(values).in_order]
    after = [run.key for run in load(values, "pretrain.optim.lr=0.1").in_order]
    assert not set(before) & set(after)
    moved = [run.key for run in load(values, "output_dir=moved").in_order]
    assert moved == before


def test_expanding_needs_no_torch(tmp_path: Path) -> None:
    load(SWEEP)
    Path("torch.py").write_text("raise RuntimeError('torch was imported')")
    script = "from memguard.compare import load_sweep; print(len(load_sweep('sweep.yaml').runs))"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(1, {root!r}); {script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "2", done.stderr


@pytest.mark.parametrize("setting", ["train", "control", "heldout", "forget"])
def test_other_documents_are_other_inputs(tmp_path: Path, setting: str) -> None:
    data = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "control", "heldout")}
    data["forget"] = str(tmp_path / "forget.jsonl")
    for path in data.values():
        Path(path).write_text('{"text": "as it was"}\n')
    config = RunConfig.model_validate(
        {"name": "run", "model": {"path": "folder"}, "data": data, "mitigations": [{"name": "npo"}]}
    )
    before = hash_inputs(config)
    assert hash_inputs(config) == before
    Path(data[setting]).write_text('{"text": "as it is"}\n')
    assert hash_inputs(config) != before


def test_files_of_a_pattern_and_of_a_linked_folder_are_inputs(tmp_path: Path) -> None:
    file = tmp_path / "far" / "a.jsonl"
    file.parent.mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "linked").symlink_to(file.parent)
    found = []
    for text in ("as it was", "as it is"):
        file.write_text(json.dumps({"text": text}))
        for source in (str(tmp_path / "f*" / "*.jsonl"), str(tmp_path / "d")):
            values = {"name": "run", "model": {"path": "folder"}, "data": {"train": source}}
            found.append(hash_inputs(RunConfig.model_validate(values)))
    assert found[0] == found[1] != found[2] == found[3]


TASK = """
task: my_quiz
dataset_path: json
output_type: multiple_choice
"""


def test_the_utility_is_the_loss_or_a_task_of_the_runs() -> None:
    Path("quiz.yaml").write_text(TASK)
    audited = with_run(audit={"utility": "arc_easy:20,quiz.yaml"})
    assert load(audited).config.utility == "heldout_nll"
    for name in ("arc_easy", "my_quiz"):
        assert load(audited | {"utility": name}).config.utility == name
    (problem,) = problems_of(audited | {"utility": "hellaswag"})
    assert problem.startswith("sweep.yaml:")
    assert (
        "'utility' must be heldout_nll or a task of 'run.audit.utility', one of heldout_nll, "
        "arc_easy, my_quiz; got 'hellaswag'"
    ) in problem
    (problem,) = problems_of(SWEEP | {"utility": "arc_easy"})
    assert "one of heldout_nll; got 'arc_easy'" in problem


def test_the_tasks_decide_the_outcome_and_the_axis_does_not() -> None:
    Path("quiz.yaml").write_text(TASK)
    audited = with_run(audit={"utility": "quiz.yaml"})
    before = [run.key for run in load(audited).runs]
    assert [run.key for run in load(audited | {"utility": "my_quiz"}).runs] == before
    Path("quiz.yaml").write_text(TASK + "num_fewshot: 1\n")
    assert not set(before) & {run.key for run in load(audited).runs}
