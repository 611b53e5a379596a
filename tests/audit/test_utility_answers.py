"""Answers of models to tasks on disk: whole numbers come back, text is never written."""

import json
import math
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memguard.audit.benchmarks.answers import AnswerCache, Evaluation, remove_text
from memguard.records.utility import TaskMetric, TaskResult

SECRET = "the-users-secret"
SAMPLE = {
    "doc_id": 3,
    "doc": {"question": SECRET, "label": 1},
    "target": SECRET,
    "arguments": [[SECRET, " a"], [SECRET, " b"]],
    "resps": [[[-1.25, False]], [[-0.1, True]], [SECRET]],
    "filtered_resps": [SECRET, [-0.1, True]],
    "filter": "none",
    "metrics": ["acc"],
    "doc_hash": "d" * 64,
    "acc": 1.0,
    "bleu": (SECRET, SECRET),
    "note": {"text": SECRET},
}


def make_task(**changes: Any) -> Any:
    return SimpleNamespace(**{"fingerprint": "f", "headline": "acc", **changes})


def make_task_result(**changes: Any) -> TaskResult:
    metric = TaskMetric(
        name="perplexity",
        aggregation="weighted_perplexity",
        higher_is_better=False,
        value=math.inf,
        stderr=0.1 + 0.2,
        stderr_is_bootstrap=True,
        value_N=np.array([-1 / 3, np.nan]),
        weight_N=np.array([7.0, 9.0]),
    )
    values: dict[str, Any] = {
        "task": "mine",
        "model": "trained",
        "version": "1",
        "limit": 2,
        "num_fewshot": 0,
        "is_chat": False,
        "metrics": (metric,),
        "headline": "perplexity",
        "item_N": ("a", "b"),
        "samples_sha256": "c",
        "chance": 1 / 3,
        "num_forwards": 12,
        "num_decoded_tokens": 5,
    }
    return TaskResult(**{**values, **changes})


def make_answers(*samples: dict[str, Any]) -> Evaluation:
    return Evaluation(result=make_task_result(), samples=samples)


def test_numbers_come_back_bit_for_bit_as_the_answers_of_either_model(tmp_path: Path) -> None:
    cache, result = AnswerCache(tmp_path / "utility"), make_task_result()
    cache.store("weights", make_task(), make_answers(SAMPLE))
    # The base of one run may be the trained model of another.
    stored = cache.load("weights", make_task(), "base")
    assert stored is not None
    assert (stored.result.model, stored.result.is_cached) == ("base", True)
    for field in fields(TaskResult):
        if field.name not in ("model", "is_cached", "metrics"):
            assert getattr(stored.result, field.name) == getattr(result, field.name)
    (metric,), (expected,) = stored.result.metrics, result.metrics
    for field in fields(TaskMetric):
        if not field.name.endswith("_N"):
            assert getattr(metric, field.name) == getattr(expected, field.name)
    np.testing.assert_array_equal(metric.value_N, expected.value_N)
    np.testing.assert_array_equal(metric.weight_N, expected.weight_N)  # type: ignore[arg-type]
    assert stored.samples == (remove_text(SAMPLE),)


def test_no_text_is_written_and_only_the_owner_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "utility"
    AnswerCache(folder).store("weights", make_task(), make_answers(SAMPLE, SAMPLE))
    (path,) = folder.glob("*/*.json")
    assert SECRET not in path.read_text()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    kept = remove_text(SAMPLE)
    assert kept["resps"] == [[[-1.25, False]], [[-0.1, True]], [None]]
    assert (kept["acc"], kept["doc_hash"], kept["bleu"]) == (1.0, "d" * 64, [None, None])
    assert "doc" not in kept
    # What was read from the cache is written again as it is.
    assert remove_text(kept) == kept


@pytest.mark.parametrize(
    ("identity", "task"),
    [
        ("other weights", make_task()),
        ("weights", make_task(fingerprint="other documents")),
        ("weights", make_task(headline="acc_norm")),
    ],
)
def test_other_models_and_tasks_have_answers_of_their_own(
    tmp_path: Path, identity: str, task: Any
) -> None:
    cache = AnswerCache(tmp_path)
    cache.store("weights", make_task(), make_answers())
    assert cache.load(identity, task, "trained") is None


def _rename(path: Path, values: dict[str, Any]) -> None:
    """Write other values under the name that their bytes have."""
    import hashlib

    content = json.dumps(values).encode()
    path.unlink()
    path.with_name(f"{hashlib.sha256(content).hexdigest()[:16]}.json").write_bytes(content)


def test_what_is_damaged_is_asked_again(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path)
    cache.store("weights", make_task(), make_answers())
    (path,) = tmp_path.glob("*/*.json")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"12", b"13"))
    assert cache.load("weights", make_task(), "trained") is None
    for change in ({"item_N": ["a"]}, {"metrics": [{}]}, {"unknown": 1}, {"samples": None}):
        _rename(path, {**json.loads(content), **change})
        (path,) = tmp_path.glob("*/*.json")
        assert cache.load("weights", make_task(), "trained") is None, change
    _rename(path, json.loads(content))
    assert cache.load("weights", make_task(), "trained") is not None


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "utility").touch()
    cache = AnswerCache(tmp_path / "utility")
    with pytest.warns(UserWarning, match="answers to tasks cannot be cached"):
        cache.store("weights", make_task(), make_answers())
    cache.store("weights", make_task(), make_answers())
