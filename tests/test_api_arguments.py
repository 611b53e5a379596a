"""Wrong arguments from Python: our errors, one line, nothing left behind. No model is loaded."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from pydantic import BaseModel, ValidationError

from memguard import api
from memguard.errors import ConfigError, DataError, MemguardError, ModelError
from memguard.workflows.common.python_arguments import Name, Seed, python_call, refusing_places

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
    (compare([]), ConfigError, "'sweep' should have at least 1 item .* object of type list"),
    (compare(5), ConfigError, r"'sweep' should be a valid string, or .*Path, .* got 5 \(int\)"),
    (compare(["a", None]), ConfigError, r"'sweep\[1\]' should be a valid string, .* got None"),
    (compare("nope", "a=1"), ConfigError, "'overrides' should be a valid dict.* the text 'a=1'"),
    (compare("nope", {"a": object()}), ConfigError, "the value of 'a' must be a number, text"),
    (compare("nope", jobs=0), ConfigError, r"'jobs' should be greater than .* got 0 \(int\)"),
    (compare(["a"], out=5), ConfigError, r"'out' should be a valid string, .* got 5 \(int\)"),
    (compare(), ConfigError, "'sweep': missing required argument"),
    (compare("nope", job=2), ConfigError, "'job': unexpected keyword argument"),
    (audit(seed=1.5), ConfigError, "'seed' should be a valid integer; got 1.5"),
    (audit(seed=1.5), ConfigError, r"'seed' should be a valid integer; got 1.5 \(float\)"),
    (audit(seed="5"), ConfigError, "'seed' should be a valid integer; got the text '5'"),
    (audit(seed=True), ConfigError, "'seed' should be a valid integer; got True"),
    (audit(seed=2**63), ConfigError, "'seed' should be less than or equal to 9223372036854775807"),
    (audit(load_as=5), ConfigError, r"'load_as' should be a valid string; got 5"),
    (audit(tokenizer="x"), ModelError, r"'tokenizer' must be .*from_pretrained\('x'\)"),
    (audit(tokenizer=5), ModelError, r"'tokenizer' must be a transformers tokenizer; got 5"),
    (audit(tokenizer=len), ModelError, "got an object of type builtin_function_or_method"),
    (audit(format="alpca"), ConfigError, "'format' should be .*'alpaca'"),
    (audit(format=5), ConfigError, "'format' should be a valid string, or be a valid dictionary"),
    (
        audit(format={"columns": {"promt": "a"}}),
        ConfigError,
        "'columns.promt' is not a setting; did you mean",
    ),
    (audit(suite=5), ConfigError, "'suite' should be a valid string, or be an instance of Path"),
    (audit(out=""), ConfigError, "'out' should have at least 1 character; got the text ''"),
    (lambda: api.audit(5), ConfigError, "'run' should be a valid string"),  # type: ignore[arg-type]
    (train(RUN, "optim.lr=1"), ConfigError, "'overrides' should be .* the text 'optim.lr=1'"),
    (train(RUN, ["a=1"]), ConfigError, "'overrides' should be .* an object of type list"),
    (train(RUN, {5: 1}), ConfigError, r"'overrides\[5\]' should be a valid string; got 5"),
    (train(RUN, {"": 1}), ConfigError, "'overrides' should have at least 1 char.* the text ''"),
    (train({5: 1}), ConfigError, r"'config\[5\]' should be a valid string; got 5 \(int\)"),
    (train([RUN]), ConfigError, "'config' should be .* dictionary; got an object of type list"),
    (train(None), ConfigError, "'config' should be .* got None"),
    (plan(gpus="x"), ConfigError, "'gpus' should be a valid integer"),
    (plan(gpus=0), ConfigError, "'gpus' should be greater than or equal to 1"),
    (plan(mesh={"z": 2}), ConfigError, "'mesh' should be a valid string"),
    (plan(machine=5), ConfigError, "'machine' should be a valid string, or"),
    (plan(model=object()), ConfigError, "'model' should be a valid string, or"),
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
    @python_call
    def take(seed: Seed, *, others: Any = None) -> Any:
        return seed, others

    given = object()
    assert take(np.int64(3), others=given) == (3, given)
    assert type(take(np.int64(3))[0]) is int


def test_every_wrong_argument_has_a_line_and_other_errors_pass() -> None:
    class Settings(BaseModel):
        number: int

    @python_call
    def take(name: Name, *, seed: Seed = 0, numbers: Mapping[str, float] | None = None) -> None:
        Settings(number=name)  # type: ignore[arg-type]

    with pytest.raises(ConfigError) as caught:
        take("", seed=-1, numbers={"a": "x"})  # type: ignore[dict-item]
    assert caught.value.problems == (
        "'name' should have at least 1 character; got the text ''",
        "'seed' should be greater than or equal to 0; got -1 (int)",
        "'numbers' should be a valid number; got the text 'x'",
    )
    # One of pydantic inside the function is not about the arguments.
    with pytest.raises(ValidationError, match="for Settings"):
        take("x")


def test_a_place_that_cannot_be_written_is_named() -> None:
    wanted = pytest.raises(ConfigError, match="'/proc/memguard' cannot be created")
    with wanted as caught, refusing_places():
        Path("/proc/memguard").mkdir(parents=True)
    assert "choose another folder" in str(caught.value)
    # Anything else is not a mistake in the arguments.
    with pytest.raises(OSError, match="unnamed"), refusing_places():
        raise OSError(2, "unnamed")
