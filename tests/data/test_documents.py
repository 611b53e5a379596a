import codecs
import gzip
import json
from pathlib import Path

import cli_examples
import datasets
import numpy as np
import pytest

from memguard.config import FormatConfig
from memguard.data.documents import Document, Message, document_text, load_documents, make_table
from memguard.data.tokenization import hmac_text
from memguard.errors import DataError


def load(*sources, **settings):
    folder = settings.pop("cache_dir", Path("unused"))
    form = FormatConfig.model_validate(settings)
    names = [str(source) for source in sources]
    return load_documents(names, setting="data.train", form=form, cache_dir=folder)


def write_jsonl(path, *rows):
    return cli_examples.write_jsonl(path, rows)


ROWS = [{"id": "a", "text": "one"}, {"id": "b", "text": "two"}]


def test_jsonl_keeps_ids_sources_and_order(tmp_path):
    file = write_jsonl(
        tmp_path / "x.jsonl", {"id": 7, "text": "one", "source": "wiki"}, {"text": "two"}
    )
    assert load(file).documents == [
        Document(id="7", has_own_id=True, source="wiki", format="text", text="one"),
        Document(id="x-000001", source="x.jsonl", format="text", text="two"),
    ]


def test_ids_made_of_file_names_and_numbers_are_not_the_users_own(tmp_path):
    """Documents of two audits are matched by the user's ids alone, never by line numbers."""
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "two.txt").write_text("a<|endoftext|>b")
    rows = [{"id": "a", "text": "x"}, {"id": "", "text": "x"}, {"text": "x"}]
    files = [
        tmp_path / "one.txt",
        tmp_path / "two.txt",
        write_jsonl(tmp_path / "x.jsonl", *rows),
        write_jsonl(tmp_path / "y.jsonl", {"id": "b", "text": "x"}),
    ]
    found = {d.id: d.has_own_id for file in files for d in load(file).documents}
    assert [name for name, is_own in found.items() if is_own] == ["a", "b"]
    assert len(found) == 7
    table = make_table(datasets.Dataset.from_list(rows[:2]), name="m")
    loaded = load_documents((table,), setting="m", cache_dir=tmp_path).documents
    assert [(d.id, d.has_own_id) for d in loaded] == [("a", True), ("m-000001", False)]
    # Two texts are equal whatever names them.
    assert len({hmac_text(b"key", document) for document in loaded}) == 1


def test_strings_are_read_as_they_are(tmp_path):
    rows = [{"id": "2021-01-01", "text": "2021-01-02T00:00:00Z"}, {"id": "007", "text": "NA"}]
    csv = tmp_path / "x.csv"
    csv.write_text("id,text\n2021-01-01,2021-01-02T00:00:00Z\n007,NA\n")
    parquet = tmp_path / "x.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(parquet))
    expected = [(row["id"], row["text"]) for row in rows]
    for file in (write_jsonl(tmp_path / "x.jsonl", *rows), csv, parquet):
        assert [(d.id, d.text) for d in load(file).documents] == expected


@pytest.mark.parametrize("indent", [None, 2])
def test_json_array(tmp_path, indent):
    (tmp_path / "x.json").write_text("\n " + json.dumps(ROWS, indent=indent))
    assert [d.text for d in load(tmp_path / "x.json").documents] == ["one", "two"]


def test_byte_order_mark_line_ends_and_blank_lines(tmp_path):
    raw = b'{"text":"a\\r\\nb"}\r\n\r\n  \n{"text":"\xe2\x80\xa8c"}'
    (tmp_path / "x.jsonl").write_bytes(codecs.BOM_UTF8 + raw)
    assert [d.text for d in load(tmp_path / "x.jsonl").documents] == ["a\r\nb", "\u2028c"]
    (tmp_path / "x.csv").write_bytes(codecs.BOM_UTF8 + b'text,n\r\n"a\r\nb",1\r\n\r\nc,2\r\n')
    assert [d.text for d in load(tmp_path / "x.csv").documents] == ["a\r\nb", "c"]
    (tmp_path / "x.txt").write_bytes(codecs.BOM_UTF8 + b"a\r\nb")
    assert [d.text for d in load(tmp_path / "x.txt").documents] == ["a\r\nb"]


def test_one_line_of_five_megabytes(tmp_path):
    text = "x y " * 1_300_000
    for file in (write_jsonl(tmp_path / "x.jsonl", {"text": text}), tmp_path / "x.csv"):
        if file.suffix == ".csv":
            file.write_text(f"text,n\n{text},1\n")
        assert [d.text for d in load(file).documents] == [text]


