"""Tasks are found, checked and hashed; what cannot be run is refused by one line."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from benchmark_examples import make_rows, write_task

from memguard import errors
from memguard.audit.benchmarks import tasks as benchmark_tasks
from memguard.audit.benchmarks.isolation import isolated
from memguard.audit.benchmarks.tasks import OpenedTask, check_tasks, open_tasks
from memguard.config.utility import UtilityTask
from memguard.errors import ConfigError

ROWS = make_rows([f"{number} small texts of a few words, {'again ' * 60}" for number in range(7)])


def open_one(path: Path | str, *, allow_download: bool = False, **settings: Any) -> OpenedTask:
    (task,) = open_tasks([UtilityTask(task=str(path), **settings)], allow_download=allow_download)
    return task


def refuse(path: Path | str, **settings: Any) -> str:
    """Return the message, which is one line and names the setting."""
    with pytest.raises(ConfigError) as caught:
        open_one(path, **settings)
    message = str(caught.value)
    assert message.startswith("'audit.utility'")
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def choice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("choice"), "choice", ROWS)


# -- opening ---------------------------------------------------------------------------------------


def test_a_task_is_opened(choice: Path) -> None:
    task = open_one(choice, num_fewshot=2, limit=3)
    assert (task.name, task.version, task.kind) == ("choice", "2.0", "multiple_choice")
    assert (task.num_fewshot, task.headline) == (2, "acc")
    assert open_one(choice).num_fewshot == 0
    assert open_one(choice, metric="acc_norm").headline == "acc_norm"


def test_filters_are_part_of_a_metrics_name(tmp_path: Path) -> None:
    path = write_task(tmp_path, "generation", ROWS)
    assert open_one(path).headline == "exact_match,whole"
    assert open_one(path, metric="exact_match").headline == "exact_match,whole"
    assert open_one(path, metric="exact_match,word").headline == "exact_match,word"
    message = refuse(path, metric="exact_match,none")
    assert "no metric 'exact_match,none'; it has exact_match,whole, exact_match,word" in message


def test_no_copy_of_the_documents_stays(
    choice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    read, folders = datasets.load_dataset, []

    def read_and_list(*args: Any, **kwargs: Any) -> Any:
        folders.extend(tmp_path.iterdir())
        return read(*args, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", read_and_list)
    task = open_one(choice).task
    (folder,) = folders
    assert folder.name.startswith("memguard-task-")
    assert not list(tmp_path.iterdir())
    assert tmp_path / "cache" == config.HF_DATASETS_CACHE
    # The documents are in memory, and so is what is made of them.
    docs = task.test_docs()
    assert not docs.cache_files
    lengths = docs.map(lambda doc: {"length": len(doc["question"])})["length"]
    assert list(lengths) == [len(question) for question in docs["question"]]
    assert not list(tmp_path.iterdir())


# -- the hash --------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Path], OpenedTask]] = {
    "limit": lambda folder: open_one(write_task(folder, "choice", ROWS), limit=2),
    "fewshot": lambda folder: open_one(write_task(folder, "choice", ROWS), num_fewshot=1),
    "chat": lambda folder: open_one(write_task(folder, "choice", ROWS), chat=True),
    "document": lambda folder: open_one(write_task(folder, "choice", ROWS[:-1])),
    "prompt": lambda folder: open_one(
        write_task(folder, "choice", ROWS, change=('"{{question}}"', '"Q: {{question}}"'))
    ),
    "version": lambda folder: open_one(
        write_task(folder, "choice", ROWS, change=("version: 2.0", "version: 2.1"))
    ),
}


def test_the_hash_is_of_what_is_asked(choice: Path, tmp_path: Path) -> None:
    """Not of where the files are, nor of which metric stands for the task."""
    same = open_one(choice).fingerprint
    moved = write_task(tmp_path, "choice", ROWS)
    assert open_one(moved, metric="acc_norm").fingerprint == same
    assert len(same) == 64
    others = [change(tmp_path).fingerprint for change in CHANGES.values()]
    assert len({same, *others}) == 1 + len(CHANGES)
    # Solved examples belong to the prompts.
    shots = [open_one(write_task(tmp_path, "choice", ROWS), num_fewshot=1)]
    rows = [{**ROWS[0], "question": "Another one"}, *ROWS[1:]]
    shots.append(open_one(write_task(tmp_path, "choice", rows), num_fewshot=1))
    assert shots[0].fingerprint != shots[1].fingerprint
    assert open_one(write_task(tmp_path, "choice", rows)).fingerprint == same


# -- refusals --------------------------------------------------------------------------------------


def test_without_the_extra_one_line_names_it(choice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    expected = "'audit.utility' needs lm_eval: pip install 'lm-eval>=0.4.13'"
    assert refuse(choice) == expected
    with pytest.raises(ConfigError, match=r"^'--utility' needs lm_eval: pip install"):
        check_tasks([UtilityTask(task="hellaswag")], setting="--utility")
    check_tasks([])
    assert open_tasks([], allow_download=False) == []


def test_files_and_names_are_checked_first(
    choice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_tasks, "isolated", None)  # in which lm-eval is imported
    with pytest.raises(ConfigError, match=r"no file './none.yaml'\. Give the path of a task's"):
        check_tasks([UtilityTask(task="./none.yaml")])
    other = write_task(tmp_path, "choice", ROWS)
    with pytest.raises(ConfigError, match="has two tasks 'choice': results are stored by name"):
        check_tasks([UtilityTask(task=str(choice)), UtilityTask(task=str(other))])
    with pytest.raises(ConfigError, match="has two tasks 'arc_easy'"):
        check_tasks([UtilityTask(task="arc_easy"), UtilityTask(task="arc_easy", limit=3)])


def test_a_name_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of four files instead of lm-eval's own, whose index takes seconds."""
    write_task(tmp_path, "choice", ROWS, change=("task: choice", "task: choice\ntag: all_choices"))
    (tmp_path / "group.yaml").write_text("group: my_group\ntask: [inner, rolling]\n")
    (tmp_path / "inner.yaml").write_text("group: inner\ntask: [all_choices]\n")
    write_task(tmp_path, "rolling", ROWS)
    monkeypatch.setattr(benchmark_tasks, "find_root", lambda: tmp_path)
    assert open_one("choice").name == "choice"
    quoted = ("task: quoted", '"task": "quoted" # as some of lm-eval are')
    write_task(tmp_path, "choice", ROWS, name="quoted", change=quoted)
    with monkeypatch.context() as patch:
        # Which only an index needs.
        patch.setattr(benchmark_tasks, "get_close_matches", None)
        patch.setattr("lm_eval.tasks._index.TaskIndex._iter_yaml_files", None)
        assert open_one("quoted").name == "quoted"
    assert "'chioce' is unknown to lm-eval. Did you mean choice?" in refuse("chioce")
    assert "'unlike' is unknown to lm-eval, and it is no path" in refuse("unlike")
    assert "'my_group' is a group of 2: an audit measures single tasks" in refuse("my_group")
    assert refuse("my_group").endswith("Name those to measure: choice, rolling")
    assert refuse("all_choices").endswith("Name those to measure: choice")
    assert "is a group of 2" in refuse(tmp_path / "group.yaml")


