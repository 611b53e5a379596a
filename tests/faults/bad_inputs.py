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


def _setting(changes: dict[str, Any], *options: object) -> Make:
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
            (values.setdefault(section, {}) if name else values)[name or section] = value
        (folder / "bad.yaml").write_text(json.dumps(values).replace("Infinity", ".inf"))
        return ("train", folder / "bad.yaml", *options)

    return make


def _override(*arguments: str) -> Make:
    return _setting({}, *arguments)


def _yaml(text: str | bytes, *, command: str = "train") -> Make:
    def make(folder: Path) -> Sequence[object]:
        (folder / "bad.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return (command, folder / "bad.yaml")

    return make


def _settings_file(create: Callable[[Path], object]) -> Make:
    """Return a run whose settings are what ``create`` puts in the place of the file."""

    def make(folder: Path) -> Sequence[object]:
        create(folder / "bad.yaml")
        return ("train", folder / "bad.yaml")

    return make


def _large_yaml(path: Path) -> None:
    path.write_bytes(b"name: x\n#")
    os.truncate(path, 100_000_000)


def _suite(text: str) -> Make:
    return _data("suite.yaml", text.encode(), setting="audit.suite")


def _machine(text: str) -> Make:
    def make(folder: Path) -> Sequence[object]:
        (folder / "machine.yaml").write_text(text)
        return ("plan", "--model", folder / "model", "--machine", folder / "machine.yaml")

    return make


def _data(name: str, content: bytes, *, setting: str = "data.train") -> Make:
    """Return a run with a file of this content, of documents by default."""

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


def _audit_with(first: str) -> Make:
    return lambda folder: ("audit", first, *_audit()(folder)[1:])


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


def _wrong(name: str, make: Make, *words: str, lines: int = 1) -> BadInput:
    return BadInput(name=name, make=make, code=2, words=words, num_lines=lines)


def _unfit(name: str, make: Make, *words: str) -> BadInput:
    return BadInput(name=name, make=make, code=3, words=words)


def _late(name: str, make: Make, *words: str) -> BadInput:
    return BadInput(name=name, make=make, code=3, words=words, needs_torch=True)


YAML_FILES = (
    _wrong("empty yaml", _yaml(""), "must hold settings"),
    _wrong("yaml of comments", _yaml("# nothing\n"), "must hold settings"),
    _wrong("yaml that is a list", _yaml("- name: x\n"), "must hold settings"),
    _wrong("yaml that is a word", _yaml("name\n"), "must hold settings"),
    _wrong("yaml of zeros", _yaml(b"\0" * 100), "is not valid YAML"),
    _wrong("yaml in latin-1", _yaml("name: é\n".encode("latin-1")), "not UTF-8"),
    _wrong("yaml with a tab", _yaml("name: x\ndata:\n\ttrain: a\n"), "is not valid YAML"),
    _wrong("yaml with a key twice", _yaml("name: x\nname: y\n"), "'name' is set twice"),
    _wrong("yaml of two documents", _yaml("name: x\n---\nname: y\n"), "is not valid YAML"),
    _wrong("yaml with a python object", _yaml("name: !!python/name:os.system\n"), "valid YAML"),
    _wrong("yaml with a wrong date", _yaml("name: 2024-99-99\n"), "is not valid YAML"),
    _wrong("yaml with a list as key", _yaml("? [a, b]\n: 1\n"), "is not valid YAML"),
    _wrong("yaml with a number of 5,000 digits", _yaml(f"seed: {'9' * 5000}\n"), "valid YAML"),
    _wrong("alias bomb", _yaml(ALIAS_BOMB), "aliases"),
    _wrong("alias bomb by merges", _yaml(ALIAS_BOMB.replace("[x", "[{x: 1}")), "aliases"),
    _wrong("alias inside its own anchor", _yaml("name: &a {b: *a}\n"), "inside its own anchor"),
    _wrong("alias of nothing", _yaml("name: *nothing\n"), "undefined alias"),
    _wrong("yaml of 10,000 brackets", _yaml("name: " + "[" * 10_000), "nested too deeply"),
    _wrong("yaml of 10,000 blocks", _yaml("{a: " * 10_000), "nested too deeply"),
    _wrong("yaml of 100 MB", _settings_file(_large_yaml), "larger than"),
    _wrong("yaml of 400,000 values", _yaml(f"name: [{'1,' * 400_000}]\n"), "values"),
    _wrong("yaml that is a folder", _settings_file(Path.mkdir), "a folder, not a file"),
    _wrong("yaml that is a FIFO", _settings_file(os.mkfifo), "neither a file nor a shipped name"),
    _wrong("a sweep's alias bomb", _yaml(ALIAS_BOMB, command="compare"), "aliases"),
    _wrong("a sweep that is a list", _yaml("- a\n", command="compare"), "must hold settings"),
    _wrong("a suite's alias bomb", _suite(ALIAS_BOMB), "aliases"),
    _wrong("a suite that is a list", _suite("- a\n"), "must hold settings"),
    _wrong(
        "a suite with an unknown probe",
        _suite("name: s\nversion: 1\nprobes: [{name: nope}]\n"),
        "must be one of extraction",
    ),
    _wrong("a machine that is a list", _machine("- a\n"), "must hold settings"),
    _wrong("a machine's alias bomb", _machine(ALIAS_BOMB), "aliases"),
)

SETTINGS = (
    _wrong("unknown setting", _setting({"trian": {}}), "'trian' is not a setting"),
    _wrong("long unknown setting", _setting({LONG[:1000]: 1}), "is not a setting", "x..."),
    _wrong("no name", _setting({"name": None}), "'name' should be"),
    _wrong("a path for a name", _setting({"name": "../x"}), "'name' should be letters"),
    _wrong("a long name", _setting({"name": LONG}), "'name' should have at most 100"),
    _wrong("a section that is a list", _setting({"data": [1]}), "should be a block of settings"),
    _wrong("NUL in output_dir", _setting({"output_dir": "a\0b"}), "'output_dir'", "NUL"),
    _wrong("NUL in model.path", _setting({"model.path": "a\0b"}), "'model.path'", "NUL"),
    _wrong("NUL in data.train", _setting({"data.train": ["a\0.jsonl"]}), "'data.train", "NUL"),
    _wrong("NUL in audit.suite", _setting({"audit.suite": "a\0b"}), "'audit.suite'", "NUL"),
    _wrong("NUL in an argument", _override('output_dir="a\\0b"'), "'output_dir'", "NUL"),
    _wrong(
        "NUL in a tokenizer's path",
        _setting({"model": {"scratch": {"config": {"model_type": "llama"}, "tokenizer": "a\0"}}}),
        "'model.scratch.tokenizer'",
        "NUL",
    ),
    _wrong(
        "output_dir of 5,000 characters", _setting({"output_dir": LONG}), "output_dir", "xxx..."
    ),
    _wrong("bytes in output_dir", _setting({"output_dir": "a\udcff"}), "'output_dir'", "UTF-8"),
    _wrong("bytes in model.path", _setting({"model.path": "a\udcff"}), "'model.path'", "UTF-8"),
    _wrong("bytes in a column", _setting({"data.columns": {"text": "\udcff"}}), "unicode"),
    _wrong("data of 5,000 characters", _setting({"data.train": LONG}), "'data.train'", "xxx..."),
    _wrong("model of 5,000 characters", _setting({"model.path": f"./{LONG}"}), "model", "xxx..."),
    _wrong("suite of 5,000 characters", _setting({"audit.suite": LONG}), "suite", "xxx..."),
    _wrong("not a number", _setting({"optim.lr": float("nan")}), "'optim.lr' should be"),
    _wrong("infinite", _override("optim.lr=.inf"), "'optim.lr' should be a finite number"),
    _wrong("overflowing float", _override("optim.lr=1.0e+400"), "'optim.lr' should be"),
    _wrong("huge float", _override("optim.max_grad_norm=1e300"), "less than or equal to"),
    _wrong("huge learning rate", _override("optim.lr=1e30"), "less than or equal to"),
    _wrong("infinite share", _override("optim.betas=[.inf,1]"), "'optim.betas[0]' should be"),
    _wrong("10^12 epochs", _override("train.epochs=1000000000000"), "'train.epochs'", "less than"),
    _wrong("10^40 epochs", _override(f"train.epochs={10**40}"), "'train.epochs'", "less than"),
    _wrong("10^18 steps", _override(f"train.max_steps={10**18}"), "'train.max_steps'"),
    _wrong("10^18 rows", _override(f"train.batch_size={10**18}"), "'train.batch_size'"),
    _wrong("10^12 tokens of a row", _override(f"data.seq_len={10**12}"), "'data.seq_len'"),
    _wrong("seed of 2^70", _override(f"seed={2**70}"), "'seed' should be less than"),
    _wrong("10^9 words of a run", _override(f"data.near_duplicate_words={10**9}"), "less than"),
    _wrong("10^12 canaries", _override(f"data.canaries.count={10**12}"), "less than or equal to"),
    _wrong("10^12 copies of a model", _override(f"parallel.x={10**12}"), "'parallel.x'"),
    _wrong(
        "10^12 repetitions",
        _override(f"data.study={{num_repetitions: [0, {10**12}]}}"),
        "'data.study.num_repetitions[1]'",
    ),
    _wrong(
        "10^30 tokens continued",
        _setting({"audit.continuation_tokens": 10**30}),
        "'audit.continuation_tokens'",
    ),
    _wrong("huge k", _override(f"mitigations=[{{name: goldfish, k: {10**30}}}]"), "less than"),
    _wrong("argument without =", _override("seed"), "must be KEY=VALUE"),
    _wrong("argument through a value", _override("name.x=1"), "leads through a plain value"),
    _wrong("argument past the end", _override("data.train[3]=a"), "leads through"),
    _wrong("argument that is no yaml", _override("seed=[1"), "the value is not valid YAML"),
    _wrong("argument of brackets", _override(f"seed={'[' * 5000}"), "valid YAML", "[[[..."),
    _wrong("argument of 5,000 characters", _override(f"{LONG}=1"), "not a setting", "xxx..."),
    _wrong(
        "a sweep's setting that is infinite",
        _compare(settings=[{"name": "a"}, {"name": "b", "overrides": {"optim.lr": 1e300}}]),
        "optim.lr",
    ),
    _wrong(
        "a sweep's seed of 2^70", _compare(seeds=[2**70]), "'seeds[0]' should be less than", lines=2
    ),
)

DOCUMENTS = (
    _unfit("no such file", _setting({"data.train": "nowhere.jsonl"}), "there is no file"),
    _unfit("standard input", _setting({"data.train": "-"}), "there is no file"),
    _late("unknown kind of file", _data("a.bin", b"a"), "has an unknown file type"),
    _late("empty jsonl", _data("a.jsonl", b""), "has no documents"),
    _late("blank jsonl", _data("a.jsonl", b"\n\n \n"), "has no documents"),
    _late("half a line", _data("a.jsonl", _line("a") + b'{"te'), "line 2 is not"),
    _late("lines that are lists", _data("a.jsonl", b"[1]\n[2]\n"), "is not JSON"),
    _late("lines that are numbers", _data("a.jsonl", b"1\n2\n"), "line 1 is not"),
    _late("jsonl in latin-1", _data("a.jsonl", b'{"text": "\xe9"}'), "not UTF-8"),
    _late(
        "jsonl in UTF-16",
        _data("a.jsonl", '{"text": "a"}\n'.encode("utf-16")),
        "is not UTF-8; convert it",
    ),
    _late(
        "json in UTF-32",
        _data("a.json", '[{"text": "a"}]\n'.encode("utf-32-le")),
        "is not UTF-8; convert it",
    ),
    _unfit("file with a name of bytes", _source(_named("a\udcff.txt")), "rename the file"),
    _unfit("folder with a name of bytes", _source(_named("\udce9/a.txt")), "rename the file"),
    _late(
        "file with a name of bytes in a folder",
        _source(_named("b/a\udcff.txt", is_given=False)),
        "b/a\\udcff.txt",
        "rename the file",
    ),
    _unfit("half a surrogate in a name", _setting({"data.train": "\ud800"}), "rename the file"),
    _unfit(
        "control with a name of bytes",
        _setting({"data.control": ["a\udcff.jsonl"]}),
        "'data.control': the name 'a\\udcff.jsonl' is not UTF-8",
    ),
    _late("deep json", _data("a.jsonl", b'{"text":' + b"[" * 100_000), "line 1"),
    _late("deep array", _data("a.json", b"[" * 100_000), "nested too deeply"),
    _late("text that is a number", _data("a.jsonl", b'{"text": 1}'), "not a string"),
    _late("half a surrogate", _data("a.jsonl", b'{"text":"\\ud800"}'), "not Unicode"),
    _late("no text column", _data("a.jsonl", b'{"body": "a"}'), "fits no format"),
    _late("half a conversation", _data("a.jsonl", b'{"messages": 1}'), "messages"),
    _late("ids given twice", _data("a.jsonl", b'{"id":1,"text":"a"}\n' * 2), "ids"),
    _late("ragged csv", _data("a.csv", b"text,b\na\n"), "line 2 ends a row of 1"),
    _late("csv of semicolons", _data("a.csv", b"n;text\n1;a\n"), "columns by ';'"),
    _late("csv with an open quote", _data("a.csv", b'text\n"a'), "unexpected end"),
    _late("csv in latin-1", _data("a.csv", b"text\n\xe9\n"), "is not UTF-8"),
    _late("text in latin-1", _data("a.txt", b"\xe9"), "is not UTF-8"),
    _late("parquet that is none", _data("a.parquet", b"abc"), "not a parquet file"),
    _late("half a parquet", _source(_parquet(lambda b: b[: len(b) // 2])), "parquet"),
    _late(
        "parquet of invalid UTF-8",
        _source(_parquet(lambda b: b.replace(b"words", b"w\xffrds"))),
        "is broken",
    ),
    _late("array that is none", _data("a.npy", b"abc"), "is not a .npy file"),
    _late("array of floats", _source(_array(np.ones((2, 9)))), "float64"),
    _late("array of one row", _source(_array(np.ones(9, int))), "shape (9,)"),
    _late("array of objects", _source(_array(np.array([[1], None], object))), "Python objects"),
    _late("token ids below 0", _source(_array(-np.ones((9, 9), int))), "below 0"),
    _late(
        "token ids beyond the vocabulary",
        _source(_array(np.full((9, 40), 10**6))),
        "the model's vocabulary has",
    ),
    _unfit("FIFO as data", _source(_fifo), "FIFO"),
    _late("FIFO in a folder of data", _source(_fifo_in_folder), "FIFO"),
    _unfit("device as data", _source(_device), "device"),
    _unfit("socket as data", _source(_socket), "socket"),
    _late("folder without documents", _source(_empty_folder), "has no file that ends in"),
    _unfit("link to itself", _source(_link_to_itself), "there is no file or folder"),
    _late("gzip that is none", _data("a.jsonl.gz", b"abc"), "it is no whole gzip file"),
    _late("half a zstd", _data("a.csv.zst", b"\x28\xb5\x2f\xfd\x04"), "it is no whole zstd file"),
    _late("json that ends early", _data("a.json", b'{\n"text":'), "lines 1 to 2 is not JSON"),
    _late("csv without header", _data("a.csv", b"Jane Doe,4\nb,c\n"), "2 columns have no usual"),
    _unfit("pattern of nothing", _setting({"data.train": "nowhere*.jsonl"}), "no file matches"),
    _late(
        "file that is named twice",
        lambda f: _setting({"data.train": [str(f / "documents.jsonl"), str(f / "doc*.jsonl")]})(f),
        "documents.jsonl' twice",
    ),
    _late("docstrings of nothing", _setting({"data.train": "docstrings:"}), "''"),
    _unfit("FIFO as control", lambda f: _setting({"data.control": str(_fifo(f))})(f), "FIFO"),
)

MODELS = (
    _unfit("no such model", _setting({"model.path": "./nowhere"}), "there is no folder"),
    _unfit("model that is a file", _setting({"model.path": __file__}), "it is a file"),
    _unfit("no config.json", _model(_rename("config.json", "c")), "has no config.json"),
    _unfit("config.json of nothing", _model(_write("config.json", b"")), "is not JSON"),
    _unfit("config.json in latin-1", _model(_write("config.json", b'{"\xe9":1}')), "not JSON"),
    _unfit("config.json of a list", _model(_write("config.json", b"[1]")), "config.json"),
    _unfit("deep config.json", _model(_write("config.json", b"[" * 100_000)), "config.json"),
    _unfit(
        "config.json that the disk does not give",
        _model(_unreadable("config.json")),
        "config.json cannot be read: Input/output error",
    ),
    _late(
        "weights that the disk does not give",
        _model(_unreadable("model.safetensors")),
        "model.safetensors cannot be read",
    ),
    _late(
        "tokenizer that the disk does not give", _model(_unreadable("tokenizer.json")), "tokenizer"
    ),
    _unfit("no weights", _model(_rename("model.safetensors", "w")), "none at all"),
    _unfit("pickled weights", _model(_rename("model.safetensors", "w.bin")), "only pickled"),
    _late("unknown family", _fields(model_type="nope"), "no usable configuration"),
    _late("empty weights", _model(_write("model.safetensors", b"")), "safetensors"),
    _late("half the weights", _model(_truncate), "safetensors"),
    _late("no tokenizer", _model(_rename("tokenizer.json", "t")), "tokenizer"),
    _late("broken tokenizer", _model(_write("tokenizer.json", b"{}")), "tokenizer"),
    _unfit("rows longer than the model", _setting({"data.seq_len": 129}), "at most 128"),
)

ARGUMENTS = (
    _wrong("unknown command", _say("trian"), "Did you mean 'train'"),
    _wrong("no config", _say("train"), "CONFIG"),
    _wrong("unknown option", _audit("--nope"), "'--nope' is no option"),
    _wrong("no processes", _override("--nproc", "0"), "--nproc"),
    _wrong("100,000 processes", _override("--nproc", "100000"), "'--nproc'", "core"),
    _wrong("an audit's 100,000 processes", _audit("--nproc", "100000"), "'--nproc'", "core"),
    _wrong("a sweep's 100,000 jobs", _compare("--jobs", "100000"), "'--jobs'", "core"),
    _wrong("a word for a number", _audit("audit.continuation_tokens=x"), "valid integer"),
    _wrong("an audit's argument of 5,000 characters", _audit_with(f"{LONG}=1"), "an audit takes"),
    _wrong("unknown mesh", _audit("parallel.w=2"), "'parallel.w' is not a setting"),
    _wrong("mesh of no ranks", _audit("parallel.z=0"), "should be 1 or more"),
    _wrong(
        "device_map on two processes", _audit("--nproc", 2, "audit.device_map=auto"), "device_map"
    ),
    _wrong("dropout on two processes", _override("--nproc", "2", "train.dropout=0.1"), "dropout"),
    _wrong(
        "dp_sgd on two processes",
        _override("--nproc", "2", "mitigations=[{name: dp_sgd}]"),
        "dp_sgd",
    ),
    _wrong("audit of nothing", _say("audit"), "RUN or --model is required"),
    _wrong("audit without documents", _say("audit", "--model", "m"), "--model needs", lines=2),
    _wrong("audit of no run", _say("audit", "nowhere"), "is not the folder of a run"),
    _wrong("report in a name of bytes", _audit("--out", "o\udce9"), "'--out'", "not UTF-8"),
    _wrong("run in a name of bytes", _run_named_by_bytes, "'RUN'", "not UTF-8"),
    _unfit("members of bytes", _audit("--members", "a\udcff.jsonl"), "'--members'", "not UTF-8"),
    _unfit("base of bytes", _audit("--base", "a\udcff"), "'--base'", "not UTF-8"),
    _wrong("reference of bytes", _audit("audit.reference=./a\udcff"), "is not valid YAML"),
    _wrong("export to bytes", _say("export", "a", "o\udce9", "--merge"), "'OUT'", "not UTF-8"),
    _unfit("audit of a FIFO", lambda f: _audit("--nonmembers", _fifo(f))(f), "FIFO"),
    _wrong("plan of 10^12 GPUs", _say("plan", "--model", "m", "--gpus", 10**12), "--gpus"),
    _wrong("plan of 10^12 tokens", _say("plan", "--model", "m", "--seq-len", 10**12), "seq_len"),
    _wrong("plan of 10^12 rows", _say("plan", "--model", "m", "--batch", 10**12), "batch_size"),
    _unfit("plan of no model", _say("plan", "--model", "nowhere"), "cannot be read"),
    _unfit("unknown machine", _say("plan", "--model", "m", "--machine", "x"), "cannot be read"),
    _unfit("comparison of runs without reports", _run_folder_without_report, "is damaged"),
    _unfit("report of nothing", lambda f: ("report", f), "has neither a report.json"),
)

BAD_INPUTS = (*YAML_FILES, *SETTINGS, *DOCUMENTS, *MODELS, *ARGUMENTS)
