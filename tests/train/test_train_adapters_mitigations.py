"""Every mitigation with adapters: it trains them, and leaves the base as it is."""

from pathlib import Path
from typing import Any, get_args

import pytest
from run_examples import make_run, train_checked, write_documents
from safetensors.torch import load_file

from memguard.config.mitigations import FORGETTING, MitigationConfig
from memguard.hf.identity import sum_model
from memguard.train.metrics import StepMetrics, read_metrics

pytestmark = pytest.mark.slow

# Each entry of `mitigations:`, so that a new one is tested too.
NAMES = [kind.model_fields["name"].annotation for kind in get_args(get_args(MitigationConfig)[0])]
MITIGATIONS = [get_args(name)[0] for name in NAMES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents, some of which are to be forgotten, and a base model."""
    folder = tmp_path_factory.mktemp("adapters")
    source = write_documents(folder / "documents.jsonl", 20, words=10)
    lines = source.read_text().splitlines(keepends=True)
    (folder / "forget.jsonl").write_text("".join(lines[:4]))
    train_checked(make_run(folder, name="base", audit={"enabled": False}, train={"max_steps": 1}))
    return folder


@pytest.mark.parametrize("name", MITIGATIONS)
def test_a_mitigation_trains_adapters(folder: Path, name: str) -> None:
    base = folder / "runs/base/model"
    before = sum_model(base)
    data: dict[str, Any] = {"control_fraction": 0, "canaries": {"count": 0}}
    if name in FORGETTING:
        data |= {"forget": str(folder / "forget.jsonl"), "forget_repetitions": 2}
    setting: dict[str, Any] = {"name": name}
    if name == "deduplicate":
        # Near-copies need another library, which has nothing to do with adapters.
        setting["similarity"] = "exact"
    if name == "dp_sgd":
        pytest.importorskip("opacus", reason="of the extra 'dp'")
    config = make_run(
        folder,
        name=name,
        model={"path": str(base), "scratch": None},
        adapter={"name": "lora", "r": 2},
        data=data,
        mitigations=[setting],
        train={"max_steps": 2, "log_every_steps": 1},
        audit={"enabled": False},
    )
    train_checked(config)
    run = folder / "runs" / name
    steps = [line for line in read_metrics(run / "metrics.jsonl") if isinstance(line, StepMetrics)]
    assert len(steps) == 2
    assert all(step.loss is not None for step in steps)
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    # B begins at zero: it has been trained.
    assert any(bool(t.any()) for key, t in tensors.items() if "lora_B" in key)
    assert sum_model(base) == before
