"""YAML and overrides: every mistake is told with its place and a way out."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.config import (
    RunConfig,
    apply_overrides,
    apply_settings,
    load_run_config,
    load_yaml,
    parse_key,
)
from memguard.config.yaml_text import format_key
from memguard.errors import ConfigError

MINIMAL = """\
name: x
model: {path: somewhere}
data:
  train: a.jsonl
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, overrides)
    return [problem.replace(f"{path}:", "") for problem in caught.value.problems]


def test_a_minimal_run_takes_every_default(write) -> None:
    config = load_run_config(write(MINIMAL))
    assert config == RunConfig.model_validate(
        {"name": "x", "model": {"path": "somewhere"}, "data": {"train": ["a.jsonl"]}}
    )
    assert config.data.train == ("a.jsonl",)
    assert config.mitigations == ()


def test_sections_with_only_comments_are_defaults(write) -> None:
    config = load_run_config(
        write(MINIMAL + "optim:\n  # lr: 1\ntrain:\nparallel:\naudit:\nmitigations:\n")
    )
    assert config == load_run_config(write(MINIMAL))


def test_numbers_that_yaml_reads_as_text(write) -> None:
    # YAML 1.1 wants a dot before the exponent; people do not write it.
    assert load_run_config(write(MINIMAL + "optim: {lr: 1e-4}")).optim.lr == 1e-4
    assert load_run_config(write(MINIMAL), ["optim.lr=3e-5"]).optim.lr == 3e-5


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            "mitigations: [{name: goldfish, kk: 4}]",
            "5:32 'mitigations[0].kk' is not a setting; known here: name, k, context_width, mode,",
        ),
        ("otpim: {}", "5:1 'otpim' is not a setting; did you mean 'optim'?"),
        ("  seed: 3", "5:3 'data.seed' is not a setting; did you mean 'seed' (at the top level)?"),
        ("train: {lr: 1}", "5:9 'train.lr' is not a setting; did you mean 'optim.lr'?"),
        (
            "train: {batch_sise: 1}",
            "5:9 'train.batch_sise' is not a setting; did you mean 'batch_size'?",
        ),
        ("optim: {zzz: 1}", "5:9 'optim.zzz' is not a setting; known here: name, lr, betas"),
        ("optim: {k: 1}", "5:9 'optim.k' is not a setting; did you mean 'mitigations[0].k'?"),
        (
            "mitigations:\n- name: goldfihs",
            "6:3 'mitigations[0].name' should be one of goldfish, token_dropout, label_smoothing, "
            "focal, confidence_penalty, loss_clipping, flooding, ngram_penalty, npo, "
            "gradient_ascent, neftune, deduplicate, dp_sgd; got 'goldfihs'; "
            "did you mean 'goldfish'?",
        ),
        ("mitigations: [{k: 4}]", "5:15 'mitigations[0].name' is missing: which of goldfish, "),
        (
            "mitigations: [{name: goldfish}, {name: focal, gama: 1}]",
            "5:47 'mitigations[1].gama' is not a setting; did you mean 'gamma'?",
        ),
        (
            "mitigations: [{name: flooding, level: -1}]",
            "5:32 'mitigations[0].level' should be greater than 0; got -1",
        ),
        (
            "mitigations:\n- {name: goldfish, mode: hsah}",
            "6:20 'mitigations[0].mode' should be 'hash', 'hash_reference', 'static' or 'random'; "
            "got 'hsah'; did you mean 'hash'?",
        ),
        (
            "mitigations: [goldfish]",
            "5:15 'mitigations[0]' should be a block of settings ('key: value' lines); "
            "got 'goldfish'",
        ),
        (
            "mitigations: [{name: goldfish, lr: 1}]",
            "5:32 'mitigations[0].lr' is not a setting; did you mean 'optim.lr'?",
        ),
        (
            "optim: {schedule: constant, min_lr_fraction: 0}",
            "5:1 'optim': 'min_lr_fraction' does nothing with 'schedule: constant', which stays at "
            "'lr': leave it out (or at 0.1); got 0",
        ),
        (
            "optim: {schedule: cosin}",
            "5:9 'optim.schedule' should be 'cosine', 'linear' or 'constant'; got 'cosin'; did you "
            "mean 'cosine'?",
        ),
        ("optim: {lr: 0}", "5:9 'optim.lr' should be greater than 0; got 0"),
        ("optim: {betas: 0.9}", "5:9 'optim.betas' should be a list; got 0.9"),
        (
            "train: {batch_size: 8, micro_batch_size: 3}",
            "'train.micro_batch_size' must divide 'train.batch_size'; got 3 and 8",
        ),
        (
            "train: {compile: maybe}",
            "5:9 'train.compile' should be True, False or 'auto'; got 'maybe'",
        ),
        (
            "parallel: {x: 0}",
            "5:12 'parallel.x': should be 1 or more, or -1 for the rest of the ranks; got 0",
        ),
        ("parallel: {w: 2}", "5:12 'parallel.w' is not a setting; known here: data, z, y, x"),
        ("x: 2", "5:1 'x' is not a setting; did you mean 'parallel.x'?"),
        ("  heldout: h.jsonl\n  heldout_documents: 4", "3:1 'data': set 'heldout' or"),
        ("model: {path: b}", "5:1 'model' is set twice"),
        ("optim: {lr: 1, lr: 1}", "5:16 'optim.lr' is set twice"),
        ("optim: {1: 2}", "should be a word (put it in quotes); got 1"),
        ("optim: {lr: 2024-99-99}", "is not valid YAML"),
        ("optim: {lr: [}", "5:14 is not valid YAML"),
        ("optim: &a [*a]", "is not valid YAML: an alias (*name) inside its own anchor"),
    ],
)
def test_one_mistake_one_line(write, extra: str, expected: str) -> None:
    (problem,) = problems_of(write(MINIMAL + extra))
    assert expected in problem
    assert "\n" not in problem


