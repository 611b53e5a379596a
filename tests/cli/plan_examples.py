"""Models and machines of the tests of `memguard plan`, and how they call it."""

import json
from pathlib import Path
from typing import Any

from cli_examples import Outcome, run_cli
from published_sizes import CONFIG_FIELDS

MACHINE: dict[str, Any] = {
    "name": "mine",
    "gpu": "H100 SXM 80 GB",
    "memory_gib": 80,
    "gpus_per_node": 8,
    "link_gb_per_s": 450,
    "network_gb_per_s": 400,
    "peak_tflops": 989,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """Write the sizes of Llama 3.1 405B, with changes."""
    (folder / "llama-405b").mkdir(exist_ok=True)
    path = folder / "llama-405b" / "config.json"
    path.write_text(json.dumps({**CONFIG_FIELDS["Llama-3.1-405B"], **changes}))
    return path


def write_machine(folder: Path, **changes: Any) -> Path:
    path = folder / "machine.yaml"
    path.write_text(json.dumps({**MACHINE, **changes}))  # JSON is YAML.
    return path


def plan(*arguments: object) -> Outcome:
    return run_cli("plan", *arguments)


def flatten(text: str) -> str:
    """Undo line breaks."""
    return " ".join(text.split())


def check_refusal(outcome: Outcome, code: int, *said: str) -> None:
    """A refusal before anything is shown: one line for each problem, no traceback."""
    assert outcome.code == code
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert outcome.err.strip()
    for each in said:
        assert each in outcome.err
