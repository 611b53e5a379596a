"""`memguard bundle`, and `memguard verify` of a bundle: what is said, refused, and inside."""

import base64
import fcntl
import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from bundle_examples import make_report, make_rows, write_audit, write_audited_run, write_gate
from cli_examples import Outcome, read_json, run_cli, succeed
from damage import cut, flip_byte

from memguard.hf.identity import hash_sums, hash_weights
from memguard.records.audit_files import save_audit_files
from memguard.records.run_files import PreparedSummary, load_trained, sum_trained
from memguard.records.sealed import load_sealed, save_sealed, sum_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `run/`."""
    folder = tmp_path_factory.mktemp("made")
    write_audited_run(folder / "run")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run, to change."""
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def get_error(ended: Outcome) -> str:
    assert "Traceback" not in ended.err
    return ended.err.splitlines()[-1]


# -- what is written, and what is said ------------------------------------------------------------


@pytest.mark.quick
def test_two_bundles_of_a_run_are_equal(made: Path, run: Path, tmp_path: Path) -> None:
    for name, folder in (("one.zip", made / "run"), ("two.zip", run)):
        succeed("bundle", folder, tmp_path / name)
    one = (tmp_path / "one.zip").read_bytes()
    # A copy of the run in another place, with other times.
    assert one == (tmp_path / "two.zip").read_bytes()
    assert (tmp_path / "one.zip").stat().st_mode & 0o077 == 0o044


