"""Adapters on a base in NF4: against peft and transformers' BitsAndBytesConfig, on one process."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peft
import pytest
import torch
import transformers
from cli_examples import run_cli, save_tiny_model, succeed, write_run, write_texts
from corpus_examples import summarise
from loaded_forms import measure_form
from ranks import RankPool
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_adapters import save_adapter
from torch import Tensor, nn

from memguard import errors
from memguard.audit.requests import Prompt
from memguard.config import AuditConfig, load_run_config
from memguard.errors import ModelError
from memguard.hf import adapter_files
from memguard.hf.assembly import Assembly
from memguard.hf.load import count_parameters, load_assembled, load_model
from memguard.hf.merged_weights import open_merged
from memguard.hf.nf4_base import list_nf4
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.linear import Linear4D
from memguard.parallel.lora import LoraSpec, is_adapter_parameter
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.records.run_files import load_trained
from memguard.runtime import Runtime, start_runtime
from memguard.workflows.auditing.checks import AuditArguments, check_audit
from memguard.workflows.auditing.models import (
    DTYPES,
    LazyModel,
    ModelSource,
    find_base_quantization,
)
from memguard.workflows.auditing.target import plan_run
from memguard.workflows.common import setup
from memguard.workflows.common.folder import compute_run_key

pytestmark = pytest.mark.slow

splits_nf4 = pytest.mark.skipif(
    adapter_files.refuse_nf4_over_z(2) is not None, reason="refused with this torch"
)

LAYERS = 2 * 7
Gradients = dict[str, Tensor]


def load_reference(base: Path, *, dtype: torch.dtype, use_dora: bool) -> Any:
    """Return transformers' 4-bit model with peft's adapters, in training mode.

    In evaluation mode bitsandbytes may compute in bf16 on this machine's CPU.
    """
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=False,
        bnb_4bit_compute_dtype=dtype,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, quantization_config=config, dtype=dtype, device_map="cpu"
        )
        adapted = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=4,
                lora_alpha=8,
                target_modules="all-linear",
                use_dora=use_dora,
                task_type="CAUSAL_LM",
            ),
        )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapted.train()


def load_in_nf4(
    base: Path, *, dtype: torch.dtype = torch.float32, adapter: LoraSpec | None = None
) -> Any:
    """Return the model that is trained on one process."""
    assembly = Assembly(
        mesh=None, device=torch.device("cpu"), dtype=dtype, adapter=adapter, quantization="nf4"
    )
    return load_assembled(str(base), assembly).lm.model


def load_ours(base: Path, reference: Any, *, dtype: torch.dtype, use_dora: bool) -> Any:
    """Return memguard's model with the same adapters."""
    model = load_in_nf4(base, dtype=dtype, adapter=LoraSpec(r=4, alpha=8, use_dora=use_dora))
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_parameter(name):
                parameter.copy_(theirs.pop(name))
    assert not theirs
    return model.train()


def backpropagate(model: Any) -> tuple[Tensor, Gradients]:
    """Return logits, and gradients of the adapters by name."""
    ids = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return logits.detach(), gradients


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # For other lengths of a row, bitsandbytes' kernel for CPUs is wrong, see `dequantise_nf4`.
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    folder = tmp_path_factory.mktemp("nf4") / "base"
    return save_tiny_model(folder, initializer_range=0.2, **sizes)


@pytest.mark.parametrize("use_dora", [False, True])
def test_logits_and_gradients_are_those_of_peft_and_bitsandbytes(
    base: Path, use_dora: bool
) -> None:
    reference = load_reference(base, dtype=torch.float32, use_dora=use_dora)
    ours = load_ours(base, reference, dtype=torch.float32, use_dora=use_dora)
    expected, expected_gradients = backpropagate(reference)
    logits, gradients = backpropagate(ours)
    plain = load_model(str(base))(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits
    assert plain.dtype == logits.dtype
    # fp32 on the same dequantised weights, added in another order.
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    assert gradients.keys() == expected_gradients.keys()
    assert len(gradients) == LAYERS * (3 if use_dora else 2)
    for name, gradient in gradients.items():
        largest = float(expected_gradients[name].abs().max())
        assert largest > 0
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=0, atol=1e-5 * max(1.0, largest)
        )


def test_the_base_takes_four_and_a_half_bits_a_weight(base: Path) -> None:
    model = load_model(str(base), dtype=torch.bfloat16)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)][:-1]
    before = sum(layer.weight.nbytes for layer in linear)
    model = load_in_nf4(base, dtype=torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, Linear4D)]
    after = sum(part.nbytes for layer in layers for part in (layer.packed, layer.scales))
    num_weights = sum(layer.weight.numel() for layer in layers)
    assert len(layers) == len(linear) == LAYERS
    assert all(layer.weight.is_meta for layer in layers), "no dense copy is kept"
    assert count_parameters(model) == num_weights + sum(
        parameter.numel() for parameter in model.parameters() if parameter.is_floating_point()
    )
    # 4 bits and 32 / 64 for the scale, of 16; blocks of 64 fill these weights exactly.
    assert after / before == 4.5 / 16


