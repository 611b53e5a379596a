"""Runs of the trainings of `kinds`, with or without the callback, and what they leave.

    train(training, audit)             trains, in this process or as a rank  ->  Trained
    save_trained, save_dequantised     folders that an audit by name reads

`kinds.call(ranks, kind, train, ...)` runs it on as many processes as the kind has.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from kinds import KINDS, Training, load_model, load_tokenizer, members, nonmembers, open_trainer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

SETTINGS: Mapping[str, Any] = {
    "continuation_tokens": 10,
    "min_prefix_tokens": 4,
    "min_documents": 2,
    "cache": False,
}
"""Of every audit."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run leaves, of one rank."""

    losses: list[float]
    history: list[dict[str, Any]]
    """The Trainer's."""
    folders: list[Path]
    """Of the audits."""
    num_steps: int
    best_step: int | None
    """Step of the checkpoint that was loaded at the end; None if none was."""
    model_class: str
    num_parameters: int
    num_sharded: int
    """Parameters that are DTensors after training."""
    weights: str
    """Hash of this rank's trained parameters."""


def train(
    training: Training,
    audit: Mapping[str, Any] | None = None,
    *,
    saved: Path | None = None,
    before: Sequence[Any] = (),
    after: Sequence[Any] = (),
) -> Trained:
    """Train, with or without the callback.

    Args:
        training: the run.
        audit: arguments of `MemorizationAuditCallback`; None trains without it.
        saved: folder that the trained model is written to.
        before: callbacks that come before it.
        after: callbacks that come after it.
    """
    callback = None if audit is None else make_callback(training, audit)
    callbacks = [*before, *([] if callback is None else [callback]), *after]
    trainer = open_trainer(training, callbacks)
    resumes = None if training.resumes is None else str(training.resumes)
    trainer.train(resume_from_checkpoint=resumes)
    outcome = describe(trainer, callback)
    if saved is not None:
        save_trained(trainer, training, saved)
    return outcome


def make_callback(training: Training, audit: Mapping[str, Any]) -> Any:
    """Return the callback over the documents of all trainings."""
    from memguard.integrations.transformers import MemorizationAuditCallback

    given = {"members": members(), "nonmembers": nonmembers(), **SETTINGS, **audit}
    return MemorizationAuditCallback(**{"out": training.output / "audits", **given})


def describe(trainer: Any, callback: Any = None) -> Trained:
    """Return what a run has left on this rank."""
    parameters = list(trainer.model.parameters())
    digest = hashlib.sha256()
    for parameter in parameters:
        if parameter.requires_grad:
            digest.update(read_bytes(parameter))
    return Trained(
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        history=trainer.state.log_history,
        folders=[] if callback is None else list(callback.folders),
        num_steps=trainer.state.global_step,
        best_step=trainer.state.best_global_step if trainer.args.load_best_model_at_end else None,
        model_class=type(trainer.model).__name__,
        num_parameters=len(parameters),
        num_sharded=sum(isinstance(parameter, DTensor) for parameter in parameters),
        weights=digest.hexdigest(),
    )


def read_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, of a DTensor those of this rank."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # A copy: storage that numpy shares can no longer be resized, as FSDP2 does.
    copied = local.detach().cpu().clone(memory_format=torch.contiguous_format)
    return copied.reshape(-1).view(torch.uint8).numpy().tobytes()


def save_trained(trainer: Any, training: Training, folder: Path) -> None:
    """Write the trained model; an adapter as peft's folder. All ranks call this."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    given = {}
    if KINDS[training.kind].sharding == "fsdp2":
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        given["state_dict"] = get_model_state_dict(model, options=whole)
    if trainer.is_world_process_zero():
        model.save_pretrained(folder, **given)
        load_tokenizer(training.base).save_pretrained(folder)


def save_dequantised(training: Training, folder: Path) -> Path:
    """Write the base of a 4-bit training in fp32, with the values that its 4 bits are for."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    quantised = load_model(KINDS[training.kind], training)
    plain = transformers.AutoModelForCausalLM.from_pretrained(training.base, dtype=torch.float32)
    layers = {n: m for n, m in quantised.named_modules() if isinstance(m, Linear4bit)}
    with torch.no_grad():
        for name, layer in layers.items():
            values = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            plain.get_submodule(name).weight.copy_(values)
    plain.save_pretrained(folder)
    load_tokenizer(training.base).save_pretrained(folder)
    return folder
