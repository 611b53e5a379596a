"""Every mistake ends in a line that says what is wrong, and in the right exit code."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_examples import run_cli, write_jsonl, write_run

from memguard.workflows.common import setup
from memguard.workflows.training import data as training_data

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def fails(code: int, *arguments: object) -> str:
    """Run a command that must fail with ``code``, in lines without a traceback; return them."""
    outcome = run_cli(*arguments)
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    return outcome.err


# -- settings: exit 2, before anything heavy is imported ------------------------------------------


def test_wrong_settings_are_told_all_together_without_torch(bare: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "name: x\n"
        "model: {path: m}\n"
        "data: {train: d.jsonl, seq_len: few}\n"
        "mitigations: [{name: goldfish, kk: 4}]\n"
        "otpim: {lr: 1}\n"
    )
    ended = bare("train", "run.yaml", "train.batch_size=0", "--seed=-1")
    assert (ended.returncode, ended.stdout) == (2, "")
    lines = ended.stderr.splitlines()
    assert len(lines) == 5, ended.stderr
    for place, words in (
        ("run.yaml:3:24", "'data.seq_len'"),
        (
            "run.yaml:4:32",
            "'mitigations[0].kk' is not a setting; known here: name, k, context_width",
        ),
        ("run.yaml:5:1", "'otpim' is not a setting; did you mean 'optim'?"),
        ("argument 'train.batch_size=0'", "greater than or equal to 1"),
        ("argument '--seed=-1'", "greater than or equal to 0"),
    ):
        assert any(line.startswith(place) and words in line for line in lines), ended.stderr


def test_a_wrong_sweep_or_audit_is_told_without_torch(bare: Any, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        "name: x\nrun: {data: {train: d.jsonl}, model: {path: m}, seed: 3}\nsettings: []\n"
    )
    ended = bare("compare", "sweep.yaml")
    assert ended.returncode == 2
    assert "'run.seed' must not be set here" in ended.stderr
    assert "'settings'" in ended.stderr
    ended = bare("audit", "--model", "m", "audit.dtype=bf17")
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "--model needs --members: documents the model was trained on",
        "--model needs --out: a folder for the report",
    ]


def test_processes_are_not_started_for_wrong_settings(bare: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: x\nmodel: {path: m}\ndata: {trane: d.jsonl}\n")
    ended = bare("train", "run.yaml", "--nproc", 2)
    assert ended.returncode == 2
    assert "did you mean 'train'?" in ended.stderr
    assert "'--nproc'" in bare("train", "run.yaml", "--nproc", 0).stderr
    ended = bare("audit", "--nproc", 2)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)


def test_a_run_at_work_and_an_adapter_are_told_without_torch(
    bare: Any, folder: Path, tmp_path: Path
) -> None:
    from memguard.workflows.common.folder import locked

    path = write_run(folder)
    with locked(folder / "runs" / "run"):
        ended = bare("train", path, "--nproc", 2)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
        assert "another process is using" in ended.stderr
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    ended = bare("train", path, f"model.path={tmp_path / 'adapter'}")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (3, 1), ended.stderr
    assert "adapter_config.json: 'peft_type' must be LORA; got 'null'" in ended.stderr


def test_a_rank_of_torchrun_is_named(bare: Any) -> None:
    for rank, begin in (("0", "'CONFIG'"), ("3", "[rank 3] 'CONFIG'")):
        ended = bare("train", "nowhere.yaml", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="4")
        assert ended.returncode == 2
        assert ended.stderr.startswith(begin), ended.stderr


def test_the_template_and_its_schema_need_no_torch(bare: Any) -> None:
    schema = json.loads(bare("init", "--schema").stdout)
    assert {"model", "data", "mitigations", "optim", "train", "audit"} <= schema[
        "properties"
    ].keys()
    assert bare("init").stdout.startswith("# A memguard run.")
    assert "compare" in bare("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trian", "run.yaml"), "Did you mean 'train'"),
        (("audit", "--nope"), "'--nope' is no option of audit"),
        (("audit", "audit.continuation_tokens=x"), "RUN or --model is required; got neither"),
        (("train",), "CONFIG"),
        (("train", "nope.yaml"), "neither a file nor a shipped name"),
        (("train", "quickstrat"), "did you mean 'quickstart'?"),
        (("train", "quickstart"), "use 'memguard compare"),
        (("train", "llama31-8b", "seed"), "must be KEY=VALUE"),
        (("train", "llama31-8b", "--optim.lrr=1"), "did you mean 'lr'?"),
        (("compare", "llama31-8b"), "use 'memguard train"),
        (("audit",), "RUN or --model is required; got neither"),
        (("audit", "nowhere"), "is not the folder of a run"),
        (("audit", "\x1b[2J\u202e"), "'[U+001B][2J[U+202E]'"),
        (("audit", "--model", "m", "--members", "m", "--identity-key", "~nobody/k"), "~nobody/k"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str) -> None:
    assert words in fails(2, *arguments)


# -- data and models: exit 3 ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("data", {"train": "nowhere.jsonl"}, "there is no file or folder 'nowhere.jsonl'"),
        ("data", {"seq_len": 129}, "'data.seq_len' must be at most 128"),
        ("model", {"path": "./nowhere"}, "there is no folder './nowhere'"),
        ("data", {"columns": {"text": "body"}}, "needs the column 'body'"),
        ("audit", {"continuation_tokens": 500}, "'audit.min_documents' is 5, but only 0"),
        ("train", {"max_steps": 0}, None),
    ],
)
def test_what_cannot_be_trained(
    folder: Path, section: str, change: dict[str, Any], words: str | None
) -> None:
    path = write_run(folder, **{section: change})
    if words is None:
        assert f"'{section}." in fails(2, "train", path)
    else:
        assert words in fails(3, "train", path)


def test_a_model_is_refused_before_the_documents_are_read(folder: Path) -> None:
    path = write_run(folder, model={"path": "./nowhere"})
    assert "reading" not in fails(3, "train", path)


def test_pickled_weights_are_never_read(folder: Path, tiny_folder: Path) -> None:
    pickled = folder / "pickled"
    pickled.mkdir()
    for file in (tiny_folder / "model").iterdir():
        if file.suffix != ".safetensors":
            (pickled / file.name).write_bytes(file.read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    path = write_run(folder, model={"path": str(pickled)})
    assert "only pickled ones, which are never read" in fails(3, "train", path)
    arguments = ("--members", folder / "documents.jsonl", "--out", folder / "out")
    assert "only pickled ones" in fails(3, "audit", "--model", pickled, *arguments)


def test_damaged_weights(folder: Path, tiny_folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = folder / "broken"
    broken.mkdir()
    for file in (tiny_folder / "model").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    path = write_run(folder, model={"path": str(broken)})
    assert "is nan before training: the model's weights are damaged" in fails(3, "train", path)
    arguments = ("--members", folder / "documents.jsonl", "--out", folder / "out")
    message = fails(3, "audit", "--model", broken, *arguments, "audit.continuation_tokens=8")
    assert "the model's logits are not finite" in message


def test_a_tokenizer_with_more_tokens_than_the_model_has(folder: Path, tiny_folder: Path) -> None:
    import transformers

    other = folder / "other"
    other.mkdir()
    for file in (tiny_folder / "model").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = transformers.AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["qqqq"])
    tokenizer.save_pretrained(other)
    texts = write_jsonl(folder / "texts.jsonl", [{"text": "abcd qqqq " * 12}] * 8)
    arguments = ("--members", texts, "--out", folder / "out", "audit.continuation_tokens=5")
    message = fails(3, "audit", "--model", other, *arguments)
    assert "a tokenizer that does not fit the model" in message


def test_unfinished_runs_and_empty_folders_have_no_audit(folder: Path) -> None:
    path = write_run(folder)
    assert run_cli("prepare", path).code == 0
    assert "has no model/ yet" in fails(3, "audit", folder / "runs" / "run")
    assert "has neither a report.json" in fails(3, "report", folder)


def test_a_run_that_ended_before_it_trained_anything_whole(folder: Path) -> None:
    path = write_run(folder, data={"seq_len": 32}, train={"max_steps": 1, "batch_size": 2})
    message = fails(3, "train", path)
    assert "with 'train.max_steps' the model was trained on 0 documents in full" in message
    assert (folder / "runs" / "run" / "model" / "config.json").exists(), "the model is kept"


def test_errors_quote_no_text(folder: Path) -> None:
    secret = "my secret diary"
    write_jsonl(folder / "mixed.jsonl", [{"text": secret}, {"text": {"a": secret}}])
    (folder / "broken.jsonl").write_text(json.dumps({"text": secret}) + f"\n{{{secret}\n")
    for name in ("mixed.jsonl", "broken.jsonl"):
        path = write_run(
            folder, name=name.removesuffix(".jsonl"), data={"train": str(folder / name)}
        )
        assert "secret" not in fails(3, "train", path)


# -- the machine ----------------------------------------------------------------------------------


def test_no_permission_to_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    path = write_run(folder)
    monkeypatch.setattr(Path, "mkdir", refuse)
    message = fails(2, "train", path)
    assert f"'{folder / 'runs' / 'run'}' cannot be written or read (Permission denied)" in message
    assert "output_dir" in message


def test_a_file_where_the_folder_should_be(folder: Path) -> None:
    path = write_run(folder, output_dir=str(folder / "documents.jsonl"))
    assert "Not a directory" in fails(2, "train", path)
    arguments = ("--members", folder / "documents.jsonl", "audit.continuation_tokens=8")
    message = fails(
        2, "audit", "--model", folder / "model", "--out", folder / "run.yaml", *arguments
    )
    assert "Not a directory" in message


@pytest.mark.quick
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        # What safetensors makes of it.
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["ours", "a library's"],
)
def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("memguard.workflows.training.train.export_model", fail)
    path = write_run(folder, train={"max_steps": 1}, audit={"enabled": False})
    assert "the disk is full; files saved before are intact" in fails(1, "train", path)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EIO, "Input/output error", "a/b"), "'a/b' cannot be read or written: Input"),
        (OSError(errno.ESTALE, "Stale file handle"), "a file cannot be read or written: Stale"),
        (OSError(errno.EFBIG, "File too large", "m"), "'m' cannot be read or written: File too l"),
        (OSError(errno.EIO, "checkpoint x could not be written: y"), "checkpoint x could not be"),
    ],
)
def test_a_failing_file_system(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, line: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(training_data, "prepare", fail)
    message = fails(1, "train", write_run(folder)).splitlines()[-1]
    assert line in message
    assert "Check the disk or file system, and run the same command again" in message


def test_out_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(setup, "load_model", fail)
    message = fails(1, "train", write_run(folder))
    assert "out of memory while the model was loaded: use a machine with more memory" in message
    assert "micro_batch_size" not in message, "it would not help"


def test_out_of_memory_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(training_data, "prepare", fail)
    assert "an audit needs less with a lower 'audit.batch_tokens'" in fails(
        1, "train", write_run(folder)
    )


def test_mistakes_of_ours_show_where(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(training_data, "prepare", fail)
    outcome = run_cli("train", write_run(folder))
    assert outcome.code == 1
    assert "Traceback" in outcome.err
    assert "this is a bug in memguard" in outcome.err


def test_interrupted_while_preparing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    path = write_run(folder, train={"max_steps": 1}, audit={"enabled": False})
    with monkeypatch.context() as patched:
        patched.setattr(training_data, "prepare", interrupt)
        assert "run the same command again to resume" in fails(130, "train", path)
    assert run_cli("train", path).code == 0


@pytest.mark.parametrize("at", [0, 3], ids=["before the first step", "after the last one"])
def test_asked_to_stop_outside_the_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    from memguard.train.heldout import HeldoutLoss

    real = HeldoutLoss.measure

    def measure(heldout: HeldoutLoss, step: int) -> Any:
        if step == at:
            # Twice, as a launcher does that passes on what the terminal has sent already.
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        return real(heldout, step)

    path = write_run(folder, train={"max_steps": 3}, audit={"enabled": False})
    with monkeypatch.context() as patched:
        patched.setattr(HeldoutLoss, "measure", measure)
        message = fails(143, "train", path)
    assert f"stopped after step {at or 1} of 3 and saved" in message
    run = folder / "runs" / "run"
    assert not (run / "model").exists()
    outcome = run_cli("train", path)
    assert outcome.code == 0, outcome.err
    assert f"resuming after step {at or 1} of 3" in outcome.err
    assert (run / "model" / "model.safetensors").exists()


def test_two_processes_in_one_folder(folder: Path) -> None:
    from memguard.workflows.common.folder import locked

    path = write_run(folder)
    with locked(folder / "runs" / "run"):
        assert "another process is using" in fails(2, "train", path)
        assert "another process is using" in fails(2, "prepare", path)


def test_what_a_killed_process_was_writing_is_cleared(folder: Path) -> None:
    left = folder / "runs" / "run" / ".memguard-tmp-model.abc12_45"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    assert run_cli("prepare", write_run(folder)).code == 0
    assert not left.exists()


@pytest.mark.parametrize("arguments", [["init"], ["init", "--schema"], ["--help"]])
def test_a_reader_that_leaves_is_told_nothing(arguments: list[str]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "memguard", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    message = child.stderr.read()
    child.stderr.close()
    # Not 0: what was asked for did not arrive.
    assert (child.wait(), message) == (1, b"")


def test_an_ascii_terminal_gets_help_all_the_same() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "memguard", "audit", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"--members" in ended.stdout


# -- init -----------------------------------------------------------------------------------------


def test_what_init_writes_says_what_to_fill_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_cli("init", "new/run.yaml")
    assert outcome.code == 0
    assert "fill in 'model.path' and 'data.train'" in outcome.out
    assert "there is no folder 'path/to/checkpoint'" in fails(3, "train", "new/run.yaml")
    before = Path("new/run.yaml").read_text()
    assert "exists already" in fails(2, "init", "new/run.yaml")
    assert Path("new/run.yaml").read_text() == before


def test_what_init_writes_trains_once_it_is_filled_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run_cli("init", "new.yaml").code == 0
    changes = ("model.path=model", "data.seq_len=128", "train.max_steps=2", "audit.enabled=false")
    outcome = run_cli("train", "new.yaml", *changes, "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == {"run": "runs/my-run", "model": "runs/my-run/model"}


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["train", "no.yaml"], 2)])
def test_a_rank_ends_without_finalizing_python(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    """A thread of gloo that frees a tensor during finalization aborts the process."""
    program = (
        "import atexit, os, memguard.cli\n"
        "atexit.register(lambda: os._exit(99))\n"
        "print('before')\n"
        "memguard.cli.main()\n"
    )
    done = {}
    for rank in (None, "0"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if rank is not None:
            environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "1"}
        done[rank] = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done[None].returncode == 99
    assert done["0"].returncode == code, done["0"].stderr
    assert done["0"].stdout.startswith("before\n")
    assert done["0"].stdout == done[None].stdout
    assert done["0"].stderr == done[None].stderr
