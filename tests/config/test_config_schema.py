"""Every setting is described, and the classes refuse what does not go together."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from memguard.config import (
    CanaryConfig,
    ParallelConfig,
    RunConfig,
    SweepConfig,
    dump_yaml,
    load_run_config,
    schema,
)
from memguard.config.loading import describe_field

SETTINGS = [
    kind
    for kind in vars(schema).values()
    if isinstance(kind, type) and issubclass(kind, schema.Settings)
]
RUN: dict[str, Any] = {"name": "x", "model": {"path": "m"}, "data": {"train": "a.jsonl"}}


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_every_setting_has_a_sentence(kind: type[schema.Settings]) -> None:
    assert (kind.__doc__ or "").strip().partition("\n\n")[0].endswith(".")
    for name, field in kind.model_fields.items():
        sentence = describe_field(field)
        assert sentence.endswith("."), f"{kind.__name__}.{name}: {sentence!r}"
        assert "\n" not in sentence


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_settings_are_frozen_and_closed(kind: type[schema.Settings]) -> None:
    assert kind.model_config["frozen"]
    assert kind.model_config["extra"] == "forbid"
    assert kind.model_config["allow_inf_nan"] is False


KEYWORDS = {
    "$defs", "$ref", "additionalProperties", "anyOf", "const", "default", "description", "enum",
    "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maximum",
    "minItems", "minLength", "minimum", "oneOf", "pattern", "prefixItems", "properties", "required",
    "title", "type", "discriminator",
}  # fmt: skip
TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema inside a schema."""
    if isinstance(node, bool):
        return
    yield node
    for keyword in ("properties", "$defs"):
        for child in node.get(keyword, {}).values():
            yield from walk(child)
    for keyword in ("anyOf", "prefixItems"):
        for child in node.get(keyword, []):
            yield from walk(child)
    for keyword in ("items", "additionalProperties"):
        if keyword in node:
            yield from walk(node[keyword])