def test_text_files_and_their_separators(tmp_path):
    (tmp_path / "one.md").write_text("all of it\n")
    (tmp_path / "two.txt").write_text("first\n\n<|endoftext|>\nsecond\n<|endoftext|>\n")
    loaded = load(tmp_path / "one.md", tmp_path / "two.txt", columns={"text": "body"})
    assert [(d.id, d.source, d.text) for d in loaded.documents] == [
        ("one", "one.md", "all of it\n"),
        ("two-000000", "two.txt", "first"),
        ("two-000001", "two.txt", "second"),
    ]


def test_folder_of_text_files(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("b.txt", "a.md", "sub/a.txt", "sub/A.TXT", ".hidden/x.txt", "image.png"):
        (folder / name).write_text(name)
    loaded = load(folder)
    assert [d.id for d in loaded.documents] == ["a.md", "b.txt", "sub/A.TXT", "sub/a.txt"]
    assert {d.source for d in loaded.documents} == {"texts"}


def test_folder_of_tables_leaves_the_readme_out(tmp_path, monkeypatch):
    folder = tmp_path / "data[1]"
    (folder / "sub").mkdir(parents=True)
    (folder / "README.md").write_text("about")
    write_jsonl(folder / "x.jsonl", {"text": "one"})
    datasets.Dataset.from_dict({"text": ["two"]}).to_parquet(str(tmp_path / "y.parquet"))
    (tmp_path / "y.parquet").rename(folder / "sub" / "y.parquet")
    monkeypatch.chdir(folder)
    expected = [("sub/y-000000", "two"), ("x-000000", "one")]
    for source in (folder, "."):
        loaded = load(source)
        assert [(d.id, d.text) for d in loaded.documents] == expected
        assert {d.source for d in loaded.documents} == {"data[1]"}


def test_folder_with_several_splits_is_refused(tmp_path):
    for name in ("train-00000.jsonl", "test-00000.jsonl"):
        write_jsonl(tmp_path / name, {"text": "x"})
    with pytest.raises(DataError, match="holds the splits test, train; name the files"):
        load(tmp_path)


def test_save_to_disk(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    both = datasets.DatasetDict({"train": table.remove_columns("id"), "test": table})
    both.save_to_disk(tmp_path / "both")
    datasets.DatasetDict({"test": table, "dev": table}).save_to_disk(tmp_path / "none")
    assert [(d.id, d.source) for d in load(tmp_path / "one").documents] == [
        ("a", "one"),
        ("b", "one"),
    ]
    assert [d.id for d in load(tmp_path / "both").documents] == ["both-000000", "both-000001"]
    told = []
    load_documents([str(tmp_path / "both")], setting="m", cache_dir=tmp_path, say=told.append)
    assert told[1:] == ["documents: not read in both: split test"]
    with pytest.raises(DataError, match="no split 'train' but test, dev; name the folder"):
        load(tmp_path / "none")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(DataError, match="looks like a save_to_disk folder but cannot be read"):
        load(tmp_path / "one")


def test_hub_id(monkeypatch):
    requested = []

    def load_dataset(*args, **kwargs):
        requested.append((args, kwargs))
        assert datasets.are_progress_bars_disabled()
        return datasets.Dataset.from_list([{"text": "one"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    shown_before = datasets.are_progress_bars_disabled()
    [document] = load("some-one/a.set:de@v1.0").documents
    assert requested == [(("some-one/a.set", "de"), {"revision": "v1.0", "split": "train"})]
    assert (document.id, document.source) == ("a.set-000000", "some-one/a.set:de@v1.0")
    assert datasets.are_progress_bars_disabled() == shown_before


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ConnectionError("down"),
            "neither a file or folder here nor a dataset that could be loaded",
        ),
        (datasets.exceptions.DatasetNotFoundError("x"), "loaded from the hub"),
        (
            ValueError('Unknown split "train".\nmore'),
            'cannot be used: Unknown split "train". Write',
        ),
    ],
)
def test_hub_id_that_cannot_be_had(monkeypatch, error, said):
    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError) as caught:
        load("nobody/nothing")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["", "~no-such-user/x", "nothing.jsonl", "./nothing", "../a/b", "/x/y", "a/b/c", "~/x"],
)
def test_missing_path_never_asks_the_hub(monkeypatch, source):
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(DataError, match=r"'data.train': there is no file or folder"):
        load(source)