def test_a_bad_name_is_told_without_a_regular_expression(write) -> None:
    (problem,) = problems_of(write(MINIMAL.replace("x", "a b")))
    assert problem.startswith("1:1 'name' should be letters, digits")


def test_a_missing_block_says_what_it_is_for(write) -> None:
    path = write("name: x\ndata: {train: a}\n")
    (problem,) = problems_of(path)
    assert problem == f"{path} 'model' is missing: Which model is fine-tuned. " + (
        "Weights are read from safetensors; remote code is never run."
    )
    (problem,) = problems_of(write("name: x\nmodel: {path: a}\ndata: {}\n"))
    assert problem == "3:1 'data.train' is missing: Sources of the documents to train on."


def test_all_problems_come_together(write) -> None:
    problems = problems_of(
        write(MINIMAL + "  seed: 1\noptim: {lr: -1}\nmitigations: [{name: goldfish, k: 1}]"),
        "train.epochs=0",
    )
    assert len(problems) == 4
    assert "argument 'train.epochs=0' 'train.epochs' should be greater" in "\n".join(problems)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "must hold settings as 'key: value' lines"),
        (b"- a\n- b", "must hold settings as 'key: value' lines"),
        (b"3\n", "must hold settings as 'key: value' lines"),
        (b"# a\n", "must hold settings as 'key: value' lines"),
        (b"\xff\xfe", "cannot be read: not UTF-8 text"),
        ("name: é".encode("latin-1"), "cannot be read: not UTF-8 text"),
        (b"a: \x00", "is not valid YAML"),
        (b"{[1]: 2}", "is not valid YAML"),
        (b"[" * 5000, "is not valid YAML"),
        (b"run: {}\nsettings: []", "contains a sweep, not a run: use 'memguard compare"),
    ],
)
def test_files_that_hold_no_run(write, content: bytes, expected: str) -> None:
    (problem,) = problems_of(write(content))
    assert expected in problem


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        load_run_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_run_config(tmp_path)


