"""`memguard compare`: a small sweep, killed and interrupted on its way, ends as if it had not."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_examples import Outcome, read_json, run_cli, write_sweep, write_texts
from damage import cut, flip_byte
from gate_checks import check_rates
from preloaded import PreloadedChild
from ranks import RankPool

from memguard.records import load_manifest
from memguard.records.comparison import load_comparison
from memguard.runtime import children
from memguard.train.metrics import StepMetrics, read_metrics

pytestmark = pytest.mark.slow

Child = subprocess.Popen[Any] | PreloadedChild


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A finished sweep and how the calls before the last one ended."""

    file: Path
    folder: Path
    killed: Outcome
    interrupted: Outcome


SETTINGS: list[dict[str, Any]] = [
    {"name": "none"},
    {"name": "k2", "mitigations": [{"name": "goldfish", "k": 2}]},
]


def count_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"event":"step"') if path.exists() else 0


@contextmanager
def watched(
    run: Path, steps: int, act: Callable[[Child], None], start: Callable[..., Child]
) -> Iterator[None]:
    """Let ``act`` happen to the child process as soon as the run has taken so many steps."""
    started: list[Child] = []

    def remember(*arguments: Any, **how: Any) -> Child:
        started.append(start(*arguments, **how))
        return started[-1]

    def monitor() -> None:
        for _ in range(2400):
            if count_steps(run) >= steps:
                act(started[-1])
                return
            time.sleep(0.025)

    watcher = threading.Thread(target=monitor)
    with mock.patch.object(children.subprocess, "Popen", remember):
        watcher.start()
        yield
        watcher.join()