def test_file_of_unknown_kind(tmp_path):
    (tmp_path / "x.tsv").write_text("a\tb")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has an unknown file type; supported are .jsonl, "):
        load(tmp_path / "x.tsv")
    with pytest.raises(DataError, match=r"has no file that ends in one of .jsonl, "):
        load(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", b'{"text": "a"}\n\n{"text": "secret\n', "line 3 is not JSON"),
        ("x.jsonl", b'{"text": "a"}\n"secret"\n', "line 2 is not a JSON object"),
        ("x.jsonl", b"null\n", "line 1 is not a JSON object"),
        ("x.jsonl", b'{"text": "secret\xff"}\n', "x.jsonl' is not UTF-8; convert it"),
        ("x.jsonl", '{"text": "secret"}\n'.encode("utf-16"), "x.jsonl' is not UTF-8; convert it"),
        ("x.jsonl", '{"text": "secret"}\n'.encode("utf-16-le"), "is not UTF-8; convert it"),
        ("x.json", '[{"text": "secret"}]'.encode("utf-32-be"), "is not UTF-8; convert it"),
        ("x.json", b'[{"text": "secret\xff"}]', "x.json' is not UTF-8; convert it"),
        ("x.jsonl", b'{"text": "a"}\n' + 100 * b"\0", "line 2 is not JSON"),
        ("x.jsonl", b'{"a":' * 100_000, "line 1 is nested too deeply"),
        ("x.json", b'[{"text": "a"},\n{"text": secret}]', "line 2 is not JSON"),
        ("x.json", b'[{"text": "a"}, "secret"]', "entry 2 is not a JSON object"),
        ("x.csv", b"id,text\n1,a,secret\n", "line 2 ends a row of 3 fields, not 2"),
        ("x.csv", b'id,text\n1,"secret\n', "line 2: unexpected end of data"),
        ("x.csv", b"text,text\na,secret\n", "its header names a column twice"),
        ("x.csv", b"text,n\nsecret\xff,1\n", "is not UTF-8"),
        ("x.csv", "text\nsecret\n".encode("utf-16-le"), "x.csv' is not UTF-8; convert it"),
        ("x.txt", "secret".encode("utf-16-be"), "x.txt' is not UTF-8; convert it"),
        ("x.txt", b"secret\xff", "is not UTF-8"),
        ("x.parquet", b"secret", "it is not a parquet file"),
    ],
)
def test_broken_file(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(tmp_path / name)
    message = str(caught.value).replace(str(tmp_path), "")
    assert said in message
    assert "secret" not in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["x\udcff.jsonl", "x\udcff.txt", "x\udcff/y.txt", "x/y\udcff.csv"])
