"""What rows hold beside the text: empty fields are read, others and their names are told."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from memguard.config import FormatConfig
from memguard.data.documents import Document, load_documents
from memguard.data.rows import strip_stanford
from memguard.errors import DataError

HALF = "\ud83d"


def read(folder: Path, *rows: Any, **form: Any) -> tuple[list[Document], list[str]]:
    path, told = folder / "x.jsonl", list[str]()
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    loaded = load_documents(
        [str(path)],
        setting="data.train",
        form=FormatConfig.model_validate(form),
        cache_dir=folder,
        say=told.append,
    )
    return loaded.documents, told


def refuse(folder: Path, *rows: Any, **form: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(folder, *rows, **form)
    message = str(caught.value)
    assert message.isprintable()
    return message


def make_chat(**more: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "b", **more}
    return {"messages": [{"role": "user", "content": "a", **more}, answer]}


@pytest.mark.parametrize("empty", [None, "", [], {}])
@pytest.mark.parametrize("key", ["tool_calls", "name"])
def test_empty_fields_of_a_turn_are_read(tmp_path: Path, key: str, empty: Any) -> None:
    plain, _ = read(tmp_path, make_chat())
    assert read(tmp_path, make_chat(**{key: empty}))[0] == plain
    shared = {"conversations": [{"from": "gpt", "value": "b", key: empty}]}
    (document,), _ = read(tmp_path, shared)
    assert document.messages == plain[0].messages[1:]  # type: ignore[index]


def test_fields_that_would_be_lost_are_named_unless_they_may_be_text(tmp_path: Path) -> None:
    said = "whose 'messages' have more than role and content: name, tool_calls (x-000000)"
    assert said in refuse(tmp_path, make_chat(name="n", tool_calls=[{"id": 1}]))
    for key in ("Jane Doe", "078-05", HALF, "n" * 41):
        message = refuse(tmp_path, make_chat(**{key: 1}))
        assert f"content: ({len(key)} characters) (x-000000)" in message
    shared = {"conversations": [{"from": "gpt", "value": "b", "images": [1]}]}
    assert "turns with more than from and value: images (x-" in refuse(tmp_path, shared)
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "secret"}]}]}
    assert "is not a string (parts are not read)" in refuse(tmp_path, parts)


@pytest.mark.parametrize("tag", ["Jane Doe", HALF, "078-05-1120"])
def test_a_tag_that_may_be_text_is_not_quoted(tmp_path: Path, tag: str) -> None:
    message = refuse(tmp_path, {"conversations": [{"from": tag, "value": "a"}]})
    assert f"the unknown role '({len(tag)} characters)'" in message
    assert "name it, e.g. data.tags.user=TAG)" in message


def test_rows_that_lose_their_tools_say_so(tmp_path: Path) -> None:
    for row in (make_chat(), {**make_chat(), "text": "t"}):
        _, (line,) = read(tmp_path, {**row, "tools": [{"name": "f"}]})
        assert line.endswith("; not read: tools (no template gets tools)")


TASK = {"instruction": "a", "output": "b", "input": "c"}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"columns": {"instruction": "output"}}, "'columns.instruction' is 'output', which is"),
        ({"columns": {"system": "instruction"}, "format": "alpaca"}, "'columns.system' is"),
        ({"columns": {"prompt": "completion"}}, "usual column of 'completion' (prompt_completion)"),
        ({"columns": {"system": "conversations"}, "format": "sharegpt"}, "'columns.system' is"),
        ({"columns": {"instruction": "a", "output": "a"}}, "'a' is named twice"),
    ],
)
def test_one_column_holds_one_thing(form: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        FormatConfig.model_validate(form)
    assert said in str(caught.value)


def test_a_named_column_is_not_taken_for_another_thing(tmp_path: Path) -> None:
    # Two columns change places; a task that is called `input`; the system turn of sharegpt.
    (document,), _ = read(
        tmp_path, TASK, columns={"instruction": "output", "output": "instruction"}
    )
    assert document.completion == "a"
    row = {"input": "a", "output": "b"}
    (document,), (line,) = read(tmp_path, row, columns={"instruction": "input"})
    assert "alpaca: columns instruction=input, output;" in line
    assert str(document.prompt).count("### Input") == 0
    shared = {"conversations": [{"from": "gpt", "value": "b"}], "instruction": "s"}
    (document,), (line,) = read(tmp_path, shared, columns={"system": "instruction"})
    assert "sharegpt: columns conversations, system=instruction" in line


def test_settings_that_the_rows_have_no_use_for_are_named(tmp_path: Path) -> None:
    _, (line,) = read(tmp_path, TASK, tags={"user": "x"})
    assert line.endswith("template stanford; 'tags' is not used: it is for another format")
    _, (line,) = read(tmp_path, {"text": "a"}, template="chat")
    assert line.endswith("; 'template' is not used: it is for another format")


def test_whole_numbers_are_the_same_ids_in_every_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    ids = pyarrow.array([0.0, 1.0, None, 2.5, float("nan")])
    table = pyarrow.table({"id": ids, "text": list("abcde")})
    pyarrow.parquet.write_table(table, path)
    loaded = load_documents([str(path)], setting="data.train", cache_dir=tmp_path)
    found = [document.id for document in loaded.documents]
    assert found == ["0", "1", "x-000002", "2.5", "x-000004"]


def test_a_prompt_of_many_markers_takes_linear_time() -> None:
    start = (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    )
    mark = "\n\n### Input:\n"

    def measure(count: int) -> float:
        prompt, began = f"{start}x{mark * count}y", time.process_time()
        for _ in range(200):
            assert strip_stanford(prompt) == prompt
        assert strip_stanford(f"{prompt}\n\n### Response:") == f"x\n{mark * (count - 1)}y"
        return time.process_time() - began

    assert measure(20_000) < 12 * measure(2_000) + 0.2
