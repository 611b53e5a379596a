"""Decoding and scores on a GPU, and of a model over a GPU and the CPU, as on the CPU alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_examples import succeed
from test_decoding import generate, make_requests, to_lists
from tiny_families import build

from memguard.audit.decoding import Continuation, Decoder
from memguard.audit.requests import Prompt
from memguard.hf.load import load_model, plan_devices
from memguard.model.checks import build_causal_lm
from memguard.model.kv_cache import can_cache

# fp32 logits of some units, by kernels that add in another order: 1e-6 each, some dozen deep. A
# token is compared only where the next best is farther away than that.
_CLOSE = 1e-3
# Head dimension 16, the least that flash attention's kernels take.
_SIZES = {"hidden_size": 64, "intermediate_size": 96}


def assert_same_tokens(ours: list[Continuation], theirs: list[list[int]]) -> None:
    decided = [index for index, one in enumerate(ours) if not one.min_gap < _CLOSE]
    assert len(decided) > len(ours) / 2, "most texts have no close call"
    for index in decided:
        assert to_lists([ours[index]])[0] == theirs[index]


def score_logits(model: Any, requests: list[Prompt]) -> list[torch.Tensor]:
    with torch.no_grad():
        ids = [torch.from_numpy(np.asarray(one.input_ids))[None].long() for one in requests]
        return [model(input_ids=one.to(model.device)).logits[0].float().cpu() for one in ids]


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen3", "gemma2"))],
)
def test_cached_decoding_is_what_generate_gives_on_the_cpu(
    device: torch.device, family: str
) -> None:
    requests = make_requests(8)
    theirs = generate(build(family, **_SIZES), requests)
    lm = build_causal_lm(build(family, **_SIZES).to(device))
    assert can_cache(lm, 1, 60), "keys and values are kept on the device"
    assert_same_tokens(Decoder(lm, 400).continue_greedily(requests), theirs)


def test_decoding_in_bf16_stays_finite(device: torch.device) -> None:
    """An audit in bf16 on a GPU: the tokens may differ, their number and their gaps may not."""
    lm = build_causal_lm(build("llama", **_SIZES).to(device, torch.bfloat16))
    requests = make_requests(8)
    for request, one in zip(requests, Decoder(lm, 400).continue_greedily(requests), strict=True):
        assert len(one.token_ids) == request.num_new
        assert request.num_new == 0 or one.min_gap >= 0


@pytest.mark.parametrize(
    "is_split", [False, pytest.param(True, marks=pytest.mark.long)], ids=["fits", "split"]
)
def test_a_model_over_devices_decodes_the_same(
    device: torch.device, tmp_path: Path, is_split: bool
) -> None:
    """`audit.device_map`: all on the GPU, or one block in the CPU's memory."""
    model = build("llama", **_SIZES)
    requests = make_requests(10)
    theirs = generate(model, requests)
    model.save_pretrained(tmp_path)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    room = {"cpu": "1GiB"}
    if device.type == "cuda":
        # Less than the model, the largest block twice and the head, but more than head and a block.
        room["0"] = f"{num_bytes * 3 // 4 if is_split else num_bytes * 10}B"
    devices = plan_devices(model.config, dtype=torch.float32, max_memory=room)
    split = load_model(str(tmp_path), devices=devices)
    if device.type == "cuda":
        assert ("cpu" in devices.values()) == is_split, devices
    lm = build_causal_lm(split)
    assert_same_tokens(Decoder(lm, 400).continue_greedily(requests), theirs)
    for ours, expected in zip(
        score_logits(split, requests), score_logits(model, requests), strict=True
    ):
        # float32, the same kernels' order of sums but for the device.
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def audit(folder: Path, name: str, *options: object) -> dict[str, Any]:
    documents = folder / "documents.jsonl"
    lines = documents.read_text().splitlines()
    members, others = folder / "members.jsonl", folder / "others.jsonl"
    members.write_text("\n".join(lines[:20]) + "\n")
    others.write_text("\n".join(lines[20:40]) + "\n")
    succeed(
        *("audit", "--model", folder / "model", "--members", members, "--nonmembers", others),
        *("--out", folder / name, "audit.continuation_tokens=8", *options),
    )
    report: dict[str, Any] = json.loads((folder / name / "report.json").read_text())
    return report


@pytest.mark.long
def test_an_audit_over_devices_has_the_same_verdict(device: torch.device, folder: Path) -> None:
    del device  # the audit uses the machine's GPU, which the fixture hides for the CPU
    plain = audit(folder, "plain")
    mapped = audit(folder, "mapped", "audit.device_map=auto")
    assert mapped["verdict"] == plain["verdict"]