HUB = ("dataset_path: json", "dataset_path: Rowan/hellaswag\ndataset_name: small")


def test_a_download_is_not_made_unasked(tmp_path: Path) -> None:
    """The files are those of a dataset on the hub."""
    message = refuse(write_task(tmp_path, "choice", ROWS, name="swag", change=HUB))
    assert "the task 'swag" not in message, "it is named as in the settings"
    assert "swag.yaml' needs the dataset 'Rowan/hellaswag, small', which is not on" in message
    assert "Set audit.allow_download=true" in message
    far = ('"test": "', '"test": "https://example.org')
    message = refuse(write_task(tmp_path, "choice", ROWS, name="far", change=far))
    assert "far.yaml' needs the dataset 'https://example.org/" in message


def test_without_a_network_one_line_names_task_and_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from huggingface_hub import constants

    for module in (datasets.config, constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    path = write_task(tmp_path, "choice", ROWS, name="swag", change=HUB)
    message = refuse(path, allow_download=True)
    assert "swag.yaml' needs the dataset 'Rowan/hellaswag, small', which could not be" in message
    assert "ConnectionError" in message


def test_offline_is_for_the_block_only() -> None:
    import datasets
    from huggingface_hub import constants

    before = (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    with isolated(allow_download=False):
        assert datasets.config.HF_HUB_OFFLINE
        assert constants.is_offline_mode()
    assert before == (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    with isolated(allow_download=True):
        assert before == (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)


BROKEN = {
    "yaml": ("choice", ("task: choice", "task: [choice"), "has a YAML that cannot be read"),
    "no name": ("choice", ("task: choice", "title: choice"), "a YAML without 'task', the name"),
    "field": (
        "choice",
        ("{{question}}", "{{question"),
        "cannot be opened: TemplateSyntaxError at",
    ),
    "file": ("choice", ("-test.jsonl", "-none.jsonl"), "cannot be opened: FileNotFoundError at "),
    "split": (
        "choice",
        ("test_split: test", "test_split: tests"),
        "cannot be opened: KeyError at",
    ),
    "unsafe": ("choice", ("metadata", "unsafe_code: true\nmetadata"), "runs programs that the"),
    "kind": ("choice", ("multiple_choice", "many_choices"), "cannot be opened"),
    "draws": ("generation", ("max_gen_toks: 24", "do_sample: true"), "with 'do_sample: True',"),
    "warm": ("generation", ("max_gen_toks: 24", "temperature: 0.7"), "with 'temperature: 0.7',"),
    "beams": ("generation", ("max_gen_toks: 24", "num_beams: 4"), "with 'num_beams: 4', and an"),
    "penalty": ("generation", ("max_gen_toks: 24", "top_a: 2"), "generates with 'top_a: 2', and"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_run_is_refused(case: str, tmp_path: Path) -> None:
    kind, change, expected = BROKEN[case]
    assert expected in refuse(write_task(tmp_path, kind, ROWS, change=change))


def test_greedy_arguments_are_taken(tmp_path: Path) -> None:
    change = ("max_gen_toks: 24", "max_gen_toks: 24, do_sample: false, temperature: 0.7, top_k: 5")
    assert open_one(write_task(tmp_path, "generation", ROWS, change=change)).name == "generation"


def test_a_fixed_number_of_examples_is_not_ignored(tmp_path: Path) -> None:
    path = write_task(tmp_path, "choice", ROWS, change=("metadata", "num_fewshot: 0\nmetadata"))
    assert open_one(path, num_fewshot=0).num_fewshot == 0
    message = refuse(path, num_fewshot=2)
    assert "fixes 'num_fewshot: 0' in its YAML, which lm-eval does not change; got" in message


def test_an_empty_task_is_refused(tmp_path: Path) -> None:
    path = write_task(tmp_path, "choice", ROWS)
    (tmp_path / "choice-test.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert open_one(path).name == "choice"
    (tmp_path / "choice-test.jsonl").write_text("")
    assert "cannot be opened" in refuse(path)
