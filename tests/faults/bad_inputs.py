"""Inputs that must be refused in a line: settings, documents, model folders, arguments.

Each case writes what it needs into a folder that holds ``model/`` and ``documents.jsonl`` already
(the fixture ``folder``) and gives the arguments of the command.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LONG = "x" * 5000
ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)
Make = Callable[[Path], Sequence[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadInput:
    """One input, and how it must be refused."""

    name: str
    make: Make
    """Given the folder, writes the input there; returns the arguments of `memguard`."""
    code: int
    """Exit code."""
    words: tuple[str, ...]
    """Each stands in some line of standard error."""
    needs_torch: bool = False
    """Refused only after torch was imported; all others before."""
    num_lines: int = 1
    """Lines that refuse; one a problem. Others (what is being read) may stand above them."""


def _setting(
    changes: dict[str, Any], *options: object, command: str = "train"
) -> Callable[[Path], Sequence[object]]:
    """Return a run of `documents.jsonl` on `model/` with some settings changed."""

    def make(folder: Path) -> Sequence[object]:
        values: dict[str, Any] = {
            "name": "run",
            "output_dir": str(folder / "runs"),
            "model": {"path": str(folder / "model")},
            "data": {"train": str(folder / "documents.jsonl"), "seq_len": 128},
            "train": {"batch_size": 8, "max_steps": 1},
            "audit": {"continuation_tokens": 8},
        }
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if name:
                values.setdefault(section, {})[name] = value
            else:
                values[section] = value
        (folder / "bad.yaml").write_text(json.dumps(values).replace("Infinity", ".inf"))
        return (command, folder / "bad.yaml", *options)

    return make


def _override(*arguments: str) -> Make:
    return _setting({}, *arguments)


def _yaml(text: str | bytes, *, command: str = "train", name: str = "bad.yaml") -> Make:
    def make(folder: Path) -> Sequence[object]:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return (command, folder / name)

    return make


def _large_yaml(folder: Path) -> Sequence[object]:
    with (folder / "bad.yaml").open("wb") as file:
        file.write(b"name: x\n#")
        file.truncate(100_000_000)
    return ("train", folder / "bad.yaml")


def _folder_for_yaml(folder: Path) -> Sequence[object]:
    (folder / "bad.yaml").mkdir()
    return ("train", folder / "bad.yaml")


def _fifo_for_yaml(folder: Path) -> Sequence[object]:
    os.mkfifo(folder / "bad.yaml")
    return ("train", folder / "bad.yaml")


def _suite(text: str) -> Make:
    def make(folder: Path) -> Sequence[object]:
        (folder / "suite.yaml").write_text(text)
        return _setting({"audit.suite": str(folder / "suite.yaml")})(folder)

    return make


def _machine(text: str) -> Make:
    def make(folder: Path) -> Sequence[object]:
        (folder / "machine.yaml").write_text(text)
        return ("plan", "--model", folder / "model", "--machine", folder / "machine.yaml")

    return make


def _data(name: str, content: bytes, *, setting: str = "data.train") -> Make:
    """Return a run whose documents are a file with this content."""

    def make(folder: Path) -> Sequence[object]:
        (folder / name).write_bytes(content)
        return _setting({setting: str(folder / name)})(folder)

    return make


def _source(write: Callable[[Path], Path]) -> Make:
    """Return a run whose documents are what ``write`` has made in the folder."""
    return lambda folder: _setting({"data.train": str(write(folder))})(folder)


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.jsonl")
    return folder / "pipe.jsonl"


def _fifo_in_folder(folder: Path) -> Path:
    (folder / "texts").mkdir()
    (folder / "texts" / "a.jsonl").write_text('{"text": "a"}\n')
    os.mkfifo(folder / "texts" / "b.jsonl")
    return folder / "texts"


def _device(folder: Path) -> Path:
    (folder / "zero.jsonl").symlink_to("/dev/zero")
    return folder / "zero.jsonl"


def _socket(folder: Path) -> Path:
    before = Path.cwd()
    os.chdir(folder)  # a socket's whole path must have fewer than 108 characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("socket.jsonl")
    finally:
        os.chdir(before)
    return folder / "socket.jsonl"


def _named(name: str, *, is_given: bool = True) -> Callable[[Path], Path]:
    """Write a text file of a name; is_given: whether it is the source, or the folder it is in."""

    def write(folder: Path) -> Path:
        path = folder / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("some words")
        return path if is_given else folder / "texts"

    return write


def _empty_folder(folder: Path) -> Path:
    (folder / "texts").mkdir()
    return folder / "texts"


def _link_to_itself(folder: Path) -> Path:
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    return folder / "loop.jsonl"


def _array(values: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.save(folder / "ids.npy", values)
        return folder / "ids.npy"

    return write


def _parquet(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": [f"some words of document {n}" for n in range(40)]})
        path = folder / "texts.parquet"
        pyarrow.parquet.write_table(table, path, use_dictionary=False, compression="none")
        path.write_bytes(change(path.read_bytes()))
        return path

    return write


def _model(change: Callable[[Path], object]) -> Make:
    """Return a run on a copy of the model folder that ``change`` has spoiled."""

    def make(folder: Path) -> Sequence[object]:
        copy = folder / "spoiled"
        shutil.copytree(folder / "model", copy)
        change(copy)
        return _setting({"model.path": str(copy)})(folder)

    return make


def _fields(**fields: Any) -> Make:
    """Return a run on a model whose config.json has other fields."""

    def change(copy: Path) -> None:
        path = copy / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return _model(change)


def _unreadable(name: str) -> Callable[[Path], object]:
    """Replace a file by one whose reading is an error of the system (EIO), even for root."""

    def change(copy: Path) -> None:
        (copy / name).unlink()
        (copy / name).symlink_to("/proc/self/mem")

    return change


def _rename(old: str, new: str) -> Callable[[Path], object]:
    return lambda copy: (copy / old).rename(copy / new)


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda copy: (copy / name).write_bytes(content)


def _truncate(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _audit(*options: object) -> Make:
    def make(folder: Path) -> Sequence[object]:
        given = ("--model", folder / "model", "--members", folder / "documents.jsonl")
        return ("audit", *given, "--out", folder / "out", *options)

    return make


def _say(*arguments: object) -> Make:
    return lambda _: arguments


def _sweep(folder: Path, **changes: Any) -> Path:
    values = {
        "name": "sweep",
        "output_dir": str(folder / "runs"),
        "run": {
            "model": {"path": str(folder / "model")},
            "data": {"train": str(folder / "documents.jsonl"), "seq_len": 128},
        },
        "settings": [{"name": "plain"}],
        **changes,
    }
    path = folder / "sweep.yaml"
    path.write_text(json.dumps(values))
    return path


def _compare(*options: object, **changes: Any) -> Make:
    return lambda folder: ("compare", _sweep(folder, **changes), *options)


def _run_folder_without_report(folder: Path) -> Sequence[object]:
    for name in ("one", "two"):
        (folder / name).mkdir()
        run = f"name: {name}\nmodel: {{path: m}}\ndata: {{train: d.jsonl}}\n"
        (folder / name / "config.yaml").write_text(run)
    return ("compare", folder / "one", folder / "two")


def _run_named_by_bytes(folder: Path) -> Sequence[object]:
    (folder / "run\udcff").mkdir()
    (folder / "run\udcff" / "config.yaml").touch()
    return ("audit", folder / "run\udcff")


def _line(text: str) -> bytes:
    return (json.dumps({"text": text}) + "\n").encode()


def _bad(
    name: str, make: Make, code: int, *words: str, torch: bool = False, lines: int = 1
) -> BadInput:
    return BadInput(
        name=name, make=make, code=code, words=words, needs_torch=torch, num_lines=lines
    )


_PAIR = b'{"prompt": "a", "completion": "b"}\n'

YAML_FILES = (
    _bad("empty yaml", _yaml(""), 2, "must hold settings"),
    _bad("yaml of comments", _yaml("# nothing\n"), 2, "must hold settings"),
    _bad("yaml that is a list", _yaml("- name: x\n"), 2, "must hold settings"),
    _bad("yaml that is a word", _yaml("name\n"), 2, "must hold settings"),
    _bad("yaml of zeros", _yaml(b"\0" * 100), 2, "is not valid YAML"),
    _bad("yaml in latin-1", _yaml("name: é\n".encode("latin-1")), 2, "not UTF-8"),
    _bad("yaml with a tab", _yaml("name: x\ndata:\n\ttrain: a\n"), 2, "is not valid YAML"),
    _bad("yaml with a key twice", _yaml("name: x\nname: y\n"), 2, "'name' is set twice"),
    _bad("yaml of two documents", _yaml("name: x\n---\nname: y\n"), 2, "is not valid YAML"),
    _bad("yaml with a python object", _yaml("name: !!python/name:os.system\n"), 2, "valid YAML"),
    _bad("yaml with a wrong date", _yaml("name: 2024-99-99\n"), 2, "is not valid YAML"),
    _bad("yaml with a list as key", _yaml("? [a, b]\n: 1\n"), 2, "is not valid YAML"),
    _bad("yaml with a number of 5,000 digits", _yaml(f"seed: {'9' * 5000}\n"), 2, "valid YAML"),
    _bad("alias bomb", _yaml(ALIAS_BOMB), 2, "aliases"),
    _bad("alias bomb by merges", _yaml(ALIAS_BOMB.replace("[x", "[{x: 1}")), 2, "aliases"),
    _bad("alias inside its own anchor", _yaml("name: &a {b: *a}\n"), 2, "inside its own anchor"),
    _bad("alias of nothing", _yaml("name: *nothing\n"), 2, "undefined alias"),
    _bad("yaml of 10,000 brackets", _yaml("name: " + "[" * 10_000), 2, "nested too deeply"),
    _bad("yaml of 10,000 blocks", _yaml("{a: " * 10_000), 2, "nested too deeply"),
    _bad("yaml of 100 MB", _large_yaml, 2, "larger than"),
    _bad("yaml of 400,000 values", _yaml(f"name: [{'1,' * 400_000}]\n"), 2, "values"),
    _bad("yaml that is a folder", _folder_for_yaml, 2, "a folder, not a file"),
    _bad("yaml that is a FIFO", _fifo_for_yaml, 2, "neither a file nor a shipped name"),
    _bad("a sweep's alias bomb", _yaml(ALIAS_BOMB, command="compare"), 2, "aliases"),
    _bad("a sweep that is a list", _yaml("- a\n", command="compare"), 2, "must hold settings"),
    _bad("a suite's alias bomb", _suite(ALIAS_BOMB), 2, "aliases"),
    _bad("a suite that is a list", _suite("- a\n"), 2, "must hold settings"),
    _bad(
        "a suite with an unknown probe",
        _suite("name: s\nversion: 1\nprobes: [{name: nope}]\n"),
        2,
        "must be one of extraction",
    ),
    _bad("a machine that is a list", _machine("- a\n"), 2, "must hold settings"),
    _bad("a machine's alias bomb", _machine(ALIAS_BOMB), 2, "aliases"),
)

SETTINGS = (
    _bad("unknown setting", _setting({"trian": {}}), 2, "'trian' is not a setting"),
    _bad("long unknown setting", _setting({LONG[:1000]: 1}), 2, "is not a setting", "x..."),
    _bad("no name", _setting({"name": None}), 2, "'name' should be"),
    _bad("a path for a name", _setting({"name": "../x"}), 2, "'name' should be letters"),
    _bad("a long name", _setting({"name": LONG}), 2, "'name' should have at most 100"),
    _bad("a section that is a list", _setting({"data": [1]}), 2, "should be a block of settings"),
    _bad("NUL in output_dir", _setting({"output_dir": "a\0b"}), 2, "'output_dir'", "NUL"),
    _bad("NUL in model.path", _setting({"model.path": "a\0b"}), 2, "'model.path'", "NUL"),
    _bad("NUL in data.train", _setting({"data.train": ["a\0.jsonl"]}), 2, "'data.train", "NUL"),
    _bad("NUL in audit.suite", _setting({"audit.suite": "a\0b"}), 2, "'audit.suite'", "NUL"),
    _bad("NUL in an argument", _override('output_dir="a\\0b"'), 2, "'output_dir'", "NUL"),
    _bad(
        "NUL in a tokenizer's path",
        _setting({"model": {"scratch": {"config": {"model_type": "llama"}, "tokenizer": "a\0"}}}),
        2,
        "'model.scratch.tokenizer'",
        "NUL",
    ),
    _bad(
        "output_dir of 5,000 characters", _setting({"output_dir": LONG}), 2, "output_dir", "xxx..."
    ),
    _bad("bytes in output_dir", _setting({"output_dir": "a\udcff"}), 2, "'output_dir'", "UTF-8"),
    _bad("bytes in model.path", _setting({"model.path": "a\udcff"}), 2, "'model.path'", "UTF-8"),
    _bad("bytes in a column", _setting({"data.columns": {"text": "\udcff"}}), 2, "unicode"),
    _bad("data of 5,000 characters", _setting({"data.train": LONG}), 2, "'data.train'", "xxx..."),
    _bad("model of 5,000 characters", _setting({"model.path": f"./{LONG}"}), 2, "model", "xxx..."),
    _bad("suite of 5,000 characters", _setting({"audit.suite": LONG}), 2, "suite", "xxx..."),
    _bad("not a number", _setting({"optim.lr": float("nan")}), 2, "'optim.lr' should be"),
    _bad("infinite", _override("optim.lr=.inf"), 2, "'optim.lr' should be a finite number"),
    _bad("overflowing float", _override("optim.lr=1.0e+400"), 2, "'optim.lr' should be"),
    _bad("huge float", _override("optim.max_grad_norm=1e300"), 2, "less than or equal to"),
    _bad("huge learning rate", _override("optim.lr=1e30"), 2, "less than or equal to"),
    _bad("infinite share", _override("optim.betas=[.inf,1]"), 2, "'optim.betas[0]' should be"),
    _bad("10^12 epochs", _override("train.epochs=1000000000000"), 2, "'train.epochs'", "less than"),
    _bad("10^40 epochs", _override(f"train.epochs={10**40}"), 2, "'train.epochs'", "less than"),
    _bad("10^18 steps", _override(f"train.max_steps={10**18}"), 2, "'train.max_steps'"),
    _bad("10^18 rows", _override(f"train.batch_size={10**18}"), 2, "'train.batch_size'"),
    _bad("10^12 tokens of a row", _override(f"data.seq_len={10**12}"), 2, "'data.seq_len'"),
    _bad("seed of 2^70", _override(f"seed={2**70}"), 2, "'seed' should be less than"),
    _bad("10^9 words of a run", _override(f"data.near_duplicate_words={10**9}"), 2, "less than"),
    _bad("10^12 canaries", _override(f"data.canaries.count={10**12}"), 2, "less than or equal to"),
    _bad("10^12 copies of a model", _override(f"parallel.x={10**12}"), 2, "'parallel.x'"),
    _bad(
        "10^12 repetitions",
        _override(f"data.study={{num_repetitions: [0, {10**12}]}}"),
        2,
        "'data.study.num_repetitions[1]'",
    ),
    _bad(
        "10^30 tokens continued",
        _setting({"audit.continuation_tokens": 10**30}),
        2,
        "'audit.continuation_tokens'",
    ),
    _bad("huge k", _override(f"mitigations=[{{name: goldfish, k: {10**30}}}]"), 2, "less than"),
    _bad("argument without =", _override("seed"), 2, "must be KEY=VALUE"),
    _bad("argument through a value", _override("name.x=1"), 2, "leads through a plain value"),
    _bad("argument past the end", _override("data.train[3]=a"), 2, "leads through"),
    _bad("argument that is no yaml", _override("seed=[1"), 2, "the value is not valid YAML"),
    _bad("argument of brackets", _override(f"seed={'[' * 5000}"), 2, "valid YAML", "[[[..."),
    _bad("argument of 5,000 characters", _override(f"{LONG}=1"), 2, "not a setting", "xxx..."),
    _bad(
        "a sweep's setting that is infinite",
        _compare(settings=[{"name": "a"}, {"name": "b", "overrides": {"optim.lr": 1e300}}]),
        2,
        "optim.lr",
    ),
    _bad(
        "a sweep's seed of 2^70",
        _compare(seeds=[2**70]),
        2,
        "'seeds[0]' should be less than",
        lines=2,
    ),
)

DOCUMENTS = (
    _bad("no such file", _setting({"data.train": "nowhere.jsonl"}), 3, "there is no file"),
    _bad("standard input", _setting({"data.train": "-"}), 3, "there is no file"),
    _bad("unknown kind of file", _data("a.bin", b"a"), 3, "has an unknown file type", torch=True),
    _bad("empty jsonl", _data("a.jsonl", b""), 3, "has no documents", torch=True),
    _bad("blank jsonl", _data("a.jsonl", b"\n\n \n"), 3, "has no documents", torch=True),
    _bad("half a line", _data("a.jsonl", _line("a") + b'{"te'), 3, "line 2 is not", torch=True),
    _bad("lines that are lists", _data("a.jsonl", b"[1]\n[2]\n"), 3, "is not JSON", torch=True),
    _bad("lines that are numbers", _data("a.jsonl", b"1\n2\n"), 3, "line 1 is not", torch=True),
    _bad("jsonl in latin-1", _data("a.jsonl", b'{"text": "\xe9"}'), 3, "not UTF-8", torch=True),
    _bad(
        "jsonl in UTF-16",
        _data("a.jsonl", '{"text": "a"}\n'.encode("utf-16")),
        3,
        "is not UTF-8; convert it",
        torch=True,
    ),
    _bad(
        "json in UTF-32",
        _data("a.json", '[{"text": "a"}]\n'.encode("utf-32-le")),
        3,
        "is not UTF-8; convert it",
        torch=True,
    ),
    _bad("file with a name of bytes", _source(_named("a\udcff.txt")), 3, "rename the file"),
    _bad("folder with a name of bytes", _source(_named("\udce9/a.txt")), 3, "rename the file"),
    _bad(
        "file with a name of bytes in a folder",
        _source(_named("b/a\udcff.txt", is_given=False)),
        3,
        "b/a\\udcff.txt",
        "rename the file",
        torch=True,
    ),
    _bad("half a surrogate in a name", _setting({"data.train": "\ud800"}), 3, "rename the file"),
    _bad(
        "control with a name of bytes",
        _setting({"data.control": ["a\udcff.jsonl"]}),
        3,
        "'data.control': the name 'a\\udcff.jsonl' is not UTF-8",
    ),
    _bad("deep json", _data("a.jsonl", b'{"text":' + b"[" * 100_000), 3, "line 1", torch=True),
    _bad("deep array", _data("a.json", b"[" * 100_000), 3, "nested too deeply", torch=True),
    _bad("text that is a number", _data("a.jsonl", b'{"text": 1}'), 3, "not a string", torch=True),
    _bad("half a surrogate", _data("a.jsonl", b'{"text":"\\ud800"}'), 3, "not Unicode", torch=True),
    _bad("no text column", _data("a.jsonl", b'{"body": "a"}'), 3, "fits no format", torch=True),
    _bad("half a conversation", _data("a.jsonl", b'{"messages": 1}'), 3, "messages", torch=True),
    _bad("ids given twice", _data("a.jsonl", b'{"id":1,"text":"a"}\n' * 2), 3, "ids", torch=True),
    _bad("ragged csv", _data("a.csv", b"text,b\na\n"), 3, "line 2 ends a row of 1", torch=True),
    _bad("csv of semicolons", _data("a.csv", b"n;text\n1;a\n"), 3, "columns by ';'", torch=True),
    _bad("csv with an open quote", _data("a.csv", b'text\n"a'), 3, "unexpected end", torch=True),
    _bad("csv in latin-1", _data("a.csv", b"text\n\xe9\n"), 3, "is not UTF-8", torch=True),
    _bad("text in latin-1", _data("a.txt", b"\xe9"), 3, "is not UTF-8", torch=True),
    _bad("parquet that is none", _data("a.parquet", b"abc"), 3, "not a parquet file", torch=True),
    _bad("half a parquet", _source(_parquet(lambda b: b[: len(b) // 2])), 3, "parquet", torch=True),
    _bad(
        "parquet of invalid UTF-8",
        _source(_parquet(lambda b: b.replace(b"words", b"w\xffrds"))),
        3,
        "is broken",
        torch=True,
    ),
    _bad("array that is none", _data("a.npy", b"abc"), 3, "is not a .npy file", torch=True),
    _bad("array of floats", _source(_array(np.ones((2, 9)))), 3, "float64", torch=True),
    _bad("array of one row", _source(_array(np.ones(9, int))), 3, "shape (9,)", torch=True),
    _bad(
        "array of objects",
        _source(_array(np.array([[1], None], object))),
        3,
        "Python objects",
        torch=True,
    ),
    _bad("token ids below 0", _source(_array(-np.ones((9, 9), int))), 3, "below 0", torch=True),
    _bad(
        "token ids beyond the vocabulary",
        _source(_array(np.full((9, 40), 10**6))),
        3,
        "the model's vocabulary has",
        torch=True,
    ),
    _bad("FIFO as data", _source(_fifo), 3, "FIFO"),
    _bad("FIFO in a folder of data", _source(_fifo_in_folder), 3, "FIFO", torch=True),
    _bad("device as data", _source(_device), 3, "device"),
    _bad("socket as data", _source(_socket), 3, "socket"),
    _bad(
        "folder without documents",
        _source(_empty_folder),
        3,
        "has no file that ends in",
        torch=True,
    ),
    _bad("link to itself", _source(_link_to_itself), 3, "there is no file or folder"),
    _bad("docstrings of nothing", _setting({"data.train": "docstrings:"}), 3, "''", torch=True),
    _bad("FIFO as control", lambda f: _setting({"data.control": str(_fifo(f))})(f), 3, "FIFO"),
)

MODELS = (
    _bad("no such model", _setting({"model.path": "./nowhere"}), 3, "there is no folder"),
    _bad("model that is a file", _setting({"model.path": __file__}), 3, "it is a file"),
    _bad("no config.json", _model(_rename("config.json", "c")), 3, "has no config.json"),
    _bad("config.json of nothing", _model(_write("config.json", b"")), 3, "is not JSON"),
    _bad("config.json in latin-1", _model(_write("config.json", b'{"\xe9":1}')), 3, "not JSON"),
    _bad("config.json of a list", _model(_write("config.json", b"[1]")), 3, "config.json"),
    _bad("deep config.json", _model(_write("config.json", b"[" * 100_000)), 3, "config.json"),
    _bad(
        "config.json that the disk does not give",
        _model(_unreadable("config.json")),
        3,
        "config.json cannot be read: Input/output error",
    ),
    _bad(
        "weights that the disk does not give",
        _model(_unreadable("model.safetensors")),
        3,
        "model.safetensors cannot be read",
        torch=True,
    ),
    _bad(
        "tokenizer that the disk does not give",
        _model(_unreadable("tokenizer.json")),
        3,
        "tokenizer",
        torch=True,
    ),
    _bad("no weights", _model(_rename("model.safetensors", "w")), 3, "none at all"),
    _bad("pickled weights", _model(_rename("model.safetensors", "w.bin")), 3, "only pickled"),
    _bad("unknown family", _fields(model_type="nope"), 3, "no usable configuration", torch=True),
    _bad("empty weights", _model(_write("model.safetensors", b"")), 3, "safetensors", torch=True),
    _bad("half the weights", _model(_truncate), 3, "safetensors", torch=True),
    _bad("no tokenizer", _model(_rename("tokenizer.json", "t")), 3, "tokenizer", torch=True),
    _bad("broken tokenizer", _model(_write("tokenizer.json", b"{}")), 3, "tokenizer", torch=True),
    _bad("rows longer than the model", _setting({"data.seq_len": 129}), 3, "at most 128"),
)

ARGUMENTS = (
    _bad("unknown command", _say("trian"), 2, "Did you mean 'train'?"),
    _bad("no config", _say("train"), 2, "CONFIG"),
    _bad("unknown option", _audit("--nope"), 2, "No such option: --nope"),
    _bad("no processes", _override("--nproc", "0"), 2, "--nproc"),
    _bad("100,000 processes", _override("--nproc", "100000"), 2, "'--nproc'", "core"),
    _bad("an audit's 100,000 processes", _audit("--nproc", "100000"), 2, "'--nproc'", "core"),
    _bad("a sweep's 100,000 jobs", _compare("--jobs", "100000"), 2, "'--jobs'", "core"),
    _bad(
        "a word for a number",
        _audit("audit.continuation_tokens=x"),
        2,
        "'audit.continuation_tokens'",
    ),
    _bad("unknown mesh", _audit("parallel.w=2"), 2, "'parallel.w' is not a setting"),
    _bad("mesh of no ranks", _audit("parallel.z=0"), 2, "should be 1 or more"),
    _bad(
        "device_map on two processes",
        _audit("--nproc", 2, "audit.device_map=auto"),
        2,
        "device_map",
    ),
    _bad("dropout on two processes", _override("--nproc", "2", "train.dropout=0.1"), 2, "dropout"),
    _bad(
        "dp_sgd on two processes",
        _override("--nproc", "2", "mitigations=[{name: dp_sgd}]"),
        2,
        "dp_sgd",
    ),
    _bad("audit of nothing", _say("audit"), 2, "give either the folder of a RUN"),
    _bad("audit without documents", _say("audit", "--model", "m"), 2, "--model needs", lines=2),
    _bad("audit of no run", _say("audit", "nowhere"), 2, "is not the folder of a run"),
    _bad("report in a name of bytes", _audit("--out", "o\udce9"), 2, "'--out'", "not UTF-8"),
    _bad("run in a name of bytes", _run_named_by_bytes, 2, "'RUN'", "not UTF-8"),
    _bad("members of bytes", _audit("--members", "a\udcff.jsonl"), 3, "'--members'", "not UTF-8"),
    _bad("base of bytes", _audit("--base", "a\udcff"), 3, "'--base'", "not UTF-8"),
    _bad("reference of bytes", _audit("audit.reference=./a\udcff"), 2, "UTF-8"),
    _bad("export to bytes", _say("export", "a", "o\udce9", "--merge"), 2, "'OUT'", "not UTF-8"),
    _bad("audit of a FIFO", lambda f: _audit("--nonmembers", _fifo(f))(f), 3, "FIFO"),
    _bad("plan of 10^12 GPUs", _say("plan", "--model", "m", "--gpus", 10**12), 2, "--gpus"),
    _bad("plan of 10^12 tokens", _say("plan", "--model", "m", "--seq-len", 10**12), 2, "seq_len"),
    _bad("plan of 10^12 rows", _say("plan", "--model", "m", "--batch", 10**12), 2, "batch_size"),
    _bad("plan of no model", _say("plan", "--model", "nowhere"), 3, "cannot be read"),
    _bad("unknown machine", _say("plan", "--model", "m", "--machine", "x"), 3, "cannot be read"),
    _bad("comparison of runs without reports", _run_folder_without_report, 3, "is damaged"),
    _bad("report of nothing", lambda f: ("report", f), 3, "has neither a report.json"),
)

BAD_INPUTS = (*YAML_FILES, *SETTINGS, *DOCUMENTS, *MODELS, *ARGUMENTS)
