"""What a run's audits generate, predicted; their other work is in tests/cli/test_cli_dry_run."""

import pytest

from memguard.audit.benchmarks.work import TaskWork
from memguard.config import RunConfig
from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.dry_run import AuditWork, ProbeWork
from memguard.planner.generation import CACHE_CHECKS, GenerationPlan
from memguard.planner.machine import load_machine
from memguard.workflows.generation_plan import (
    AuditOutlook,
    assume_outlook,
    check_generation,
    make_outlook,
    predict_generation,
)

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


def make_config(**sections: object) -> RunConfig:
    values = {"name": "run", "model": {"path": "m"}, "data": {"train": ["t"]}}
    return RunConfig.model_validate(values | sections)


def predict(config: RunConfig, outlook: AuditOutlook | None = None) -> GenerationPlan:
    machine = load_machine("dgx-h100")
    outlook = outlook or make_outlook(config, WORK, {"trained": 100, "control": 100}, 12)
    return predict_generation(config, outlook, SIZES, MeshShape(z=32), machine)


def test_dtype_and_looks_of_the_budget_count() -> None:
    wide, narrow = predict(make_config()), predict(make_config(audit={"dtype": "bf16"}))
    # 70.6e9 parameters of Llama 3 70B.
    assert wide.gathered_gb == pytest.approx(4 * 70.6, rel=0.01)
    assert narrow.gathered_gb == pytest.approx(wide.gathered_gb / 2)
    assert [probe.probe for probe in wide.probes] == ["extraction"]
    watched = make_config(train={"audit_every_steps": 4, "audit_documents": 64}, budget={})
    outlook = make_outlook(watched, WORK, {"trained": 100, "control": 30}, 12)
    # Three of twelve steps; no more documents of a bucket than it has.
    assert (outlook.num_looks, outlook.look_documents) == (3, 64 + 30)
    plan = predict(watched, outlook)
    assert [probe.probe for probe in plan.probes] == ["extraction", "budget"]
    # A look generates with one model what the audit generates with two, both in one batch.
    assert plan.probes[1].num_steps == 3 * wide.probes[0].num_steps / 2
    assert plan.minutes == pytest.approx(2.5 * wide.minutes)


def test_tasks_that_generate_count_and_are_refused() -> None:
    task = TaskWork(
        task="summaries",
        num_items=64,
        num_forwards=64,
        num_tokens=64 * 400,
        num_decoded_tokens=64 * 112,
        num_new=112,
    )
    scored = task.model_copy(update={"task": "mc", "num_decoded_tokens": 0, "num_new": 0})
    config = make_config(audit={"max_generation_minutes": 1})
    audited = {"trained": 100, "control": 100}
    outlook = make_outlook(config, WORK, audited, 12, (scored, task))
    plan = predict(config, outlook)
    assert [probe.probe for probe in plan.probes] == ["extraction", "utility summaries"]
    # Rows of 512 tokens, 32 in a batch of each of the 32 ranks: one batch of each model.
    assert plan.probes[1].num_steps == 2 * (112 + CACHE_CHECKS)
    # A reference model answers no tasks.
    work = WORK.model_copy(update={"models": ("trained", "reference")})
    outlook = make_outlook(config, work, audited, 12, (task,))
    assert predict(config, outlook).probes[1].num_steps == 112 + CACHE_CHECKS
    with pytest.raises(ConfigError, match=r"items \('limit' of a task\)"):
        check_generation(config, plan, load_machine("dgx-h100"), pytest.fail)


def test_the_number_of_documents_is_that_of_a_study_or_assumed() -> None:
    assumed = assume_outlook(make_config())
    assert (assumed.num_documents, assumed.is_assumed) == (1000, True)
    # Trained and base model each write 50 tokens.
    (extraction,) = [of for of in assumed.work.probes if of.probe == "extraction"]
    assert extraction.num_generated_tokens == 2 * 50 * 1000
    assert assume_outlook(make_config(audit={"max_documents_per_bucket": 60})).num_documents == 120
    study = {"num_repetitions": [0, 1, 4], "documents_per_bucket": 200}
    planned = assume_outlook(make_config(data={"train": ["t"], "study": study}))
    assert (planned.num_documents, planned.is_assumed) == (600, False)
    attacked = make_config(audit={"suite": "attacks"}, mitigations=[{"name": "goldfish", "k": 4}])
    assert {of.probe for of in assume_outlook(attacked).work.probes} > {"extraction"}


def test_a_known_machine_refuses_and_an_unknown_one_warns() -> None:
    config = make_config(audit={"max_generation_minutes": 0.5})
    plan = predict(config)
    known = load_machine("dgx-h100")
    said: list[str] = []
    with pytest.raises(ConfigError, match="the audit would generate text for"):
        check_generation(config, plan, known, said.append)
    check_generation(make_config(audit={"max_generation_minutes": None}), plan, known, said.append)
    check_generation(make_config(), plan, known, said.append)
    assert said == []
    unknown = known.model_copy(update={"assumed": ("link_gb_per_s",)})
    check_generation(config, plan, unknown, said.append)
    (line,) = said
    assert "The speed of this machine is assumed; the audit measures it and decides" in line
    said.clear()
    few = make_config(audit={"max_generation_minutes": 0.01, "max_documents_per_bucket": 10})
    check_generation(few, predict(few, assume_outlook(few)), known, said.append)
    (line,) = said
    assert line.endswith("The number of documents, 20, is assumed")
