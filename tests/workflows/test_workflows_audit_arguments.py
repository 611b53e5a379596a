"""The format of an audit's documents: one value of an option or an argument."""

import json
from pathlib import Path
from typing import Any

import pytest

from memguard.config import FormatConfig
from memguard.errors import ConfigError
from memguard.workflows.auditing.arguments import read_format
from memguard.workflows.auditing.checks import AuditArguments, check_audit


def test_an_option_and_an_argument_give_the_same_settings() -> None:
    values = {"columns": {"instruction": "a b"}, "tags": {"user": "me", "role": "who"}}
    expected = FormatConfig.model_validate(values)
    assert read_format(json.dumps(values), option="--format") == read_format(values) == expected
    assert read_format(None) == FormatConfig()
    assert read_format("alpaca") == read_format("alpaca", option="--format")
    assert read_format("{format: alpaca, template: chat}", option="--format") == read_format(
        {"format": "alpaca", "template": "chat"}
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"format": "sharegtp"}, "should be 'auto', .* did you mean 'sharegpt'"),
        ({"template": "llama"}, "'template' should be 'stanford' or 'chat'; got 'llama'"),
        ({"columns": {"promt": "a"}}, "'columns.promt' is not a setting; did you mean 'prompt'"),
        ({"columns": {"text": ""}}, "'columns.text' should have at least 1 character"),
        ({"columns": {"prompt": "a", "completion": "a"}}, "the column 'a' is named twice"),
        ({"tags": {"user": "a", "tool": "a"}}, "the tag 'a' has two roles"),
        ({"tags": {"role": "value"}}, "'role' and 'content' must be different keys"),
        (
            {"format": "alpaca", "columns": {"prompt": "a"}},
            "'columns.prompt' is no column of the format 'alpaca', which has instruction, output, "
            "input, system, history: remove it",
        ),
        ({"format": "text", "template": "chat"}, "'template' is for the format 'alpaca'"),
        ({"format": "alpaca", "tags": {"user": "a"}}, "'tags' are for the format 'sharegpt'"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        read_format(given)
    assert "\n" not in str(caught.value)


def test_a_run_has_its_own_format(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    arguments = AuditArguments(run=tmp_path, form=FormatConfig(format="alpaca"))
    with pytest.raises(ConfigError, match="--format is for --members of a --model; a run"):
        check_audit(arguments)