@pytest.mark.parametrize("kind", [RunConfig, SweepConfig])
def test_the_json_schema_is_one(kind: type[schema.Settings]) -> None:
    root = json.loads(json.dumps(kind.model_json_schema(), allow_nan=False))
    definitions = root.get("$defs", {})
    for node in walk(root):
        # Draft 2020-12, and OpenAPI's 'discriminator', which it lets pass: known keywords, known
        # types, references that lead somewhere.
        assert node.keys() <= KEYWORDS
        assert node.get("type", "object") in TYPES
        if "$ref" in node:
            assert node["$ref"].removeprefix("#/$defs/") in definitions
        if node.get("type") == "object" and "properties" in node:
            assert set(node.get("required", [])) <= node["properties"].keys()
            assert node["additionalProperties"] is False
        for child in node.get("properties", {}).values():
            referred = definitions.get(child.get("$ref", "").removeprefix("#/$defs/"), {})
            assert child.get("description") or referred.get("description")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {}}, "exactly one of 'path' and 'scratch'"),
        ({"model": {"path": "m", "scratch": {"config": {"model_type": "llama"}}}}, "exactly one"),
        ({"model": {"scratch": {"config": {}}}}, "needs 'model_type'"),
        ({"data": {"train": []}}, "needs at least one source"),
        ({"data": {"train": "a", "background": "b"}}, "'background' belongs to 'study'"),
        ({"data": {"train": "a", "control": "b", "study": {}}}, "a study draws its own control"),
        ({"data": {"train": "a", "study": {"num_repetitions": [1, 1]}}}, "has a number twice"),
        ({"data": {"train": "a", "study": {"num_repetitions": [0]}}}, "nothing is trained"),
        ({"data": {"train": "a", "study": {"num_repetitions": []}}}, "at least 1 item"),
        (
            {"data": {"train": "a", "min_document_tokens": 9, "max_document_tokens": 8}},
            "is above 'max_document_tokens'",
        ),
        (
            {"data": {"train": "a", "canaries": {"count": 7}}},
            "at least 8: fewer give no evidence; got 7",
        ),
        ({"data": {"train": "a", "canaries": {"count": -1}}}, "greater than or equal to 0"),
        ({"data": {"train": "a", "canaries": {"num_repetitions": 0}}}, "greater than or equal to"),
        ({"data": {"train": "a", "canaries": {"secret_digits": 5}}}, "greater than or equal to 6"),
        ({"data": {"train": "a", "control_fraction": 0.2}}, "less than or equal to 0.1"),
        (
            {"mitigations": [{"name": "goldfish"}] * 2},
            "contains an entry twice: goldfish, goldfish",
        ),
        ({"name": "../x"}, "match pattern"),
        ({"seed": 2**63}, "less than"),
        ({"optim": {"lr": float("nan")}}, "finite number"),
        ({"train": {"audit_documents": 8}}, "'audit_documents' does nothing without 'audit_every"),
        ({"parallel": {"x": -1, "z": -1}}, "only one of 'data', 'z', 'y' and 'x' can be -1"),
        ({"parallel": {"x": 0}}, "should be 1 or more, or -1 for the rest of the ranks; got 0"),
        ({"parallel": {"z": -2}}, "should be 1 or more, or -1 for the rest of the ranks; got -2"),
        ({"parallel": {"order": ["x", "y", "z"]}}, "each of data, z, y, x once; got x, y, z"),
        ({"parallel": {"order": ["x", "y", "z", "x"]}}, "once; got x, y, z, x"),
        ({"parallel": {"order": ["x", "y", "z", "w"]}}, "'data', 'z', 'y' or 'x'"),
    ],
)
def test_what_does_not_go_together(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(RUN | change)


def test_a_run_written_out_is_the_same_run() -> None:
    """With defaults that nobody set, of settings that do nothing alone."""
    run = RunConfig.model_validate(RUN)
    assert RunConfig.model_validate(run.model_dump(mode="json")) == run


def test_a_sweep_names_each_setting_once() -> None:
    settings = [{"name": "a"}, {"name": "a"}]
    with pytest.raises(ValidationError, match="'settings' has a name twice: a, a"):
        SweepConfig.model_validate({"name": "x", "run": {}, "settings": settings})


def test_the_mesh_shares_the_weights_over_all_ranks_by_default() -> None:
    parallel = RunConfig.model_validate(RUN).parallel
    assert (parallel.data, parallel.z, parallel.y, parallel.x) == (1, -1, 1, 1)
    assert parallel.order == ("data", "z", "y", "x")
    assert parallel.timeout_minutes == 30
    # Only one axis takes the rest.
    for axis in ("data", "y", "x"):
        other = ParallelConfig.model_validate({axis: -1})
        assert (getattr(other, axis), other.z) == (-1, 1)
    assert ParallelConfig(data=2, z=-1, order=["x", "y", "z", "data"]).order[0] == "x"
    assert RunConfig.model_validate(RUN | {"parallel": None}).parallel == ParallelConfig()


def test_canaries_are_on_by_default() -> None:
    assert RunConfig.model_validate(RUN).data.canaries == CanaryConfig()
    assert CanaryConfig().count == 32
    for off in ({"count": 0}, {"count": 0, "num_repetitions": 3}):
        assert CanaryConfig.model_validate(off).count == 0
    # A template's section in which only comments are left.
    data = RUN["data"] | {"canaries": None}
    assert RunConfig.model_validate(RUN | {"data": data}).data.canaries == CanaryConfig()


@pytest.mark.parametrize(
    ("text", "value"), [("on", True), ("off", False), ("true", True), ("auto", "auto")]
)
def test_compile_is_a_switch_or_auto(text: str, value: object, tmp_path: Path) -> None:
    """YAML reads on and off as booleans."""
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(RUN))
    config = load_run_config(path, [f"train.compile={text}"])
    assert config.train.compile is value or config.train.compile == value == "auto"
    (tmp_path / "copy.yaml").write_text(dump_yaml(config))
    assert load_run_config(tmp_path / "copy.yaml") == config
    assert RunConfig.model_validate(RUN).train.compile == "auto"
    adapted = {**RUN, "adapter": {"name": "lora"}}
    assert RunConfig.model_validate(adapted).train.compile == "auto"
