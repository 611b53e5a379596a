"""What a run's audit generates before training; its other work is in tests/cli/test_cli_dry_run."""

import pytest

from memguard.config import RunConfig
from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.dry_run import AuditWork, ProbeWork
from memguard.planner.generation import GenerationPlan
from memguard.planner.machine import load_machine
from memguard.workflows.audit_work import check_generation, predict_generation

SIZES = ModelSizes.from_json(
    {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
)
WORK = AuditWork(
    models=("trained", "base"),
    probes=(
        ProbeWork(
            probe="extraction", num_passages=400, num_tokens=8192, num_generated_tokens=20_000
        ),
    ),
    num_passages=400,
    num_tokens=8192,
    num_generated_tokens=20_000,
)


def make_config(**audit: object) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "run", "model": {"path": "m"}, "data": {"train": ["t"]}, "audit": audit}
    )


def predict(config: RunConfig, **more: int) -> GenerationPlan:
    machine = load_machine("dgx-h100")
    return predict_generation(config, WORK, SIZES, MeshShape(z=32), machine, **more)


def test_dtype_and_looks_of_the_budget_count() -> None:
    wide, narrow = predict(make_config()), predict(make_config(dtype="bf16"))
    # 70.6e9 parameters of Llama 3 70B.
    assert wide.gathered_gb == pytest.approx(4 * 70.6, rel=0.01)
    assert narrow.gathered_gb == pytest.approx(wide.gathered_gb / 2)
    watched = predict(make_config(), num_looks=3)
    assert [probe.probe for probe in watched.probes] == ["extraction", "budget"]
    # A look generates with one model what the audit generates with two.
    assert watched.probes[1].num_steps == 3 * wide.probes[0].num_steps / 2


def test_a_known_machine_refuses_and_an_unknown_one_warns() -> None:
    config = make_config(max_generation_minutes=0.5)
    plan = predict(config)
    known = load_machine("dgx-h100")
    said: list[str] = []
    with pytest.raises(ConfigError, match="the audit would generate for"):
        check_generation(config, plan, known, said.append)
    check_generation(make_config(max_generation_minutes=None), plan, known, said.append)
    check_generation(make_config(), plan, known, said.append)
    assert said == []
    unknown = known.model_copy(update={"assumed": ("link_gb_per_s",)})
    check_generation(config, plan, unknown, said.append)
    (line,) = said
    assert "The speed of this machine is assumed; the audit measures it and decides" in line