def test_what_hashes_show_is_said(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    written = succeed("bundle", made / "run", out)
    verified = succeed("verify", out)
    for ended in (written, verified):
        lines = ended.out.splitlines()
        assert lines[0].startswith(f"{out}: ")
        assert lines[1] == (
            "audit of run: Inconclusive. 2 of 4 documents were extracted, too few to decide."
        )
        assert lines[2].startswith(
            "the hashes show damage, not forgery, since anyone can write another bundle"
        )
        assert "PRIVATE" not in ended.out
    assert "8 files, " in written.out
    assert verified.out.splitlines()[0].startswith(f"{out}: intact; 8 files, ")
    # Paths of the machine are not handed on, and that is said.
    assert "bundle: paths in config.yaml are shortened: secret/data.jsonl" in written.err
    assert b"/home" not in out.read_bytes()
    assert b"ada/" not in out.read_bytes()


def test_results_are_told_as_json(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    told = json.loads(succeed("bundle", made / "run", out, "--json").out)
    with zipfile.ZipFile(out) as reader:
        sizes = {info.filename: info.file_size for info in reader.infolist()}
        statement = json.loads(reader.read("statement.json"))
    assert told["num_bytes"] == out.stat().st_size
    assert {name: member["num_bytes"] for name, member in told["members"].items()} == sizes
    assert told["has_private_records"] is False
    assert len(told["notes"]) == 1
    verified = json.loads(succeed("verify", out, "--json").out)
    shared = told.keys() & verified.keys()
    assert {name: verified[name] for name in shared} == {name: told[name] for name in shared}
    assert verified["intact"] is True
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicate"]["schema"] == "memguard.evidence/3"
    assert {subject["name"] for subject in statement["subject"]} == sizes.keys() - {
        "statement.json"
    }


def test_hashes_are_those_of_the_run(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    succeed("bundle", made / "run", out)
    with zipfile.ZipFile(out) as reader:
        evidence = json.loads(reader.read("statement.json"))["predicate"]
        for name in ("report.json", "report.html", "results.parquet"):
            assert reader.read(name) == (made / "run" / "audit" / name).read_bytes()
        environment = json.loads(reader.read("environment.json"))
    trained = read_json(made / "run" / "trained.json")
    report = read_json(made / "run" / "audit" / "report.json")
    audit = read_json(made / "run" / "audit" / "audit.json")
    assert evidence["sources"]["files"] == trained["model"]
    assert evidence["model"]["weights_sha256"] == report["model"]["weights_sha256"]
    assert evidence["sources"]["manifest_sha256"] == trained["manifest"]["sha256"]
    assert evidence["data"]["documents_sha256"] == report["data"]["documents_sha256"]
    assert evidence["sources"]["scores_sha256"] == audit["files"]["records.parquet"]["sha256"]
    assert environment == {
        "audit": report["environment"],
        "training": read_json(made / "run" / "environment.json"),
    }


def test_private_records_are_announced_everywhere(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    written = succeed("bundle", made / "run", out, "--with-records")
    assert out.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(out) as reader:
        assert reader.namelist()[0] == "README.txt"
        page = " ".join(reader.read("README.txt").decode().split())
        records = reader.read("records.parquet")
    assert records == (made / "run" / "audit" / "records.parquet").read_bytes()
    for text in (page, written.out, succeed("verify", out).out):
        assert "PRIVATE: records.parquet, the scores of each document, is inside." in text
    assert json.loads(succeed("verify", out, "--json").out)["has_private_records"] is True
    succeed("bundle", made / "run", tmp_path / "plain.zip")
    with zipfile.ZipFile(tmp_path / "plain.zip") as reader:
        assert "PRIVATE" not in reader.read("README.txt").decode()


def test_an_audit_without_a_run_is_bundled(tmp_path: Path) -> None:
    report = make_report("hub id a/b, not hashed", run=None)
    audit = write_audit(tmp_path / "audit", report, make_rows())
    succeed("bundle", audit, tmp_path / "out.zip")
    with zipfile.ZipFile(tmp_path / "out.zip") as reader:
        assert "config.yaml" not in reader.namelist()
        evidence = json.loads(reader.read("statement.json"))["predicate"]
        assert json.loads(reader.read("environment.json"))["training"] is None
    assert evidence["sources"]["files"] is None
    assert evidence["sources"]["config_sha256"] is None
    assert evidence["audit"] == "run"
    succeed("verify", tmp_path / "out.zip")


def test_neither_command_imports_torch(made: Path, bare: Any, tmp_path: Path) -> None:
    written = bare("bundle", made / "run", "out.zip")
    assert written.returncode == 0, written.stderr
    verified = bare("verify", "out.zip")
    assert verified.returncode == 0, verified.stderr
    assert "out.zip: intact; 8 files" in verified.stdout


# -- the gate's result ----------------------------------------------------------------------------


def test_the_result_of_a_gate_is_inside_with_its_policy(run: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("gate: []\n")
    write_gate(run / "gate", run / "audit" / "report.json", policy.read_text())
    succeed("bundle", run, tmp_path / "out.zip")
    succeed("verify", tmp_path / "out.zip")
    with zipfile.ZipFile(tmp_path / "out.zip") as reader:
        names = [name for name in reader.namelist() if name.startswith("gate/")]
        assert json.loads(reader.read("gate/gate.json"))["policy"] == policy.read_text()
        page = " ".join(reader.read("README.txt").decode().split())
    assert len(names) == 4
    # A pass is shown beside the verdict.
    assert "Verdict: Inconclusive." in page
    assert "Policy: pass; 1 of 1 rules pass. The verdict above does not depend on it." in page


def test_a_gate_in_another_folder_is_named(run: Path, tmp_path: Path) -> None:
    gate = write_gate(tmp_path / "judged", run / "audit" / "report.json")
    succeed("bundle", run, tmp_path / "out.zip", "--gate", gate)
    with zipfile.ZipFile(tmp_path / "out.zip") as reader:
        assert "gate/gate.json" in reader.namelist()
    missing = run_cli("bundle", run, tmp_path / "other.zip", "--gate", tmp_path)
    assert missing.code == 2
    assert "has no gate.json" in get_error(missing)


def test_an_older_gate_is_left_out_and_a_damaged_one_is_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "report.json"
    other.write_text("{}")
    write_gate(run / "gate", other)
    outcome = succeed("bundle", run, tmp_path / "without.zip")
    assert "gate/ is not packed: it is older than this audit" in outcome.out + outcome.err
    with zipfile.ZipFile(tmp_path / "without.zip") as reader:
        assert "gate/gate.json" not in reader.namelist()
    named = run_cli("bundle", run, tmp_path / "out.zip", "--gate", run / "gate")
    assert named.code == 3
    assert "is older than this audit" in get_error(named)
    shutil.rmtree(run / "gate")
    write_gate(run / "gate", run / "audit" / "report.json")
    for name in ("report.html", "gate.json", "junit.xml"):
        content = (run / "gate" / name).read_bytes()
        flip_byte(run / "gate" / name)
        damaged = run_cli("bundle", run, tmp_path / "out.zip")
        assert damaged.code == 3, name
        assert f"/gate/{name}' is" in get_error(damaged)
        (run / "gate" / name).write_bytes(content)
    assert not (tmp_path / "out.zip").exists()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("there.zip", "exists: name another file"),
        ("link.zip", "exists: name another file"),
        ("out.tar", "must end in .zip"),
        ("run/out.zip", "must be outside"),
        ("run/audit/out.zip", "must be outside"),
        ("other/model/out.zip", "must not be in model/ of a run"),
    ],
)
def test_a_file_that_may_not_be_written_is_refused(
    run: Path, tmp_path: Path, out: str, message: str
) -> None:
    (tmp_path / "there.zip").write_text("mine")
    (tmp_path / "link.zip").symlink_to("nowhere")
    shutil.copytree(run, tmp_path / "other")
    refused = run_cli("bundle", run, tmp_path / out)
    assert refused.code == 2
    assert message in get_error(refused)
    assert (tmp_path / "there.zip").read_text() == "mine"


def test_what_is_no_run_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, message in (
        (tmp_path / "empty", "is neither the folder of a run"),
        (tmp_path / "none", "is neither the folder of a run"),
        (run / "audit", f"is the audit of a run: give the run, '{run}'"),
    ):
        refused = run_cli("bundle", folder, tmp_path / "out.zip")
        assert refused.code == 2
        assert message in get_error(refused)


def test_a_run_that_is_in_use_is_refused(run: Path, tmp_path: Path) -> None:
    with (run / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = run_cli("bundle", run, tmp_path / "out.zip")
    assert refused.code == 2
    assert "another process is using" in get_error(refused)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.yaml", flip_byte),
        ("config.yaml", Path.unlink),
        ("manifest.jsonl", flip_byte),
        ("metrics.jsonl", cut),
        ("trained.json", flip_byte),
        ("trained.json", Path.unlink),
        ("prepared/summary.json", flip_byte),
        ("prepared/input_ids.npy", flip_byte),
        ("model/model.safetensors", flip_byte),
        ("model/README.md", flip_byte),
        ("audit/audit.json", flip_byte),
        ("audit/report.json", flip_byte),
        ("audit/report.html", cut),
        ("audit/results.parquet", flip_byte),
        ("audit/records.parquet", flip_byte),
        ("audit/findings.csv", Path.unlink),
    ],
)
def test_damage_is_refused(
    run: Path, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    change(run / name)
    refused = run_cli("bundle", run, tmp_path / "out.zip")
    assert refused.code == 3, refused.err
    # Without its record, the run has not finished training.
    is_trained = (run / "trained.json").exists()
    assert (name if is_trained else "has not finished training") in get_error(refused)
    assert not (tmp_path / "out.zip").exists()


def test_a_run_without_an_audit_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "audit")
    refused = run_cli("bundle", run, tmp_path / "out.zip")
    assert refused.code == 3
    assert "did not end (no audit.json). Run 'memguard audit' again" in get_error(refused)


def test_an_audit_of_other_weights_or_documents_is_refused(run: Path, tmp_path: Path) -> None:
    (run / "model" / "model.safetensors").write_bytes(b"trained further")
    save_sealed(sum_trained(run, run_key="k", step=2), run / "trained.json")
    refused = run_cli("bundle", run, tmp_path / "out.zip")
    assert refused.code == 3
    assert "is of other weights than those of the run. Run 'memguard audit" in get_error(refused)
    audit = run / "audit"
    text = (audit / "report.json").read_text()
    old = read_json(audit / "report.json")["model"]["weights_sha256"]
    text = text.replace(old, hash_weights(run / "model")).replace("9d" * 32, "9e" * 32)
    (audit / "report.json").write_text(text)
    save_audit_files(audit, has_card=True)
    refused = run_cli("bundle", run, tmp_path / "out.zip")
    assert refused.code == 3
    assert "is of other documents than those of the run" in get_error(refused)


def test_an_adapter_is_identified_with_its_base(run: Path, tmp_path: Path) -> None:
    """Its hash is that of a folder that has the base's files in `base/`."""
    (run / "model").rename(run / "adapter")
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        (run / "adapter" / name).write_text(f"{{{name}}}")
    for name in ("config.json", "model.safetensors"):
        (run / "adapter" / name).rename(tmp_path / name)
    base = {name: sum_file(tmp_path / name) for name in ("config.json", "model.safetensors")}
    save_sealed(sum_trained(run, run_key="k", step=1, base=base), run / "trained.json")
    own = ("adapter_config.json", "adapter_model.safetensors")
    sums = {name: sum_file(run / "adapter" / name) for name in own}
    expected = hash_sums(sums | {f"base/{name}": item for name, item in base.items()})
    shutil.rmtree(run / "audit")
    write_audit(run / "audit", make_report(expected), make_rows(), has_card=True)
    succeed("bundle", run, tmp_path / "out.zip")
    with zipfile.ZipFile(tmp_path / "out.zip") as reader:
        sources = json.loads(reader.read("statement.json"))["predicate"]["sources"]
    assert sources["files"].keys() == load_trained(run).model.keys()
    assert sources["adapted_files"].keys() == base.keys()


def test_a_damaged_bundle_ends_with_3_and_one_line(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    succeed("bundle", made / "run", out)
    flip_byte(out)
    for words in ((), ("--json",)):
        damaged = run_cli("verify", out, *words)
        assert (damaged.code, damaged.out) == (3, "")
        assert damaged.err.startswith(f"memguard: '{out}' is damaged: ")
        assert damaged.err.count("\n") == 1
    missing = run_cli("verify", tmp_path / "none.zip")
    assert missing.code == 3
    assert "No such file" in get_error(missing)


def test_options_of_the_other_kind_are_refused(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    succeed("bundle", made / "run", out)
    refused = run_cli("verify", out, "--base", "b")
    assert refused.code == 2
    assert "'--base' is for a run" in get_error(refused)


# -- what is not inside ---------------------------------------------------------------------------

NUM_SECRETS = 664
PRIVATE_FILES = (
    *("audit/findings.csv", "audit/canaries.parquet", "audit/private/excerpts.txt"),
    *("audit/private/hmac.key", "audit/private/forget.jsonl", "audit/plugins.log"),
    *("prepared/input_ids.npy", "prepared/offsets.npy", "reference_nll.npy", "reference_nll.json"),
    *("checkpoints/step-00000001/rank.distcp", "checkpoints/step-00000001/metrics.jsonl"),
    *("metrics.jsonl", "train.log", "requested.yaml", "finished.json", "model/model.safetensors"),
    *("model/README.md", "memguard-identity.key", "notes.txt"),
)


def list_forms(secret: str) -> list[bytes]:
    """Return what a secret may look like in a file."""
    plain = secret.encode()
    return [
        plain,
        secret.upper().encode(),
        plain[::-1],
        secret.encode("utf-16-le"),
        plain.hex().encode(),
        base64.b64encode(plain).rstrip(b"=")[:-2],
    ]


def find_secrets(secrets: Iterable[str], contents: Iterable[bytes]) -> set[str]:
    everything = b"\n".join(contents)
    return {secret for secret in secrets if any(f in everything for f in list_forms(secret))}


def read_all(paths: Iterable[Path]) -> list[bytes]:
    """Return the bytes of files, and the rows of tables."""
    contents = []
    for path in paths:
        contents.append(path.read_bytes())
        if path.suffix == ".parquet" and contents[-1][:4] == b"PAR1":
            rows = pyarrow.parquet.read_table(path).to_pylist()
            contents.append(json.dumps(rows).encode())
    return contents


def test_no_planted_secret_is_inside(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    secrets = [bytes(draw.integers(97, 123, 12).tolist()).decode() for _ in range(NUM_SECRETS)]
    assert len(set(secrets)) == NUM_SECRETS
    unused = iter(secrets)
    # In the records: an id of the user's, the name of a file, and in each number of a score.
    rows = [
        {
            **row,
            "id": next(unused),
            "source": next(unused),
            "extraction.greedy": next(unused),
            "extraction.logprob": -float(number) - 0.123456789,
        }
        for number, row in enumerate(make_rows(96))
    ]
    in_records = secrets[: 3 * len(rows)]
    run = write_audited_run(tmp_path / "run", rows, data=f"/home/{next(unused)}/a/data.jsonl")
    others = list(unused)
    for number, name in enumerate(PRIVATE_FILES):
        own = others[number :: len(PRIVATE_FILES)]
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(own))
    reseal(run)
    # The search finds all of them in the run.
    assert find_secrets(secrets, read_all(p for p in run.rglob("*") if p.is_file())) == {*secrets}
    found: dict[str, set[str]] = {}
    for name, options in (("plain", ()), ("records", ("--with-records",))):
        succeed("bundle", run, tmp_path / f"{name}.zip", *options)
        with zipfile.ZipFile(tmp_path / f"{name}.zip") as reader:
            reader.extractall(tmp_path / name)
        members = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        contents = [(tmp_path / f"{name}.zip").read_bytes(), *read_all(members)]
        found[name] = find_secrets(secrets, contents)
        scores = b"".join(contents)
        has_score = struct.pack("<d", rows[7]["extraction.logprob"]) in scores
        assert (has_score or b"7.123456789" in scores) == (name == "records")
    assert found == {"plain": set(), "records": {*in_records}}


def reseal(run: Path) -> None:
    """Write the hashes of a run's changed files."""
    summary = load_sealed(PreparedSummary, run / "prepared" / "summary.json")
    arrays = {path.name: sum_file(path) for path in sorted((run / "prepared").glob("*.npy"))}
    save_sealed(summary.model_copy(update={"arrays": arrays}), run / "prepared" / "summary.json")
    save_sealed(sum_trained(run, run_key="k", step=1), run / "trained.json")
    path = run / "audit" / "report.json"
    old = read_json(path)["model"]["weights_sha256"]
    path.write_text(path.read_text().replace(old, hash_weights(run / "model")))
    save_audit_files(run / "audit", has_card=True)
