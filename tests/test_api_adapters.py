"""api.audit of models in memory that peft or torch.compile wraps, against saved folders."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from cli_examples import make_texts
from tiny_adapters import adapt

from memguard import api
from memguard.errors import ConfigError, ModelError

pytestmark = pytest.mark.slow

# fp32: the same numbers, summed by a merged weight or by base and adapter one after the other.
_SAME = 1e-4
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear", "lora_dropout": 0.5},
    "dora": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
}


@pytest.fixture
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder / "model")


def audit(model: Any, tokenizer: Any = None, **settings: Any) -> api.AuditResult:
    return api.audit(
        model=model,
        tokenizer=tokenizer,
        members=make_texts(24),
        nonmembers=make_texts(24, seed=1),
        cache=False,
        **{"continuation_tokens": 8, "min_documents": 4, **settings},
    )


def read(result: api.AuditResult, column: str) -> list[Any]:
    return result.to_pandas().sort_values("id")[column].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_in_memory_is_audited_like_its_folder(
    folder: Path, model: Any, tokenizer: Any, kind: str
) -> None:
    adapted = adapt(model, **KINDS[kind]).train()
    adapted.save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    flags = {name: p.requires_grad for name, p in adapted.named_parameters()}
    ids = torch.arange(20)[None]
    adapted.eval()
    before = adapted(ids).logits
    adapted.train()
    ours = audit(adapted, tokenizer, base="adapter-off")
    saved = audit(folder / "adapter", base=folder / "model")
    for start in ("", "base."):
        assert read(ours, f"{start}extraction.verbatim") == read(
            saved, f"{start}extraction.verbatim"
        )
        assert read(ours, f"{start}extraction.logprob") == pytest.approx(
            read(saved, f"{start}extraction.logprob"), abs=_SAME
        )
    # The adapter has an effect, which switching it off takes away.
    assert np.abs(np.subtract(*(read(ours, f"{s}extraction.logprob") for s in ("", "base.")))).max()
    assert ours.report.verdict.level == saved.report.verdict.level
    name = {"lora": "LoRA", "dora": "DoRA"}[kind]
    assert f"{name} adapter 'default' (r=4, alpha=6)" in ours.report.model.name
    assert ours.report.model.base.endswith("without its adapter")
    assert ours.report.model.base_weights_sha256 != ours.report.model.weights_sha256
    # Nothing is left changed.
    assert {name: p.requires_grad for name, p in adapted.named_parameters()} == flags
    assert adapted.training
    adapted.eval()
    assert torch.equal(adapted(ids).logits, before)


def test_a_compiled_model_is_audited_like_the_model(model: Any, tokenizer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="eager")
    assert read(audit(compiled, tokenizer), "extraction.logprob") == read(
        audit(model, tokenizer), "extraction.logprob"
    )


def test_fp32_adapters_of_a_bf16_base_are_audited_in_bf16(model: Any, tokenizer: Any) -> None:
    adapted = adapt(model.bfloat16(), **KINDS["lora"])
    dtypes = {parameter.dtype for parameter in adapted.parameters()}
    assert dtypes == {torch.float32, torch.bfloat16}, "peft keeps adapters in fp32"
    assert audit(adapted, tokenizer).report.method.dtype == "bf16"


@pytest.mark.quick
def test_what_is_another_model_without_its_adapter_is_refused(
    folder: Path, model: Any, tokenizer: Any
) -> None:
    def refuse(adapted: Any, message: str) -> None:
        with pytest.raises(ModelError, match=message):
            audit(adapted, tokenizer, base="adapter-off")

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder / "model")

    refuse(model, "has no adapter of peft")
    refuse(adapt(load(), target_modules=["q_proj"], bias="all"), "biases|outside the adapter")
    refuse(
        adapt(load(), target_modules=["q_proj"], init_lora_weights="olora"),
        "'init_lora_weights' 'olora' changed",
    )
    trained = adapt(load(), target_modules=["q_proj"])
    trained.get_input_embeddings().weight.requires_grad_(True)
    refuse(trained, "embed_tokens.weight is trained outside")
    resized = load()
    resized.resize_token_embeddings(resized.config.vocab_size + 3)
    refuse(adapt(resized, target_modules=["q_proj"]), "embeddings were resized from")
    merged = adapt(load(), target_modules=["q_proj"])
    merged.merge_adapter()
    refuse(merged, "is merged into")
    with pytest.raises(ConfigError, match="'adapter-off' for a model in memory"):
        audit(folder / "model", base="adapter-off")
    prompt = peft.get_peft_model(
        load(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ModelError, match="is of kind PROMPT_TUNING"):
        audit(prompt, tokenizer)