def interrupt(child: Child) -> None:
    # What a terminal does to its foreground group.
    child.send_signal(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


def kill(child: Child) -> None:
    child.kill()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(PreloadedChild, id="forks"),
        pytest.param(subprocess.Popen, id="processes", marks=pytest.mark.long),
    ],
)
def sweep(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Sweep:
    start: Callable[..., Child] = request.param
    folder = tmp_path_factory.mktemp("sweep")
    write_texts(folder / "texts.jsonl", 50, words=30)
    file = write_sweep(
        folder,
        SETTINGS,
        num_repetitions=[0, 1, 30],
        optim={"lr": 8e-3},
        train={"batch_size": 4, "checkpoint_every_steps": 10},
    )
    none = folder / "small" / "none"
    with watched(none, 12, kill, start):
        killed = run_cli("compare", file)
    assert count_steps(none) >= 12, killed.err
    with watched(none, count_steps(none) + 12, interrupt, start):
        interrupted = run_cli("compare", file)
    with mock.patch.object(children.subprocess, "Popen", start):
        finished = run_cli("compare", file)
    assert finished.code == 0, finished.err
    assert finished.out.strip() == str(folder / "small" / "comparison.html")
    assert "1 of 3 runs already finished: base" in finished.err
    assert "1 of 3 runs resume: none" in finished.err
    return Sweep(file=file, folder=folder / "small", killed=killed, interrupted=interrupted)


def test_a_killed_child_is_told(sweep: Sweep) -> None:
    assert (sweep.killed.code, sweep.killed.out) == (1, "")
    assert "none was killed by SIGKILL (out of memory?)" in sweep.killed.err


def test_an_interrupted_sweep_says_how_to_go_on(sweep: Sweep) -> None:
    assert (sweep.interrupted.code, sweep.interrupted.out) == (130, "")
    assert "stopped in none; run the same command again to resume" in sweep.interrupted.err


def test_both_were_resumed(sweep: Sweep) -> None:
    steps = {}
    for name in ("none", "k2"):
        lines = read_metrics(sweep.folder / name / "metrics.jsonl")
        steps[name] = [line.step for line in lines if isinstance(line, StepMetrics)]
    assert steps["none"] == steps["k2"] == list(range(1, len(steps["none"]) + 1))


def test_finished_runs_of_a_sweep_are_compared_without_training(
    sweep: Sweep, tmp_path: Path
) -> None:
    runs = [sweep.folder / name for name in ("none", "k2")]
    done = run_cli("compare", *runs, "--out", tmp_path, "--json")
    assert done.code == 0, done.err
    ours, theirs = json.loads(done.out), read_json(sweep.folder / "comparison.json")
    assert ours["tables"] == theirs["tables"]


def test_the_settings_are_compared_on_the_same_documents(sweep: Sweep) -> None:
    manifests = [load_manifest(sweep.folder / name / "manifest.jsonl") for name in ("none", "k2")]
    # With the same identity key, so that a document can be followed from run to run.
    assert manifests[0] == manifests[1]


def test_comparison_json_holds_what_was_promised(sweep: Sweep) -> None:
    comparison = load_comparison(sweep.folder / "comparison.json")
    assert [run.setting for run in comparison.runs] == ["none", "k2"]
    accuracy, base_losses = {}, set()
    for run in comparison.runs:
        loss, base_loss = comparison.find_loss(run), comparison.find_loss(run, "base")
        assert loss.value < base_loss.value
        base_losses.add(base_loss.value)
        assert list(run.doses.values()) == [0, 1, 30]
        key = {"setting": run.setting, "seed": run.seed}
        for bucket, dose in run.doses.items():
            for metric in ("verbatim", "near_verbatim"):
                rate = comparison.tables.find("extraction", metric, bucket, **key)
                assert rate.num_documents == 6
                assert rate.value == rate.num_matched / 6
                assert rate.low <= rate.value <= rate.high
            mean = comparison.tables.find("extraction", "token_accuracy", bucket, **key)
            assert 0 <= mean.value <= 1
            accuracy[run.setting, dose] = mean.value
    assert len(base_losses) == 1
    assert accuracy["none", 30] > accuracy["none", 0] + 0.1, "30 repetitions leave a trace"
    assert accuracy["none", 30] > accuracy["k2", 30], "goldfish keeps some of it away"
    assert "<svg" in (sweep.folder / "comparison.html").read_text()


def test_a_second_call_trains_nothing(sweep: Sweep) -> None:
    before = read_json(sweep.folder / "comparison.json")
    with mock.patch.object(children.subprocess, "Popen", side_effect=AssertionError("a child")):
        again = run_cli("compare", sweep.file, "--json")
    assert again.code == 0, again.err
    assert "3 of 3 runs already finished: base, none, k2" in again.err
    assert "held-out loss" in again.err
    now = json.loads(again.out)
    del before["sha256"]
    same = {"command": "", "created": ""}
    assert {**now, **same} == {**before, **same}


def test_the_gate_of_each_run_is_what_its_counts_say(sweep: Sweep, tmp_path: Path) -> None:
    for name in ("none", "k2"):
        assert set(check_rates(sweep.folder / name)) <= {0, 10, 11}
    policy = tmp_path / "policy.yaml"
    rule = f"metric: verbatim, probe: extraction, parameters: '', than: {sweep.folder / 'none'}"
    policy.write_text(f"gate: [{{{rule}, at_most: 0.9}}]\n")
    gated = run_cli("gate", sweep.folder / "k2", "--policy", policy, "--out", tmp_path / "gate")
    assert gated.code in (0, 11), gated.err
    judgements = read_json(tmp_path / "gate" / "gate.json")["judgements"]
    # The same documents in both runs, under one key.
    assert all("paired, on the same documents" in judgement["sentence"] for judgement in judgements)
    assert {judgement["compared_with"] for judgement in judgements} == {"none"}


def test_pages_are_rendered_again_from_their_json(sweep: Sweep) -> None:
    for folder, page in (
        (sweep.folder, "comparison.html"),
        (sweep.folder / "none", "audit/report.html"),
    ):
        before = (folder / page).read_bytes()
        (folder / page).unlink()
        assert run_cli("report", folder).code == 0
        # The report has it, although the comparison did not exist when the run was audited.
        link = b'<a href="../../comparison.html"><bdi>Comparison</bdi></a> '
        assert (link in before) == (folder != sweep.folder)
        assert (folder / page).read_bytes() == before


@pytest.mark.parametrize("damage", [flip_byte, cut])
def test_a_damaged_comparison_is_not_rendered(sweep: Sweep, damage: Callable[[Path], None]) -> None:
    path = sweep.folder / "comparison.json"
    before = path.read_bytes()
    damage(path)
    refused = run_cli("report", sweep.folder)
    path.write_bytes(before)
    assert (refused.code, refused.err.count("\n")) == (3, 1)
    assert "is damaged" in refused.err
    assert "Run 'memguard compare' again" in refused.err


def test_other_settings_start_afresh_beside_the_old_ones(sweep: Sweep) -> None:
    with mock.patch.object(children.subprocess, "Popen", side_effect=KeyboardInterrupt):
        outcome = run_cli("compare", sweep.file, "settings[1].mitigations[0].k=4")
    assert outcome.code == 130
    assert "2 of 3 runs already finished: base, none" in outcome.err
    assert "1 of 3 runs start again" in outcome.err
    assert (sweep.folder / "k2.replaced-1" / "model").is_dir()


def test_a_sweep_has_its_own_folder(tmp_path: Path) -> None:
    done = run_cli("compare", "quickstart", "--out", tmp_path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--out needs RUNs" in done.err
