"""No setting takes a number that overflows, a text no file system takes, nan or infinity."""

import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ValidationError, create_model
from pydantic_core import PydanticUndefined

from memguard.audit.suite import PROBES, Suite
from memguard.config import BudgetConfig, RunConfig, SweepConfig, validate
from memguard.config.settings import SamplingScheme, Settings
from memguard.config.yaml_text import Document
from memguard.errors import MAX_PATH, ConfigError, shorten
from memguard.planner.machine import Machine

PLAIN = {"name": "x", "model": {"path": "m"}, "data": {"train": ["d.jsonl"]}}
TOO_LARGE = {"less_than_equal", "less_than", "value_error"}


def list_plain(annotation: Any) -> Iterator[Any]:
    """Yield the classes that an annotation is made of."""
    if isinstance(annotation, type):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from list_plain(inner)


def list_blocks(root: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield root
    for field in root.model_fields.values():
        for inner in list_plain(field.annotation):
            if issubclass(inner, BaseModel):
                yield from list_blocks(inner)


BLOCKS = {block for root in (RunConfig, SweepConfig, Machine, Suite) for block in list_blocks(root)}
NUMBERS = [
    pytest.param(block, name, id=f"{block.__name__}.{name}")
    for block in sorted(BLOCKS | set(PROBES.values()), key=lambda block: block.__name__)
    for name, field in block.model_fields.items()
    if {int, float} & set(list_plain(field.annotation))
]


def test_all_numbers_are_found() -> None:
    names = {param.id for param in NUMBERS}
    assert len(names) > 80
    assert {"TrainConfig.epochs", "GoldfishConfig.k_by_dose", "SweepConfig.seeds"} <= names


@pytest.mark.parametrize(("block", "name"), NUMBERS)
def test_every_number_has_bounds(block: type[BaseModel], name: str) -> None:
    field = block.model_fields[name]
    annotation: Any = field.annotation
    for rule in field.metadata:
        annotation = Annotated[annotation, rule]
    one = create_model("One", __base__=Settings, value=(annotation, ...))

    def kinds_of_error(number: float) -> set[str]:
        kinds = set()
        # As it may stand: alone, in a list, in a block as value or key.
        for shape in (number, [number], [number, number], {"1": number}, {number: 2}):
            with pytest.raises(ValidationError) as error:
                one(value=shape)
            kinds |= {item["type"] for item in error.value.errors()}
        return kinds

    if field.default not in (None, PydanticUndefined):
        one(value=field.default)
    assert kinds_of_error(10**30) & TOO_LARGE
    for number in (1e300, -(10**30), float("inf"), float("-inf"), float("nan")):
        kinds_of_error(number)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"output_dir": "a\0b"}, "'output_dir'"),
        ({"model": {"path": "a\0"}}, "'model.path'"),
        ({"data": {"train": ["a", "\0.jsonl"]}}, "'data.train'"),
        ({"data": {"train": "a", "columns": {"text": "\0"}}}, "'data.columns.text'"),
        ({"audit": {"suite": "\0"}}, "'audit.suite'"),
        ({"audit": {"device_map": "auto", "max_memory": {"0\0": "1GiB"}}}, "'audit.max_memory'"),
        (
            {"model": {"scratch": {"config": {"model_type": "llama", "x": ["\0"]}}}},
            "'model.scratch.config'",
        ),
    ],
)
def test_nul_and_very_long_texts_are_refused(changes: dict[str, Any], place: str) -> None:
    for old, new, words in (("\0", "\0", "NUL character"), ("\0", "x" * 5000, "4,096 characters")):
        values = _replace(PLAIN | changes, old, new)
        with pytest.raises(ConfigError) as error:
            validate(RunConfig, values, Document(path="f", values=values, places={}))
        assert place in str(error.value)
        assert words in str(error.value)
        assert len(str(error.value)) < 300


def _replace(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {_replace(k, old, new): _replace(v, old, new) for k, v in value.items()}
    if isinstance(value, list):
        return [_replace(each, old, new) for each in value]
    return value.replace(old, new) if isinstance(value, str) else value


def test_long_values_are_cut_in_messages() -> None:
    values = PLAIN | {"seed": "9x" * 3000, "y" * 3000: 1}
    with pytest.raises(ConfigError) as error:
        validate(RunConfig, values, Document(path="f", values=values, places={}))
    assert all(len(problem) < 400 for problem in error.value.problems)
    assert "9x9x..." in str(error.value)


def test_shorten_keeps_both_ends() -> None:
    assert shorten("a" * 80) == "a" * 80
    path = f"/start/{'x' * 5000}/end.jsonl"
    assert len(shorten(path, MAX_PATH)) == MAX_PATH
    assert shorten(path, MAX_PATH).startswith("/start/x")
    assert shorten(path, MAX_PATH).endswith("x/end.jsonl")


@pytest.mark.parametrize("limit", [0.0, 0.1, 1.0])
def test_a_limit_is_a_share(limit: float) -> None:
    assert BudgetConfig(limit=limit).limit == limit


@pytest.mark.parametrize(
    ("limit", "message"),
    [(-0.01, "greater than or equal to 0"), (1.01, "less than or equal to 1"), (10, "equal to 1")],
)
def test_a_limit_that_is_no_share_is_refused(limit: float, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BudgetConfig(limit=limit)


@pytest.mark.parametrize(
    ("scheme", "label"),
    [
        (SamplingScheme(), "T=1"),
        (SamplingScheme(top_k=40), "T=1, top-k 40"),
        (SamplingScheme(temperature=0.7, top_p=0.95), "T=0.7, top-p 0.95"),
        (SamplingScheme(temperature=2, top_k=5, top_p=1), "T=2, top-k 5, top-p 1"),
    ],
)
def test_labels(scheme: SamplingScheme, label: str) -> None:
    assert scheme.label == label


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p"])
def test_nothing_is_drawn_from_nothing(field: str) -> None:
    with pytest.raises(ValidationError):
        SamplingScheme.model_validate({field: 0})
