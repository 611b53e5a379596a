"""Wrong arguments from Python: our errors, one line, nothing left behind. No model is loaded."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from memguard import api
from memguard.errors import ConfigError, DataError, MemguardError, ModelError
from memguard.workflows.python_arguments import check_count, refusing_places

RUN = {"name": "run", "model": {"path": "nowhere"}, "data": {"train": "nothing.jsonl"}}
Call = Callable[[], Any]


def audit(**arguments: Any) -> Call:
    # An object of no use: what is tested is refused before it is looked at.
    return lambda: api.audit(**{"model": object(), "members": ["a text", "another"], **arguments})


def train(config: Any = RUN, overrides: Any = None) -> Call:
    return lambda: api.train(config, overrides)


def compare(*arguments: Any, **named: Any) -> Call:
    return lambda: api.compare(*arguments, **named)


def plan(**arguments: Any) -> Call:
    return lambda: api.plan(**{"model": "config.json", **arguments})


CASES: list[tuple[Call, type[MemguardError], str]] = [
    (compare([]), ConfigError, "'sweep' must be .* got an empty list"),
    (compare(5), ConfigError, r"'sweep' must be .* got 5 \(int\)"),
    (compare(["a", None]), ConfigError, "'sweep' must be .* got None"),
    (compare("nope", "a=1"), ConfigError, "'overrides' must be a dict .* got the text 'a=1'"),
    (compare("nope", {"a": object()}), ConfigError, "the value of 'a' must be a number, text"),
    (compare("nope", jobs=0), ConfigError, r"'jobs' must be a whole number .* got 0 \(int\)"),
    (compare(["a"], out=5), ConfigError, r"'out' must be a path .* got 5 \(int\)"),
    (audit(seed=None), ConfigError, "'seed' must be a whole number from 0 to 2.*; got None"),
    (audit(seed=1.5), ConfigError, r"'seed' must be .* got 1.5 \(float\)"),
    (audit(seed="x"), ConfigError, "'seed' must be .* got the text 'x'"),
    (audit(seed=True), ConfigError, "'seed' must be .* got True"),
    (audit(seed=2**63), ConfigError, "'seed' must be a whole number"),
    (audit(load_as=5), ConfigError, r"'load_as' must be a text \(str\); got 5"),
    (audit(tokenizer="x"), ModelError, r"'tokenizer' must be .*from_pretrained\('x'\)"),
    (audit(tokenizer=5), ModelError, r"'tokenizer' must be a transformers tokenizer; got 5"),
    (audit(tokenizer=len), ModelError, "got an object of type builtin_function_or_method"),
    (
        audit(text_column="a"),
        ConfigError,
        r"'text_column' is no argument; use columns=\{'text': 'a'\}",
    ),
    (audit(format="alpca"), ConfigError, "'format' should be .*'alpaca'"),
    (
        audit(columns="a"),
        ConfigError,
        r"'columns' must be a dict, e.g. \{'text': 'body'\}; got str",
    ),
    (audit(columns={"promt": "a"}), ConfigError, "'columns.promt' is not a setting; did you mean"),
    (audit(suite=5), ConfigError, "'suite' must be a path or a name"),
    (audit(out=""), ConfigError, "'out' must be a path .* got the text ''"),
    (lambda: api.audit(5), ConfigError, "'run' must be a path"),  # type: ignore[arg-type]
    (train(RUN, "optim.lr=1"), ConfigError, "'overrides' must be a dict .* the text 'optim.lr=1'"),
    (train(RUN, ["a=1"]), ConfigError, "'overrides' must be a dict .* an object of type list"),
    (train(RUN, {5: 1}), ConfigError, r"'overrides' must be a dict .* 5 \(int\) as a name"),
    (train(RUN, {"": 1}), ConfigError, "'overrides' must be a dict .* the text '' as a name"),
    (train({5: 1}), ConfigError, r"'config' must be .* 5 \(int\) as a name"),
    (train([RUN]), ConfigError, "'config' must be .* an object of type list"),
    (train(None), ConfigError, "'config' must be .* got None"),
    (plan(gpus="x"), ConfigError, "'gpus' must be a whole number"),
    (plan(gpus=0), ConfigError, "'gpus' must be a whole number from 1 to 10,000,000"),
    (plan(mesh={"z": 2}), ConfigError, "'mesh' must be a text"),
    (plan(machine=5), ConfigError, "'machine' must be a path or a name"),
    (plan(model=object()), ConfigError, "'model' must be a path or a name"),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES)
def test_wrong_arguments_are_named(
    call: Call, error: type[MemguardError], message: str, temporary: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert list(temporary.iterdir()) == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"members": ["a", None]}, DataError),
        ({"members": (text for text in "ab")}, DataError),
        ({"members": np.array(["a", "b"])}, DataError),
        ({"members": pandas.Series(["a"])}, DataError),
        ({"members": {"text": ["a"]}}, DataError),
        ({"dtype": "bf16"}, ModelError),
    ],
)
def test_a_refused_audit_leaves_no_folder(
    arguments: dict[str, Any], error: type[MemguardError], temporary: Path
) -> None:
    # The documents are read before the model is known not to exist.
    with pytest.raises(error):
        api.audit(**{"model": "nowhere/model", "members": ["a", "b"], **arguments})
    assert list(temporary.iterdir()) == []


def test_whole_numbers_may_be_of_numpy() -> None:
    assert check_count("seed", np.int64(3), low=0, high=9) == 3
    assert type(check_count("seed", np.int64(3), low=0, high=9)) is int


def test_a_place_that_cannot_be_written_is_named() -> None:
    wanted = pytest.raises(ConfigError, match="'/proc/memguard' cannot be created")
    with wanted as caught, refusing_places():
        Path("/proc/memguard").mkdir(parents=True)
    assert "choose another folder" in str(caught.value)
    # Anything else is not a mistake in the arguments.
    with pytest.raises(OSError, match="unnamed"), refusing_places():
        raise OSError(2, "unnamed")