def test_names_that_are_not_utf8(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("text\na\n")
    for source in (path, path.parent):
        with pytest.raises(DataError, match=r"'data\.train': the name '.*\\udcff.*rename the file"):
            load(source)


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.txt", "x.parquet"])
def test_missing_permission(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("x")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, who may read everything.
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr("pyarrow.parquet.read_table", refuse)
    with pytest.raises(DataError, match=f"{name}' cannot be read: Permission denied"):
        load(tmp_path / name)


def test_messages_and_pairs(tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    file = write_jsonl(tmp_path / "x.jsonl", {"messages": turns, "text": "ignored"})
    pairs = write_jsonl(
        tmp_path / "y.jsonl",
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": turns[:1], "completion": turns[1:]},
        {"prompt": None, "completion": "alone"},
    )
    one, two, three, four = load(file, pairs).documents
    messages = (Message(role="user", content="hi"), Message(role="assistant", content="yo"))
    assert (one.format, one.messages, one.text) == ("messages", messages, None)
    assert (two.format, two.prompt, two.completion) == ("prompt_completion", "2+2=", "4")
    assert (three.prompt, three.completion) == (messages[:1], messages[1:])
    assert (four.prompt, four.completion) == ("", "alone")
    assert [document_text(d) for d in (one, two, three)] == ["hi\nyo", "2+2=\n4", "hi\nyo"]
    # A column that is named on purpose goes first, also under its usual name.
    assert load(file).documents == [one]
    assert [d.text for d in load(file, columns={"text": "text"}).documents] == ["ignored"]


def test_unknown_columns_are_named(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", {"Text": "x", "n": 1})
    with pytest.raises(DataError, match=r"its columns are Text, n\. .* data\.columns\.text=Text"):
        load(file)


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz", "x.jsonl"])
@pytest.mark.parametrize("settings", [{}, {"columns": {"text": "body"}}, {"format": "alpaca"}])
def test_first_row_of_a_file_without_header_is_not_quoted(tmp_path, name, settings):
    secrets = ("Jane Doe", "078-05-1120", "jane.doe@mail", "4 Elm Street")
    if name == "x.jsonl":
        write_jsonl(tmp_path / name, dict.fromkeys(secrets, "x"))
    else:
        lines = f"{','.join(secrets)},Smith\na,b,c,d,e\n".encode()
        (tmp_path / name).write_bytes(lines if name == "x.csv" else gzip.compress(lines))
    with pytest.raises(DataError) as caught:
        load(tmp_path / name, **settings)
    message = str(caught.value).replace(str(tmp_path), "")
    assert not any(word in message for word in ("Jane", "Smith", "jane", "078", "Elm"))
    num = 4 if name == "x.jsonl" else 5
    assert f"its {num} columns have no usual name" in message
    assert ("messages" in message) == (name == "x.jsonl")
    if settings:
        assert (
            f"needs the column '{settings.get('columns', {'text': 'instruction'})['text']}'"
            in message
        )


def test_columns_of_a_csv_file_with_a_usual_name_are_quoted(tmp_path):
    (tmp_path / "x.csv").write_text("id,Question,what to say\n1,a,b\n")
    with pytest.raises(DataError, match=r"its columns are id, Question, \(11 characters\)\."):
        load(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text("frage,antwort\na,b\n")
    columns = {"prompt": "frage", "completion": "reply"}
    with pytest.raises(DataError, match=r"'reply'; its columns are frage, antwort\."):
        load(tmp_path / "x.csv", columns=columns)


def test_empty_rows_are_counted(tmp_path):
    turn = {"role": "user", "content": " "}
    file = write_jsonl(
        tmp_path / "x.jsonl", {"text": "a"}, {"text": ""}, {"text": " \n"}, {"text": None}, {"n": 1}
    )
    chats = write_jsonl(
        tmp_path / "y.jsonl", {"messages": []}, {"messages": None}, {"messages": [turn]}
    )
    pairs = write_jsonl(tmp_path / "z.jsonl", {"prompt": "a", "completion": ""})
    loaded = load(file, chats, pairs)
    assert [d.id for d in loaded.documents] == ["x-000000"]
    assert loaded.num_empty == 8
    with pytest.raises(DataError, match=r"has no documents, only 1 row without text: .*z.jsonl"):
        load(pairs)


@pytest.mark.parametrize("name", ["x.jsonl", "y.csv", "z.csv", "x.parquet"])
def test_empty_files(tmp_path, name):
    (tmp_path / name).write_text("text,n\n" if name == "y.csv" else "")
    if name == "x.parquet":
        datasets.Dataset.from_dict({"text": []}).to_parquet(str(tmp_path / name))
    with pytest.raises(DataError, match=r"'data.train' has no documents: "):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": 3}, "1 row whose 'text' is not a string (x-000001)"),
        ({"text": ["secret"]}, "whose 'text' is not a string"),
        ({"text": "secret\ud800"}, "whose 'text' is not Unicode (half a surrogate pair)"),
        ({"id": "\udfff", "text": "a"}, "whose 'id' is not Unicode"),
        ({"id": ["secret"], "text": "a"}, "whose 'id' is neither a string nor a number"),
        ({"messages": "secret"}, "whose 'messages' is not a list of messages"),
        ({"messages": ["secret"]}, "holds something other than {role, content}"),
        ({"messages": [{"role": "user"}]}, "a role or content that is not a string"),
        ({"messages": [{"role": "user", "content": [{"text": "secret"}]}]}, "not a string"),
        (
            {"messages": [{"role": "user", "content": "secret", "tool_calls": [1]}]},
            "whose 'messages' have more than role and content",
        ),
        ({"prompt": 1, "completion": "secret"}, "whose 'prompt' is not a string or messages"),
        (
            {"prompt": [{"role": "user", "content": "secret"}], "completion": "secret"},
            "where only one of 'prompt' and 'completion' is a string",
        ),
        (
            {"prompt": [], "completion": [{"role": "user", "content": "secret"}]},
            "whose 'prompt' has no message",
        ),
    ],
)
def test_unusable_rows_are_counted_and_named(tmp_path, row, said):
    good = {"messages": [{"role": "user", "content": "x"}]} if "messages" in row else {}
    good = good or ({"text": "x"} if "text" in row else {"prompt": "x", "completion": "y"})
    file = write_jsonl(tmp_path / "x.jsonl", good, row)
    with pytest.raises(DataError) as caught:
        load(file)
    message = str(caught.value).replace(str(tmp_path), "")
    assert said in message
    assert "secret" not in message


def test_at_most_five_ids_are_named_on_one_line(tmp_path):
    rows = [{"id": f"row\n{i}" + "x" * 999, "text": 1} for i in range(7)]
    with pytest.raises(DataError, match=r"7 rows .*row\\n4x+, \.\.\.\)\. Correct") as caught:
        load(write_jsonl(tmp_path / "x.jsonl", *rows))
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_ids_are_unique_over_all_sources(tmp_path):
    one = write_jsonl(tmp_path / "x.jsonl", {"id": 1, "text": "a"}, {"id": "2", "text": "b"})
    other = write_jsonl(tmp_path / "y.jsonl", {"id": "1", "text": "c"})
    with pytest.raises(DataError, match=r"1 ids that more than one document uses \(1\)"):
        load(one, other)


def test_docstrings_are_a_source(tmp_path):
    documents = load("docstrings:topics", cache_dir=tmp_path).documents
    assert {d.source for d in documents} == {"topics"}
    assert "topics.assert" in {d.id for d in documents}


def test_real_documents(shared_data):
    text = shared_data / "text"
    documents = load(text / "documents.jsonl").documents
    assert len(documents) == 964
    assert documents[0].id == "book-006bbafadd"
    assert len(load(text / "base_corpus.txt").documents) == 15
    cities = shared_data / "checkpoints" / "arcsf-cities-base" / "train_data"
    assert load(cities).documents[0].id == "dummy_train_data-000000"


def test_token_ids_are_documents(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "n": 1}, {"id": "b", "input_ids": [8]}, {"input_ids": []}]
    jsonl = write_jsonl(tmp_path / "ids.jsonl", *rows)
    parquet = tmp_path / "table.parquet"
    datasets.Dataset.from_list([{"input_ids": [1, 2]}, {"input_ids": None}]).to_parquet(parquet)
    array = tmp_path / "array.npy"
    np.save(array, np.array([[9, 10], [11, 65535]], dtype=np.uint16))
    loaded = load(jsonl, parquet, array)
    assert [(d.id, d.source, d.format, d.text, list(d.input_ids)) for d in loaded.documents] == [
        ("ids-000000", "ids.jsonl", "text", None, [5, 6, 7]),
        ("b", "ids.jsonl", "text", None, [8]),
        ("table-000000", "table.parquet", "text", None, [1, 2]),
        ("array-000000", "array.npy", "text", None, [9, 10]),
        ("array-000001", "array.npy", "text", None, [11, 65535]),
    ]
    assert loaded.num_empty == 2
    assert document_text(loaded.documents[0]) == "5 6 7"
    assert document_text(loaded.documents[0], lambda ids: f"{len(ids)} ids") == "3 ids"


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((3, 4)), r"it holds float64 of shape \(3, 4\); token ids are integers"),
        (np.zeros(3, dtype=np.int64), r"it holds int64 of shape \(3,\)"),
        (np.array([[1], [1, 2]], dtype=object), "Python objects, as rows of different lengths do"),
        (None, "it is not a .npy file"),
    ],
)
def test_arrays_that_are_no_token_ids(tmp_path, array, said):
    path = tmp_path / "x.npy"
    if array is None:
        path.write_bytes(b"text")
    else:
        np.save(path, array)
    with pytest.raises(DataError, match=rf"'data.train': '.*x.npy' is broken: .*{said}"):
        load(path)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, -2], "below 0"),
        ([1, 2.0], "not a list of whole numbers"),
        ([1, True], "not a list of whole numbers"),
        ([[1], [1, 2]], "not a list of whole numbers"),
        ("1 2", "not a list of whole numbers"),
        ([1, 2**31], "above 2147483647"),
    ],
)
def test_rows_that_are_no_token_ids(tmp_path, ids, said):
    path = write_jsonl(tmp_path / "x.jsonl", {"input_ids": [1]}, {"input_ids": ids})
    with pytest.raises(DataError, match=rf"1 row whose 'input_ids' .*{said}.* \(x-000001\)"):
        load(path)


@pytest.mark.parametrize("other", ["text", "messages", "prompt"])
def test_texts_beside_token_ids_are_refused_unless_one_is_named(tmp_path, other):
    path = write_jsonl(tmp_path / "x.jsonl", {other: "a", "completion": "b", "input_ids": [1, 2]})
    with pytest.raises(DataError, match=f"has the columns '{other}' and 'input_ids'"):
        load(path)
    assert list(load(path, format="input_ids").documents[0].input_ids) == [1, 2]
    assert list(load(path, columns={"input_ids": "input_ids"}).documents[0].input_ids) == [1, 2]
