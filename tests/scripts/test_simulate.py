"""scripts/simulate.py on a tiny model: its verdict is honest, and mistakes are told in a line."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPool
from script_calls import SCRIPTS, run_script

pytestmark = pytest.mark.slow

# A vocabulary that x does not divide, every bias there is, and the dtype that published files name.
TINY = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "attention_bias": True,
    "mlp_bias": True,
    "vocab_size": 1001,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


def double_the_weights(script: Any) -> None:
    """Let the script predict twice the bytes of weights."""
    honest = script.estimate_memory

    def doubled(*args: Any, **kwargs: Any) -> Any:
        estimate = honest(*args, **kwargs)
        peak = dataclasses.replace(estimate.peak, weights=2 * estimate.peak.weights)
        return dataclasses.replace(estimate, peak=peak)

    script.estimate_memory = doubled


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "config.json")


@pytest.mark.parametrize(
    "modes", [("none", "full"), pytest.param(("none", "selective", "full"), marks=pytest.mark.long)]
)
def test_modes_and_views_are_as_predicted(
    ranks: RankPool, model: str, modes: tuple[str, ...]
) -> None:
    requested = [
        "--model",
        model,
        "--ranks",
        "16",
        "--mesh",
        "data=2,z=2,y=2,x=2",
        "--seq-len",
        "256",
    ]
    done = run_script(
        ranks, "simulate", *requested, "--view", "0", "-1", "--checkpointing", *modes, "--json"
    )
    assert done.code == 0, done.err
    views: list[dict[str, Any]] = json.loads(done.out)
    assert [(v["checkpointing"], v["rank"]) for v in views] == [
        (mode, rank) for mode in modes for rank in (0, 15)
    ]
    for view in views:
        assert view["mesh"] == {"data": 2, "z": 2, "y": 2, "x": 2}
        assert view["problems"] == []
        assert {c["axis"] for c in view["collectives"]} == {"data", "z", "y", "x", "world"}
        assert all(c["as_formula"] for c in view["collectives"])
        sizes = view["bytes"]
        assert sizes["optimizer"]["simulated"] > sizes["weights"]["simulated"] > 0
        assert sizes["peak"]["simulated"] > sizes["optimizer"]["simulated"]


@pytest.mark.long
def test_the_last_line_says_so(model: str) -> None:
    # The script as a user starts it; elsewhere its main is called where torch is loaded already.
    command = [sys.executable, str(SCRIPTS / "simulate.py"), "--model", model, "--ranks", "1", "8"]
    done = subprocess.run(
        [*command, "--seq-len", "128"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 ranks (data=1, z=4, y=1, x=2), view of rank 0" in done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("PASS: 2 steps of ")
    assert "on 1, 8 ranks" in last


def test_a_wrong_prediction_fails(ranks: RankPool, model: str) -> None:
    arguments = ("--model", model, "--ranks", "4", "--seq-len", "128")
    done = run_script(ranks, "simulate", *arguments, change=double_the_weights)
    assert done.code == 1
    last = done.out.strip().splitlines()[-1]
    assert last.startswith("FAIL: ")
    assert "weights is 2.00 of simulated" in last


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--ranks", "16", "--mesh", "x=3"), "'parallel.x' must divide the model's 8 attention"),
        (("--ranks", "0"), "must be 1 or more, got 0"),
        (("--ranks", "4", "--seq-len", "1"), "must be 2 or more, got 1"),
        (("--ranks", "4", "--view", "4"), "'--view' must be a rank of 4; got 4"),
        (("--ranks", "4", "--mesh", "w=2"), "must give each of data, z, y, x at most once"),
    ],
)
def test_mistakes_are_told(ranks: RankPool, model: str, args: tuple[str, ...], said: str) -> None:
    done = run_script(ranks, "simulate", "--model", model, *args)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_another_family_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "mixtral"}))
    done = run_script(ranks, "simulate", "--model", str(tmp_path), "--ranks", "4")
    assert done.code == 3
    assert "got 'mixtral'" in done.err
