"""A whole audit of a model that `audit.device_map` distributes gives the report of one device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_examples import run_cli


def audit(folder: Path, name: str, *options: object) -> dict[str, Any]:
    documents = folder / "documents.jsonl"
    lines = documents.read_text().splitlines()
    members, others = folder / "members.jsonl", folder / "others.jsonl"
    members.write_text("\n".join(lines[:20]) + "\n")
    others.write_text("\n".join(lines[20:40]) + "\n")
    done = run_cli(
        *("audit", "--model", folder / "model", "--members", members, "--nonmembers", others),
        *("--out", folder / name, "--continuation-tokens", 8, *options),
    )
    assert done.code == 0, done.err
    report: dict[str, Any] = json.loads((folder / name / "report.json").read_text())
    return report


@pytest.mark.slow
def test_an_audit_over_devices_has_the_same_verdict(device: torch.device, folder: Path) -> None:
    del device  # the audit uses the machine's GPU, which the fixture hides for the CPU
    plain = audit(folder, "plain")
    mapped = audit(folder, "mapped", "--device-map", "auto")
    assert mapped["verdict"] == plain["verdict"]
