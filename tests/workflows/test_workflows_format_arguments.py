"""Options and arguments of the format of an audit's documents, and the names that it had before."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from memguard.config import FormatConfig
from memguard.errors import ConfigError
from memguard.integrations.split import split_for_audit
from memguard.integrations.trainer_audit import MemorizationAuditCallback
from memguard.workflows.auditing.checks import AuditRequest
from memguard.workflows.common.format_arguments import read_format_arguments, read_format_options


def test_options_and_arguments_give_the_same_settings() -> None:
    columns, tags = {"instruction": "a b", "output": "c=d"}, {"user": "me", "role": "who"}
    expected = FormatConfig.model_validate({"columns": columns, "tags": tags})
    options = ["instruction=a b,output=c=d"], ["user=me", "role=who"]
    assert read_format_options(None, options[0], None, options[1]) == expected
    assert read_format_arguments(columns=columns, tags=tags) == expected
    assert read_format_options(None, None, None, None) == FormatConfig()
    assert read_format_arguments("alpaca", template="chat") == read_format_options(
        "alpaca", None, "chat", None
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
        read_format_arguments(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["prompt", "=a", "prompt=a,,", ""])
def test_options_are_pairs(value: str) -> None:
    with pytest.raises(ConfigError, match="'--columns' must be NAME=VALUE"):
        read_format_options(None, [value], None, None)


def test_the_former_names_are_refused_with_the_new_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an option; use --columns text=body"):
        read_format_options(None, None, None, None, "body")
    advice = r"'text_column' is no argument; use columns=\{'text': 'body'\}"
    dataset = datasets.Dataset.from_dict({"body": ["a"]})
    with pytest.raises(ConfigError, match=advice):
        split_for_audit(dataset, text_column="body")
    with pytest.raises(ConfigError, match=advice):
        MemorizationAuditCallback(members=dataset, out=tmp_path, text_column="body")
    with pytest.raises(TypeError, match="no argument 'fractoin'"):
        split_for_audit(dataset, fractoin=0.1)


def test_a_run_has_its_own_format(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    request = AuditRequest(
        run=tmp_path,
        model=None,
        base=None,
        members=(),
        nonmembers=(),
        out=None,
        form=FormatConfig(format="alpaca"),
        mesh=None,
        settings={},
        seed=0,
    )
    with pytest.raises(ConfigError, match=r"--format, .* are for --members of a --model; a run"):
        request.check()
