"""Benchmark tasks in the settings of an audit: by name, by path, and as settings."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from memguard.config import AuditConfig, Document, apply_overrides


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("arc_easy,./my_task.yaml", [("arc_easy", None), ("./my_task.yaml", None)]),
        (" hellaswag:200 , ./a:b.yaml:7,", [("hellaswag", 200), ("./a:b.yaml", 7)]),
        (["arc_easy:5", Path("my task.yaml")], [("arc_easy", 5), ("my task.yaml", None)]),
        ([{"task": "piqa:9"}, {"task": "copa", "limit": 3}], [("piqa:9", None), ("copa", 3)]),
        ({"task": "piqa"}, [("piqa", None)]),
        ("", []),
    ],
)
def test_reads_tasks_in_every_form(given: object, expected: list[tuple[str, int | None]]) -> None:
    tasks = AuditConfig(utility=given).utility  # type: ignore[arg-type]
    assert [(task.task, task.limit) for task in tasks] == expected
    # What a run writes to its config.yaml reads back as the same.
    assert AuditConfig(**AuditConfig(utility=tasks).model_dump()).utility == tasks


def test_an_override_takes_names() -> None:
    document = Document(path="run.yaml", values={"audit": {}}, places={})
    values = apply_overrides(document, ["audit.utility=arc_easy:20,piqa"]).values["audit"]
    assert [task.describe() for task in AuditConfig(**values).utility] == ["arc_easy:20", "piqa"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("piqa,copa,piqa:5", "'utility' has the task 'piqa' 2 times"),
        ([{"task": " "}], "'task' of 'utility' is empty"),
        ([{"task": "piqa", "metric": ""}], "'metric' of 'utility' is empty for 'piqa'"),
        ("piqa:0", "limit"),
        (3, "utility"),
        ([3], "utility"),
    ],
)
def test_refuses_tasks_that_cannot_be_meant(given: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AuditConfig(utility=given)  # type: ignore[arg-type]


def test_downloads_are_for_tasks() -> None:
    with pytest.raises(ValidationError, match="'allow_download' does nothing without 'utility'"):
        AuditConfig(allow_download=True)
    assert AuditConfig(utility="piqa", allow_download=True).allow_download  # type: ignore[arg-type]


def test_lists_the_files_that_a_task_reads(tmp_path: Path) -> None:
    documents, functions = tmp_path / "items.jsonl", tmp_path / "steps.py"
    documents.touch()
    functions.touch()
    path = tmp_path / "task.yaml"
    path.write_text(
        f"task: mine\ndataset_kwargs: {{data_files: {{test: '{documents}'}}}}\n"
        "process_docs: !function steps.process\ninclude: missing.yaml\n"
    )
    files = AuditConfig(utility=[path]).utility[0].list_files()  # type: ignore[arg-type]
    assert files == [str(path), str(documents), str(functions)]
    assert AuditConfig(utility="hellaswag").utility[0].list_files() == []  # type: ignore[arg-type]
