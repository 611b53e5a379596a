"""YAML is read within bounds: what would not end is refused before anything is built of it."""

from pathlib import Path

import pytest

from memguard.audit.suite import load_suite
from memguard.compare import load_sweep
from memguard.config import load_run_config, load_yaml
from memguard.config.yaml_text import parse_yaml
from memguard.errors import ConfigError
from memguard.planner.machine import load_machine

LEVELS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
BOMB = f"a0: &a0 [x, x, x, x, x, x, x, x, x]\n{LEVELS}"


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "f")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("load", [load_run_config, load_suite, load_sweep, load_machine])
def test_an_alias_bomb_is_refused_by_whatever_reads_yaml(load, tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMB)
    with pytest.raises(ConfigError, match=r"bomb.yaml:\d+:\d+ is not valid YAML: its aliases"):
        load(path)


def test_an_alias_bomb_in_an_argument_is_refused(tmp_path: Path) -> None:
    levels = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))
    path = tmp_path / "run.yaml"
    path.write_text("name: x\n")
    with pytest.raises(ConfigError, match=r"argument '.*\.\.\..*': the value is not valid YAML"):
        load_run_config(path, [f"name=[&a0 [x, x, x, x, x, x, x, x, x], {levels}]"])


def test_merges_count_what_they_bring() -> None:
    levels = "".join(
        f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 9)
    )
    assert "its aliases (*name) stand for more than" in refused(f"m0: &m0 {{a: 1}}\n{levels}")


def test_anchors_are_read_as_ever() -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: *a\nc: {<<: *a, x: 2}\nd: [*a, *a]\n"
    a = {"x": 1, "y": [1, 2]}
    values = {"a": a, "b": a, "c": {"x": 2, "y": [1, 2]}, "d": [a, a]}
    parsed = parse_yaml(text, "f")
    assert parsed.values == values
    assert parsed.places["b", "y", 1] == "f:1:21"


def test_an_alias_inside_its_own_anchor() -> None:
    for text in ("a: &a [*a]\n", "a: &a {b: {c: *a}}\n"):
        assert refused(text) == "f:1:4 is not valid YAML: an alias (*name) inside its own anchor"


@pytest.mark.parametrize("text", ["[" * 10_000, "{a: " * 10_000, "- " * 10_000, "? " * 10_000])
def test_deep_nesting(text: str) -> None:
    assert "is not valid YAML: nested too deeply" in refused(text)


def test_as_deep_as_settings_go() -> None:
    assert parse_yaml("[" * 45 + "]" * 45, "f").values


def test_more_values_than_settings_have() -> None:
    assert "more than 50,000 values" in refused(f"a: [{'1,' * 60_000}]")


def test_a_file_of_a_hundred_megabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.write(b"name: x\n#")
        file.truncate(100_000_000)
    with pytest.raises(ConfigError, match=r"large\.yaml is larger than 1,048,576 bytes"):
        load_yaml(path)
    path.write_bytes(b"a: " + "é".encode() * 600_000)  # whole characters or not
    with pytest.raises(ConfigError, match="is larger than"):
        load_yaml(path)


def test_many_problems_are_told_in_part(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"k{n}: 1\n" for n in range(10_000)))
    with pytest.raises(ConfigError) as error:
        load_run_config(path)
    assert len(error.value.problems) == 21
    assert "more such problems" in error.value.problems[-1]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a:\n  - {b: 2024-99-99}\n", "2:9"),
        (f"a: 1\nb: {'9' * 5000}\n", "2:4"),
        ("a: !!bool x\n", "1:4"),
    ],
)
def test_a_value_that_cannot_be_built_is_told_with_its_place(text: str, place: str) -> None:
    with pytest.raises(ConfigError, match=f"^f:{place} is not valid YAML: "):
        parse_yaml(text, "f")
