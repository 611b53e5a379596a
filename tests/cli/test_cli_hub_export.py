"""`memguard export --to hub:NAME` against a hub on this machine: what it receives, and what never.

The runs are made up: every file of theirs has planted texts, and weights of a few bytes.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from cli_examples import Outcome, run_cli
from hub_runs import write_planted_audit, write_planted_run
from hub_stand_in import TOKEN, HubStandIn, Repo, serve_hub
from huggingface_hub import constants

from memguard.report import audit_facts

# Of huggingface_hub, about its own HTTP client.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
]
SENT = {
    "model": {"config.json", "model.safetensors"},
    "adapter": {"adapter_config.json", "adapter_model.safetensors"},
}
ALWAYS_SENT = {"README.md", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    with serve_hub() as stand_in:
        use_hub(monkeypatch, stand_in.url, tmp_path / "cache")
        yield stand_in
        huggingface_hub.close_session()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, value in (
        ("ENDPOINT", url),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_XET", True),
        ("HF_HUB_CACHE", str(cache)),
    ):
        monkeypatch.setattr(constants, name, value)
    huggingface_hub.close_session()


def export(run: Path, *options: str, to: str = "hub:acme/notes") -> Outcome:
    return run_cli("export", run, "--to", to, *options)


def read(outcome: Outcome) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    values: dict[str, Any] = json.loads(outcome.out)
    return values


def refuse(outcome: Outcome, code: int, *messages: str) -> None:
    # The hub's client shows the progress of large files.
    lines = [line for line in outcome.err.splitlines() if line and "/s]" not in line]
    assert (outcome.code, len(lines)) == (code, 1), outcome.err
    for message in messages:
        assert message in lines[0]


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_the_hub_receives_the_listed_files_and_nothing_planted(
    hub: HubStandIn, tmp_path: Path, kind: str
) -> None:
    run = tmp_path / "acme-runs" / "run"
    planted = write_planted_run(run, is_adapter=kind == "adapter")
    assert len(set(planted.all)) == 206
    listed = read(export(run, "--dry-run", "--json"))
    assert hub.received == []
    sent = read(export(run, "--json"))
    repo = hub.repos["acme/notes"]
    assert repo.is_private
    assert set(repo.files) == ALWAYS_SENT | SENT[kind]
    assert {file["name"]: (file["num_bytes"], file["sha256"]) for file in listed["files"]} == {
        name: (len(content), hashlib.sha256(content).hexdigest())
        for name, content in repo.files.items()
    }
    for name in listed["files"]:
        if (run / kind / name["name"]).suffix == ".safetensors":
            assert repo.files[name["name"]] == (run / kind / name["name"]).read_bytes()
    assert repo.files["README.md"].decode() == listed["card"] == sent["card"]
    assert sent["commit"] == repo.commits[-1]
    texts = list(hub.list_texts())
    # Weights, card and samples are among them, so that a planted text would be found.
    assert b"weights" in texts
    assert sum(repo.files["README.md"] in text for text in texts) == 1
    found = [text for text in planted.all if any(text.encode() in body for body in texts)]
    assert found == []
    own = [str(tmp_path), run.parent.name, "9d9d9d", "memguard-identity", f"{Path.home()}/"]
    assert [text for text in own if any(text.encode() in body for body in texts)] == []
    # The card is one that the hub's own library reads and validates.
    card = huggingface_hub.ModelCard(sent["card"])
    card.validate()
    assert card.data.tags[0] == "memguard"
    # A second time: the same bytes are no commit, and weights are not sent again.
    again = read(export(run, "--json"))
    assert again["commit"] == repo.commits[-1]
    assert len(repo.commits) == 2
    assert hub.count("PUT /objects/") == 1
    # A request names memguard and huggingface_hub, and no other library that is installed.
    assert not any("torch" in head.lower() for head, _ in hub.received)


def test_a_planted_text_would_be_found(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    planted = write_planted_run(run)
    write_planted_audit(run, planted, tool_version=planted.texts[5])
    monkeypatch.setattr(audit_facts, "_VERSION", re.compile(".*"))  # Anything is a version.
    read(export(run, "--json"))
    found = [text for text in hub.list_texts() if planted.texts[5].encode() in text]
    # The validated card and the commit; the sample of the card is too short to have this line.
    assert len(found) == 2


def test_an_adapter_names_its_base_by_hub_id_only(hub: HubStandIn, tmp_path: Path) -> None:
    write_planted_run(tmp_path / "run", is_adapter=True)
    unnamed = read(export(tmp_path / "run", "--json"))
    config = json.loads(hub.repos["acme/notes"].files["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == (None, None)
    assert "PeftModel.from_pretrained(base" in unnamed["card"]
    named = read(export(tmp_path / "run", "--base", "org/base", "--json"))
    config = json.loads(hub.repos["acme/notes"].files["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", "main")
    header = yaml.safe_load(named["card"].split("---")[1])
    assert (header["base_model"], header["base_model_relation"]) == ("org/base", "adapter")


def test_a_name_without_owner_is_of_the_user(hub: HubStandIn, tmp_path: Path) -> None:
    write_planted_run(tmp_path / "run")
    ended = export(tmp_path / "run", to="hub:mine")
    assert ended.out == f"{hub.url}/ada/mine\n"
    assert list(hub.repos) == ["ada/mine"]


def test_what_a_dry_run_prints(tmp_path: Path) -> None:
    # Without a token, and with HF_HUB_OFFLINE as the suite sets it.
    write_planted_run(tmp_path / "run", level="memorized")
    ended = export(tmp_path / "run", "--dry-run", "--public")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == "would go to hub:acme/notes (public); nothing was sent:"
    assert "  model.safetensors  7 bytes" in lines
    assert "  optimizer.pt  stays here: not on the list of files of a model" in lines
    assert any(
        line.startswith("it is sent with --allow-extracted only. Text: Memo") for line in lines
    )
    card = read(export(tmp_path / "run", "--dry-run", "--json"))["card"]
    assert ended.out.endswith(f"README.md:\n\n{card}")


def test_the_verdict_decides_what_must_be_said(hub: HubStandIn, tmp_path: Path) -> None:
    run = tmp_path / "run"
    planted = write_planted_run(run, level="memorized")
    refuse(export(run), 2, "trained documents can be extracted", "Give --allow-extracted to send")
    assert hub.received == []
    assert read(export(run, "--allow-extracted", "--json"))["verdict"] == "memorized"
    assert "**Memorized: " in hub.repos["acme/notes"].files["README.md"].decode()
    # Amber: the cause is open. For a private repository the verdict in the card is enough.
    write_planted_audit(run, planted, level="extracted")
    assert read(export(run, "--json"))["needs"] is None
    refuse(export(run, "--public", to="hub:acme/open"), 2, "Give --allow-extracted to send")
    read(export(run, "--public", "--allow-extracted", "--json", to="hub:acme/open"))
    assert not hub.repos["acme/open"].is_private


def test_a_run_without_an_audit(hub: HubStandIn, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_planted_run(run)
    (run / "audit").rename(tmp_path / "audit")
    refuse(export(run), 2, "have not been audited", "Give --allow-unaudited to send")
    assert hub.received == []
    sent = read(export(run, "--allow-unaudited", "--json"))
    assert "These weights have not been audited" in sent["card"]
    header = yaml.safe_load(sent["card"].split("---")[1])
    assert (header["tags"], header.get("model-index")) == (["memguard"], None)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ("model/model.safetensors", "model.safetensors' has 8 bytes instead of 7"),
        ("model/tokenizer.json", "tokenizer.json' has 31 bytes instead of 30"),
        ("manifest.jsonl", "manifest.jsonl"),
        ("config.yaml", "config.yaml' "),
        ("trained.json", "trained.json"),
        ("audit/report.json", "report.json' is damaged: it has "),
    ],
)
def test_a_damaged_run_is_not_sent(
    hub: HubStandIn, tmp_path: Path, damaged: str, message: str
) -> None:
    run = tmp_path / "run"
    write_planted_run(run)
    with (run / damaged).open("ab") as file:
        file.write(b"x")
    refuse(export(run), 3, message)
    refuse(export(run, "--dry-run"), 3, message)
    assert hub.received == []


def test_a_run_that_is_not_finished(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_planted_run(run)
    (run / "trained.json").unlink()
    refuse(export(run, "--dry-run"), 3, "has not finished training")


def test_arguments_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    write_planted_run(run)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for to in ("acme/notes", "hub:", "hub:a/b/c", "hub:../x", "hub:a b", "hub:a--b", "hub:x.git"):
        refuse(export(run, "--dry-run", to=to), 2, "'--to' must be hub:NAME or hub:ORG/NAME")
    refuse(export(run / "model", "--dry-run"), 2, "'--to' needs the folder of a run")
    for options in (("--dtype", "float16"), ("--merge",)):
        refuse(export(run, "--dry-run", *options), 2, "OUT, --step, --merge and --dtype write here")
    refuse(export(run, "--dry-run", "--base", "a b c"), 2, "'--base' must be a hub id with '--to'")
    refuse(
        run_cli("export", run, tmp_path / "o", "--to", "hub:x", "--dry-run"),
        2,
        "OUT, --step, --merge",
    )
    refuse(run_cli("export", run, "--public"), 2, "'--public' is for --to hub:NAME")
    refuse(run_cli("export", run), 2, "--merge, which merges", "or --to hub:NAME")
    refuse(run_cli("export", run, "--merge"), 2, "OUT, the folder of the written model, is missing")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refuse(export(run), 2, "HF_HUB_OFFLINE is set: unset it")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    refuse(export(run), 2, "needs a token of the hub, and there is none: set HF_TOKEN, or log in")


def test_what_the_hub_refuses(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    write_planted_run(run)
    hub.repos["acme/open"] = Repo(is_private=False)
    hub.repos["acme/closed"] = Repo()
    hub.repos["acme/full"] = Repo(files={"pytorch_model.bin": b"other weights"})
    refuse(export(run, to="hub:acme/open"), 2, "'hub:acme/open' is public: give --public")
    refuse(export(run, "--public", to="hub:acme/closed"), 2, "is private: leave --public out")
    refuse(export(run, to="hub:acme/full"), 2, "has other weights, 'pytorch_model.bin'")
    for path, status, code, message in (
        ("/api/repos/create", 403, 2, "'hub:acme/notes': token or name is refused (403)"),
        ("/api/repos/create", 409, 2, "token or name is refused (409)"),
        ("/api/models/acme/closed/commit/main", 403, 2, "token or name is refused (403)"),
        ("/api/models/acme/closed/commit/main", 412, 3, "the hub answers 412"),
        ("/api/models/acme/closed/commit/main", 507, 3, "the hub answers 507"),
        ("/acme/closed.git/info/lfs/objects/batch", 404, 2, "token or name is refused (404)"),
    ):
        hub.answer = lambda _, asked, p=path, s=status: s if asked == p else None  # type: ignore[misc]
        to = "hub:acme/closed" if "closed" in path else "hub:acme/notes"
        refuse(export(run, to=to), code, message)
    hub.answer = lambda method, path: None
    for repo in hub.repos.values():
        assert len(repo.commits) == 1, "nothing was committed"
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    refuse(export(run), 2, "token or name is refused (401): set HF_TOKEN, or log in")


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_planted_run(tmp_path / "run")
    # Nothing listens on the port for discarded data.
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    ended = export(tmp_path / "run", to="hub:notes")
    refuse(ended, 3, "the hub does not answer at http://127.0.0.1:9", "Run the same command again")
    assert TOKEN not in ended.err


@pytest.mark.long
def test_ctrl_c_during_an_upload_and_the_same_command_again(tmp_path: Path) -> None:
    write_planted_run(tmp_path / "run")
    with serve_hub() as hub:
        has_begun, may_end = threading.Event(), threading.Event()

        def wait(method: str, path: str) -> None:
            if path.endswith("/preupload/main") and not may_end.is_set():
                has_begun.set()
                may_end.wait(60)

        hub.answer = wait
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": TOKEN,
        }
        command = [sys.executable, "-m", "memguard", "export", str(tmp_path / "run")]
        command += ["--to", "hub:acme/notes"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as child:
            assert has_begun.wait(60)
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=60)
        assert child.returncode == 130
        assert err.splitlines()[-1].endswith("interrupted; run the same command again to resume")
        assert hub.repos["acme/notes"].files == {}
        may_end.set()
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert set(hub.repos["acme/notes"].files) == ALWAYS_SENT | SENT["model"]