def test_overrides_reach_into_lists_and_make_blocks(write) -> None:
    path = write(MINIMAL + "mitigations: [{name: goldfish, k: 2}]")
    config = load_run_config(
        path,
        [
            "mitigations[0].k=8",
            "mitigations.0.mode=static",
            "--train.batch_size=4",
            "data.train=[a.jsonl, b.jsonl]",
            "data.train[1]=c.jsonl",
            "data.study.num_repetitions=[0, 2]",
            "audit.prefix_tokens=null",
        ],
    )
    assert (config.mitigations[0].k, config.mitigations[0].mode) == (8, "static")
    assert config.train.batch_size == 4
    assert config.data.train == ("a.jsonl", "c.jsonl")
    assert config.data.study.num_repetitions == (0, 2)
    assert load_run_config(path, ["mitigations=[]"]).mitigations == ()


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("optim.lr", "must be KEY=VALUE, e.g. optim.lr=1e-4"),
        ("=3", "must be KEY=VALUE"),
        ("optim.lr=[", "the value is not valid YAML"),
        ("optim.lr=2024-99-99", "the value is not valid YAML"),
        ("name.x=3", "'name.x' leads through a plain value"),
        ("mitigations[2].k=3", "'mitigations[2].k' counts past the end of a list of 1"),
        ("optim.lr=-1", "'optim.lr' should be greater than 0; got -1"),
        ("optim.lr.x=-1", "should be a valid number"),
        ("mitigations=[{name: goldfish, k: 1}]", "'mitigations[0].k' should be greater than or"),
    ],
)
def test_a_wrong_argument_is_quoted(write, argument: str, expected: str) -> None:
    path = write(MINIMAL + "mitigations: [{name: goldfish, k: 2}]")
    (problem,) = problems_of(path, argument)
    assert problem.startswith(f"argument {argument!r}")
    assert expected in problem


def test_wrong_arguments_come_together(write) -> None:
    assert len(problems_of(write(MINIMAL), "a", "name.x=1", "b=[")) == 3


def test_a_key_below_an_overridden_one_is_placed_at_the_argument(write) -> None:
    path = write(MINIMAL + "mitigations: [{name: goldfish, k: 2}]")
    document = apply_overrides(load_yaml(path), ["mitigations=[{name: goldfish}]"])
    assert document.locate(("mitigations", 0, "k")) == "argument 'mitigations=[{name: goldfish}]'"
    deeper = apply_overrides(document, ["mitigations[0].k=3"])
    assert deeper.locate(("mitigations", 0, "k")) == "argument 'mitigations[0].k=3'"
    assert deeper.locate(("mitigations", 0, "mode")).startswith("argument 'mitigations=")
    assert deeper.locate(("data", "train")) == f"{path}:4:3"
    assert deeper.locate(("optim", "lr")) == str(path)


def test_settings_are_put_into_a_copy() -> None:
    values = {"a": {"b": [1, {"c": 2}]}}
    assert apply_settings(values, {"a.b[1].c": 3, "d.e": 4}) == {
        "a": {"b": [1, {"c": 3}]},
        "d": {"e": 4},
    }
    assert values == {"a": {"b": [1, {"c": 2}]}}


KEY = st.one_of(st.integers(0, 99), st.from_regex(r"[a-z_]{1,8}", fullmatch=True))


@given(st.lists(KEY, min_size=1, max_size=5))
def test_written_keys_read_back(keys: list[str | int]) -> None:
    assert parse_key(format_key(tuple(keys))) == tuple(keys)


@given(
    text=st.one_of(st.text(max_size=60), st.text("a:[]{}&*-?!%@\"' \n#0.,|<", max_size=40)),
    argument=st.text("ab.[]=0²-:{} ", max_size=12),
)
def test_any_text_loads_or_is_refused_properly(
    tmp_path_factory: pytest.TempPathFactory, text: str, argument: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "wild.yaml"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, [argument])
    assert all(problem and "\n" not in problem for problem in caught.value.problems)


def test_a_mistake_is_told_fast_and_without_torch(write, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    path = write(MINIMAL + "otpim: {}")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from memguard.config import load_run_config\n"
        "from memguard.errors import ConfigError\n"
        "try: load_run_config(sys.argv[2])\n"
        "except ConfigError as error: print(error); sys.exit(error.exit_code)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert "did you mean 'optim'?" in done.stdout
    # Seconds of a core: a busy machine gives it less of one.
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 2
