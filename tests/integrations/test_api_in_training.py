"""`api.audit` in a training loop scores the model it was given, and leaves training as it was.

TRL replaces the `forward` of a model by a closure over the original one, so that a copy of the
model with this `forward` would run the original: in training mode, with dropout, on its random
numbers.
"""

from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import trainer_program as program
import transformers
import trl

from memguard import api
from memguard.errors import ModelError

SETTINGS: dict[str, Any] = {
    "continuation_tokens": 8,
    "min_prefix_tokens": 4,
    "min_documents": 2,
    "cache": False,
    "seed": 3,
}
STEPS, AUDITED_STEP = 4, 2


def read_logprobs(result: api.AuditResult) -> list[float]:
    return result.to_pandas().sort_values("id")["extraction.logprob"].tolist()


class Auditor(transformers.TrainerCallback):
    """Audits the model in memory after a step, and saves its adapter at the same moment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == AUDITED_STEP:
            model = kwargs["model"]
            grads = {name: p.grad for name, p in model.named_parameters()}
            state_before = torch.get_rng_state()
            self.found = audit(model.get_base_model())
            assert torch.equal(torch.get_rng_state(), state_before)
            assert model.training
            assert all(p.grad is grads[name] for name, p in model.named_parameters())
            assert not any(module._forward_pre_hooks for module in model.modules())
            model.save_pretrained(self.folder)


def audit(model: Any) -> api.AuditResult:
    in_memory = {} if isinstance(model, str) else {"tokenizer": program.build_tokenizer()}
    return api.audit(
        model=model,
        **in_memory,
        members=program.draw_words(1, 6),
        nonmembers=program.draw_words(2, 6),
        **SETTINGS,
    )


def train(base: Path, output: Path, *, checkpointing: bool, auditor: Any = None) -> list[float]:
    transformers.set_seed(0)
    rows = [program.build_tokenizer()(text).input_ids for text in program.draw_words(1, 6)]
    trainer = trl.SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=trl.SFTConfig(
            **program.set_up(output, 2, 1) | {"max_steps": STEPS},
            dataset_kwargs={"skip_prepare_dataset": True},
            bf16=False,
            **{program.RECOMPUTE: checkpointing},
        ),
        train_dataset=datasets.Dataset.from_list([{"input_ids": row} for row in rows]),
        processing_class=program.build_tokenizer(),
        peft_config=peft.LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=0.5,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
        ),
        callbacks=[] if auditor is None else [auditor],
    )
    return program.run(trainer)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_audit_under_trl_scores_the_adapted_model(tmp_path: Path, checkpointing: bool) -> None:
    base = tmp_path / "base"
    program.build_model().save_pretrained(base)
    program.build_tokenizer().save_pretrained(base)
    auditor = Auditor(tmp_path / "adapter")
    losses = train(base, tmp_path / "audited", checkpointing=checkpointing, auditor=auditor)
    plain = train(base, tmp_path / "plain", checkpointing=checkpointing)
    assert losses == plain, "the same dropout, bit by bit"
    saved = audit(str(tmp_path / "adapter"))
    # The saved adapter is merged before it is scored: another order of the same fp32 sums.
    assert read_logprobs(auditor.found) == pytest.approx(read_logprobs(saved), abs=1e-5)


def test_a_forward_that_still_runs_the_original_is_an_error() -> None:
    model = program.build_model()
    decoder, original = model.model, model.model.forward
    # Accelerate's hooks are copied with their forward; this one is not of the kind that moves.
    decoder._hf_hook = object()
    decoder.forward = lambda *args, **kwargs: original(*args, **kwargs)
    with pytest.raises(ModelError, match="would run the original in its own mode"):
        audit(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    del decoder._hf_hook
    assert audit(model).report.tables.results, "without a hook the closure is left behind"


def test_modules_whose_class_has_no_forward_are_refused() -> None:
    model = program.build_model()
    block = model.model.layers[1].mlp
    block.__class__ = type("Patched", (torch.nn.Module,), {})
    block.forward = lambda hidden: hidden
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp \(Patched\) has no 'forward'"):
        audit(model)