def test_backward_keeps_no_dense_weight(base: Path) -> None:
    model = load_in_nf4(base, adapter=LoraSpec(r=4, alpha=8))
    shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, Linear4D)}
    saved: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, 5, dtype=torch.long))
    assert len(saved) > LAYERS
    assert not shapes & set(saved)


def test_a_run_on_nf4_is_audited_and_merged_with_the_numbers_it_was_trained_on(
    base: Path, tmp_path: Path
) -> None:
    write_texts(tmp_path / "documents.jsonl", 20, words=24)
    path = write_run(
        tmp_path,
        model={"path": str(base)},
        adapter={"name": "lora", "r": 4, "quantization": "nf4", "target_modules": ["q_proj"]},
        optim={"lr": 1e-2},
        train={"max_steps": 4, "epochs": 4},
        audit={"min_documents": 1, "continuation_tokens": 6},
    )
    succeed("train", path)
    run = tmp_path / "runs" / "run"
    assert load_trained(run).base_quantization == "nf4"
    with safe_open(run / "adapter" / "adapter_model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "base_quantization": "nf4"}
    report = json.loads((run / "audit" / "report.json").read_text())
    assert report["model"]["adapter"]["description"] == "LoRA, r=4, alpha=8, base in nf4"
    # The loss that training measured last, on the control, is that of the merged weights.
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    trained = [line["nll"] for line in lines if line["event"] == "heldout"][-1]
    for form in ("stored", "merged"):
        # fp32 in another order.
        assert measure_form(run, form) == pytest.approx(trained, abs=1e-5)
    ended = succeed("export", run, tmp_path / "merged", "--merge", "--json")
    assert json.loads(ended.out)["difference"]["largest"] < 1e-4
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    source, _ = open_merged(run / "adapter")
    stored = transformers.AutoModelForCausalLM.from_pretrained(base)
    weights = [m.state_dict()["model.layers.0.mlp.up_proj.weight"] for m in (merged, stored)]
    # Layers without an adapter are the dequantised ones too.
    assert len(weights[0].unique()) < 16 * weights[0].numel() / 32
    assert 0 < float((weights[0] - weights[1]).abs().max()) < 0.2
    assert len(source.layers) == 2


def test_split_layers_and_a_missing_library_are_one_line(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "documents.jsonl")
    adapter = {"name": "lora", "quantization": "nf4"}
    path = write_run(tmp_path, model={"path": str(base)}, adapter=adapter)
    for degrees in (("parallel.x=2",), ("parallel.z=1", "parallel.x=-1")):
        ended = run_cli("train", path, "--nproc", 2, *degrees)
        assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
        assert "'parallel.x' must be 1 with 'adapter.quantization'; got " in ended.err
        assert "Use the axes data and z, or remove the setting" in ended.err
    with monkeypatch.context() as patch:
        patch.setattr(adapter_files, "version", lambda name: "2.11.0+cu130")
        ended = run_cli("train", path, "--nproc", 2, "parallel.z=2")
        assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
        assert "'adapter.quantization': torch 2.11.0+cu130 trains what FSDP2 splits" in ended.err
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    ended = run_cli("train", path, "--nproc", 1)
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert "nf4 needs bitsandbytes: pip install 'bitsandbytes>=0.50'" in ended.err
    assert not (tmp_path / "runs").exists()


def test_the_base_in_nf4_belongs_to_the_key_of_a_run(base: Path, tmp_path: Path) -> None:
    keys = {
        compute_run_key(
            load_run_config(
                write_run(
                    tmp_path,
                    model={"path": str(base)},
                    adapter={"name": "lora", **({"quantization": value} if value else {})},
                )
            ),
            summarise(1),
        )
        for value in (None, "nf4")
    }
    assert len(keys) == 2


def test_an_adapter_of_another_form_or_without_the_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)

    def mark(value: str) -> None:
        save_file(tensors, path, metadata={"format": "pt", "base_quantization": value})

    mark("fp4")
    with pytest.raises(ModelError, match="'base_quantization' must be nf4; got 'fp4'"):
        open_merged(tmp_path / "adapter")
    mark("nf4")
    source, _ = open_merged(tmp_path / "adapter")
    assert source.adapter.describe() == "LoRA, r=4, alpha=6, base in nf4"
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs bitsandbytes: pip install 'bitsandbytes>=0.50'"):
        open_merged(tmp_path / "adapter")


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run on a base in NF4."""
    folder = tmp_path_factory.mktemp("trained")
    write_texts(folder / "documents.jsonl")
    path = write_run(
        folder,
        model={"path": str(base)},
        adapter={"name": "lora", "r": 4, "lora_alpha": 8, "use_dora": True, "quantization": "nf4"},
        audit={"enabled": False, "dtype": "fp32"},
    )
    succeed("train", path)
    return folder / "runs" / "run"


def open_audited(
    model: Path,
    *,
    settings: AuditConfig,
    mesh: Any = None,
    runtime: Runtime | None = None,
    **given: Any,
) -> Any:
    """Return a model as an audit loads it."""
    runtime = runtime or Runtime()
    context = setup.DistributedContext(runtime=runtime, mesh=mesh)
    source = ModelSource(model=str(model), weights_sha256="of the files", **given)
    return LazyModel(source, settings, context)


def compute_hidden(lm: Any) -> Tensor:
    ids = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden: Tensor = lm(lambda: lm.hidden_states(ids))
    return hidden


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_audited_model_is_the_one_that_was_trained(base: Path, run: Path, dtype: str) -> None:
    adapter = run / "adapter"
    model = open_audited(adapter, settings=AuditConfig(dtype=dtype))
    lm = model.scorer()._lm
    assert list_nf4(lm.model).keys() == {
        f"{name}.weight" for name, _ in lm.model.named_modules() if name.endswith("_proj")
    }
    # The run, as it starts, with what was trained in the place of its first values.
    spec = LoraSpec(r=4, alpha=8, use_dora=True)
    trained = load_in_nf4(base, dtype=DTYPES[dtype], adapter=spec)
    stored = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if is_adapter_parameter(name):
                key = f"base_model.model.{name}"
                parameter.copy_(stored.pop(key, stored.pop(key.removesuffix(".weight"), None)))
    assert not stored
    # The same numbers and operations.
    assert torch.equal(compute_hidden(lm), compute_hidden(build_causal_lm(trained)))
    # Without the factors, whose number the report does not show.
    assert model.num_parameters == load_model(str(base)).num_parameters()
    assert "layers in nf4" in model.identity


def test_the_base_is_compared_in_the_form_in_which_it_was_trained_on(base: Path, run: Path) -> None:
    config = load_run_config(run / "config.yaml")
    _, target = plan_run(check_audit(AuditArguments(run=run)))
    form = find_base_quantization(target)
    assert form == "nf4"
    model = open_audited(base, settings=config.audit, quantization=form)
    plain = load_in_nf4(base)
    assert torch.equal(compute_hidden(model.scorer()._lm), compute_hidden(build_causal_lm(plain)))
    # Other models are compared as they are stored; without a run, the adapter names its base.
    alone = replace(target, run=None)
    assert find_base_quantization(alone) == "nf4"
    assert find_base_quantization(replace(alone, base=str(run))) is None
    assert find_base_quantization(replace(target, base=None)) is None
    assert find_base_quantization(replace(target, model=str(base))) is None


def load_over(degrees: MeshShape, adapter: Path) -> tuple[Tensor, bool]:
    """On a rank: hidden states of an audited model, and whether its layers are in NF4."""
    mesh = build_mesh(degrees, "cpu")
    lm = open_audited(adapter, settings=AuditConfig(dtype="fp32"), mesh=mesh).scorer()._lm
    return compute_hidden(lm), bool(list_nf4(lm.model))


@splits_nf4
def test_a_mesh_audits_the_same_model(run: Path, ranks: RankPool) -> None:
    alone = compute_hidden(
        open_audited(run / "adapter", settings=AuditConfig(dtype="fp32")).scorer()._lm
    )
    for hidden, is_nf4 in ranks(load_over, 2, MeshShape(z=2), run / "adapter"):
        assert is_nf4
        # Whole layers compute with whole weights.
        assert torch.equal(hidden, alone)
    for hidden, is_nf4 in ranks(load_over, 2, MeshShape(x=2), run / "adapter"):
        # Split layers are merged: fp32 in another order.
        assert not is_nf4
        torch.testing.assert_close(hidden, alone, rtol=0, atol=1e-4)


def generate(adapter: Path, degrees: MeshShape | None) -> list[list[int]]:
    """Return texts of an audited model; on a rank, whose memory does not hold all weights."""
    prompts = [
        Prompt(input_ids=np.arange(3 + n, 20 + n, dtype=np.int32), num_new=12, document=str(n))
        for n in range(5)
    ]
    mesh = None if degrees is None else build_mesh(degrees, "cpu")
    with start_runtime() as runtime:
        model = open_audited(
            adapter, settings=AuditConfig(dtype="fp32"), mesh=mesh, runtime=runtime
        )
        fits = mock.patch.object(CausalLM, "fits_gathered", return_value=degrees is None)
        with fits as asked:
            texts = model.decoder().continue_greedily(prompts)
        assert asked.called or degrees is None
    return [text.token_ids.tolist() for text in texts]


@pytest.mark.long
@splits_nf4
def test_eight_ranks_generate_from_nf4_that_is_gathered_for_each_token(
    run: Path, ranks: RankPool
) -> None:
    adapter = run / "adapter"
    alone = generate(adapter, None)
    assert len({tuple(text) for text in alone}) > 1
    # Five texts: three ranks have none.
    for texts in ranks(generate, 8, adapter, MeshShape(z=8)):
        assert texts == alone


def test_factors_of_other_ranks_are_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, rank_pattern={"layers.1.mlp.up_proj": 2})
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "base_quantization": "nf4"})
    with pytest.raises(ModelError, match=r"layer 'model\.layers\.1\.mlp\.up_proj' must have fact"):
        open_audited(tmp_path / "adapter", settings=AuditConfig(dtype="fp32")).scorer()
