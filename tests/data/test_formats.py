"""Formats of documents: rows that are written out, published shapes, and damaged files."""

import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers
import transformers
from cli_examples import write_jsonl
from document_examples import tokenize
from format_rows import CASES, TASK, Case, turns

from memguard.config import FormatConfig
from memguard.data.documents import Document, document_text, load_documents, make_table
from memguard.data.tokenization import hmac_text
from memguard.errors import DataError

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer of bytes: the id of a token is that of its byte, so that ids can be written."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": ["<end>"]})
    made.chat_template = TEMPLATE
    return made


def write(folder: Path, *rows: dict[str, Any], name: str = "x.jsonl") -> Path:
    return write_jsonl(folder / name, rows)


def read(
    path: Path, *, has_template: bool = True, setting: str = "data.train", **settings: Any
) -> tuple[list[Document], list[str]]:
    """Return the documents of a file, and the lines that say how it is read."""
    lines: list[str] = []
    loaded = load_documents(
        [str(path)],
        setting=setting,
        form=FormatConfig.model_validate(settings),
        has_chat_template=lambda: has_template,
        cache_dir=path.parent,
        say=lines.append,
    )
    return loaded.documents, lines


def encode_by_hand(marked: str, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return ids and mask of a text with its trained parts in brackets, one piece at a time."""
    ids: list[int] = []
    mask: list[bool] = []
    is_trained = False
    for piece in re.split(r"(\[|\]|<end>|</s>)", marked):
        if piece in ("[", "]"):
            is_trained = piece == "["
            continue
        if piece in ("<end>", "</s>"):
            new = [tokenizer.convert_tokens_to_ids(piece)]
        else:
            alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            text = "".join(part for part, _ in alphabet.pre_tokenize_str(piece)) if piece else ""
            new = [tokenizer.get_vocab()[character] for character in text]
        ids += new
        mask += [is_trained] * len(new)
    return ids, mask


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_rows_are_rendered_and_masked_as_written(one: Case, tokenizer: Any, tmp_path: Path) -> None:
    # A second row has text even where the first has none.
    other = {"conversations": turns(("human", "x"), ("gpt", "y"))["conversations"], **TASK}
    filler = {name: other[name] for name in one.row if name in other}
    path = write(tmp_path, one.row, *([filler] if one.trained is None else []))
    documents, _ = read(path, has_template=one.has_template, **one.settings)
    if one.trained is None:
        assert [document.id for document in documents] == ["x-000001"]
        return
    (document,) = documents
    (tokens,) = tokenize([document], tokenizer)
    ids, mask = encode_by_hand(one.trained, tokenizer)
    assert tokenizer.decode(tokens.input_ids) == re.sub(r"[\[\]]", "", one.trained)
    assert tokens.input_ids.tolist() == ids
    np.testing.assert_array_equal(tokens.supervised, mask)
    if one.words is not None:
        assert document_text(document) == one.words


@pytest.mark.parametrize("one", [one for one in CASES if one.trained], ids=lambda one: one.name)
def test_parquet_and_memory_are_read_as_json_lines(one: Case, tmp_path: Path) -> None:
    settings = {**one.settings, "has_template": one.has_template}
    (expected,), lines = read(write(tmp_path, one.row), **settings)
    dataset = datasets.Dataset.from_list([one.row])
    dataset.to_parquet(str(tmp_path / "x.parquet"))
    (document,), again = read(tmp_path / "x.parquet", **settings)
    form = FormatConfig.model_validate(one.settings)
    in_memory = load_documents(
        [make_table(dataset, name="x")],
        setting="members",
        form=form,
        has_chat_template=lambda: one.has_template,
        cache_dir=tmp_path,
    ).documents
    hashes = {hmac_text(b"key", found) for found in (expected, document, *in_memory)}
    assert len(hashes) == 1
    assert [line.replace(".parquet", ".jsonl") for line in again] == lines


def test_documents_of_one_text_have_one_hash_whatever_their_format(tmp_path: Path) -> None:
    chat = turns(("user", "Add.\n2 3"), ("assistant", "5"), keys=("role", "content"))
    shared = turns(("human", "Add.\n2 3"), ("gpt", "5"))
    found = [read(write(tmp_path, row))[0][0] for row in (chat, shared, TASK)]
    assert len({hmac_text(b"key", document) for document in found}) == 1
    (stanford,), _ = read(write(tmp_path, TASK), template="stanford")
    pair = {"prompt": stanford.prompt, "completion": stanford.completion}
    (same,), _ = read(write(tmp_path, pair))
    assert hmac_text(b"key", same) == hmac_text(b"key", stanford)
    assert document_text(same) == "Add.\n2 3\n5"


CHAT = turns(("user", "a"), ("assistant", "b"), keys=("role", "content"))
SHARED = turns(("human", "a"), ("gpt", "b"))
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "alpaca": (TASK, "alpaca: columns instruction, output, input; template chat"),
    "alpaca with its rendered text": (
        {**TASK, "text": "Below is"},
        "text: column text; it also fits alpaca (data.format=alpaca)",
    ),
    "alpaca with system and history": (
        {**TASK, "system": "s", "history": [["a", "b"]]},
        "alpaca: columns instruction, output, input, system, history; template chat",
    ),
    "sharegpt with ids": ({"id": "q_1", **SHARED}, "sharegpt: column conversations"),
    "sharegpt with system and tools": (
        {**SHARED, "system": "s", "tools": "[]"},
        "sharegpt: columns conversations, system; not read: tools (no template gets tools)",
    ),
    "ultrachat": (
        {"prompt": "a", "prompt_id": "1", **CHAT},
        "messages: column messages; not read: prompt, prompt_id",
    ),
    "prompt and completion": (
        {"prompt": "a", "completion": "b"},
        "prompt_completion: columns prompt, completion",
    ),
    "prompt and completion of messages": (
        {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]},
        "prompt_completion: columns prompt, completion",
    ),
    "web pages": (
        {"text": "a", "url": "b", "timestamp": "c"},
        "text: column text; not read: url, timestamp",
    ),
    "tokenised": (
        {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [1, 2]},
        "input_ids: column input_ids; not read: attention_mask, labels",
    ),
    "question and answer": (
        {"question": "a", "answer": "b"},
        "fits no format; its columns are question, answer. The nearest ways to describe it: "
        "data.format=prompt_completion data.columns.prompt=question data.columns.completion=answer"
        "; data.format=alpaca data.columns.instruction=question data.columns.output=answer; "
        "data.format=text data.columns.text=question",
    ),
    "dolly": (
        {"instruction": "a", "context": "", "response": "b", "category": "c"},
        "fits no format; its columns are instruction, context, response, category. The nearest "
        "ways to describe it: data.format=prompt_completion data.columns.prompt=instruction "
        "data.columns.completion=response; data.format=alpaca data.columns.output=response "
        "data.columns.input=context; data.format=text data.columns.text=instruction",
    ),
    "preferences": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "fits no format; its columns are prompt, chosen, rejected. The nearest ways to describe "
        "it: data.format=prompt_completion data.columns.completion=chosen; data.format=alpaca "
        "data.columns.instruction=prompt data.columns.output=chosen; data.format=text "
        "data.columns.text=prompt",
    ),
    "two readings": (
        {**TASK, **SHARED},
        "can be read in two ways: as alpaca (columns instruction, output), or as sharegpt (column "
        "conversations). Set data.format=alpaca or data.format=sharegpt.",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_auto_says_how_a_published_shape_is_read(name: str, tmp_path: Path) -> None:
    row, expected = PUBLISHED[name]
    try:
        _, (line,) = read(write(tmp_path, row))
    except DataError as error:
        line = str(error)
        assert line == f"'data.train': 'x.jsonl' {expected}"
    else:
        assert line == f"documents: x.jsonl is read as {expected}"


def test_a_way_that_is_printed_works(tmp_path: Path) -> None:
    """Each of the three ways is copied into the settings, and the file can then be read."""
    path = write(tmp_path, {"question": "a", "answer": "b"})
    with pytest.raises(DataError) as caught:
        read(path)
    ways = str(caught.value).split("describe it: ")[1].split("; ")
    assert len(ways) == 3
    for way in ways:
        form: dict[str, Any] = {"columns": {}}
        for setting in way.split():
            name, value = setting.removeprefix("data.").split("=")
            block, _, inner = name.partition(".")
            form[block] = form[block] | {inner: value} if inner else value
        (document,), _ = read(path, **form)
        assert document_text(document) in ("a\nb", "a")


def test_errors_write_settings_as_the_user_does(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "x", "answer": "b"})
    with pytest.raises(DataError, match=r"""--format '{"format": "prompt_completion", """):
        read(path, setting="--members")
    with pytest.raises(DataError, match=r"format={'format': 'alpaca', 'columns': {'ins"):
        read(path, setting="dataset")


DAMAGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown role": (
        turns(("human", "secret"), ("narrator", "secret")),
        {},
        "1 row whose 'conversations' has the unknown role 'narrator' (known: human, user, gpt, "
        "assistant, model, system, observation, tool, function_call; name it, e.g. "
        "data.tags.user=narrator) (x-000001). Correct or remove them.",
    ),
    "long role": (turns(("secret " * 9, "a")), {}, "the unknown role '(63 characters)'"),
    "role and content": (
        {"conversations": CHAT["messages"]},
        {},
        "has role and content in place of from and value (data.format=messages "
        "data.columns.messages=conversations)",
    ),
    "from and value": (
        {"messages": SHARED["conversations"]},
        {},
        "has from and value in place of role and content (data.format=sharegpt "
        "data.columns.conversations=messages)",
    ),
    "nested turns": (
        {"conversations": [SHARED["conversations"]]},
        {},
        "whose 'conversations' holds something other than {from, value}",
    ),
    "text in place of turns": (
        {"conversations": "secret"},
        {},
        "whose 'conversations' is not a list of turns",
    ),
    "value that is no string": (
        turns(("human", ["secret"])),  # type: ignore[arg-type]
        {},
        "whose 'conversations' has a from or value that is no string",
    ),
    "more in a turn": (
        {"conversations": [{"from": "gpt", "value": "secret", "weight": 0}]},
        {},
        "whose 'conversations' has turns with more than from and value",
    ),
    "two system turns": (
        {"system": "secret", **turns(("system", "s"), ("gpt", "b"))},
        {},
        "whose 'system' differs from the system turn in 'conversations' (keep one of them)",
    ),
    "history in stanford": (
        {**TASK, "history": [["secret", "b"]]},
        {"template": "stanford"},
        "whose 'history' has no place in the template stanford (data.template=chat, or remove the "
        "column)",
    ),
    "history that is no pairs": (
        {**TASK, "history": [["secret"]]},
        {},
        "whose 'history' is not a list of pairs [user, assistant]",
    ),
    "output that is no text": (
        {**TASK, "output": 5},
        {},
        "1 row whose 'output' is not a string (x-000001)",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_rows_are_counted_in_one_line(name: str, tmp_path: Path) -> None:
    row, settings, expected = DAMAGED[name]
    good = {**SHARED} if "conversations" in row else {**CHAT} if "messages" in row else {**TASK}
    with pytest.raises(DataError) as caught:
        read(write(tmp_path, good, row), **settings)
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_are_counted_by_role_and_many_roles_are_cut_off(tmp_path: Path) -> None:
    rows = [turns((f"role{n % 8}", "a")) for n in range(16)]
    with pytest.raises(DataError) as caught:
        read(write(tmp_path, *rows))
    message = str(caught.value)
    assert message.count("2 rows whose") == 5
    assert "; and rows with 3 more such problems." in message


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        (TASK, {"format": "text"}, "'x.jsonl' needs the column 'text' to be text; its columns"),
        (TASK, {"columns": {"output": "reply"}}, "'x.jsonl' needs the column 'reply'; its columns"),
        (TASK, {"columns": {"input": "more"}}, "'x.jsonl' needs the column 'more'; its columns"),
        (
            {"a": "x", "text": "y", "prompt": "z", "completion": "w"},
            {"columns": {"text": "a", "prompt": "prompt"}},
            "in two ways: as text (column a), or as prompt_completion (columns prompt, completion)",
        ),
    ],
)
def test_columns_that_do_not_fit(
    row: dict[str, Any], settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        read(write(tmp_path, row), **settings)
    assert expected in str(caught.value)


def test_text_files_need_no_format(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("all of it")
    (document,), lines = read(tmp_path / "x.txt", format="alpaca")
    assert (document.text, lines) == ("all of it", [])


def test_the_template_is_asked_for_alpaca_only(tmp_path: Path) -> None:
    """A tokenizer that cannot be loaded does not hinder other formats."""
    for row, settings in ((CHAT, {}), (SHARED, {}), (TASK, {"template": "chat"})):
        load_documents(
            [str(write(tmp_path, row))],
            setting="data.train",
            form=FormatConfig.model_validate(settings),
            has_chat_template=lambda: pytest.fail("asked"),
            cache_dir=tmp_path,
        )
