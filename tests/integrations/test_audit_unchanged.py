"""An audit in memory leaves the model, the random numbers and the training as they were.

    losses      of each step, and trained weights: bit by bit those of a training without audits
    Snapshot    what an audit could leave changed, taken just before the callback and just after

Before each audit a gradient is set and one layer is switched to evaluation, as user code may do;
both are undone afterwards, so that they do not train anything.
"""

import os
import random
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kind_runs
import kinds
import numpy as np
import pytest
import torch
import transformers
from kind_runs import Trained, read_bytes
from kinds import KINDS, Training
from ranks import RankPool
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from memguard.model.evaluation import is_4bit

# Trainers and peft warn of what these tests mean: other processes, no GPU, tied weights.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
_LONG = pytest.mark.long
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
_PLAIN = (bool, int, float, str, type(None))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kinds.save_base(tmp_path_factory.mktemp("unchanged") / "base")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What an audit could leave changed; each a value by name."""

    modes: Mapping[str, bool]
    """`training` of every module."""
    attributes: Mapping[str, Any]
    """Simple attributes of every module, and which functions are its forward."""
    hooks: Mapping[str, int]
    requires_grad: Mapping[str, bool]
    tensors: Mapping[str, tuple[str, bytes]]
    """Kind and bytes of parameters, of this rank; buffers too."""
    gradients: Mapping[str, bytes | None]
    quantised: Mapping[str, bytes | bool]
    """Parts of the 4-bit weights' states."""
    sharding: Mapping[str, Any]
    """What FSDP2 keeps from one forward to the next, of every unit."""
    configs: Mapping[str, Any]
    generators: Mapping[str, Any]
    process: Mapping[str, Any]

    def list_changes(self, later: "Snapshot") -> list[str]:
        """Return the names of what differs."""
        changes = []
        for part in self.__dataclass_fields__:
            before, after = getattr(self, part), getattr(later, part)
            names = sorted({*before, *after})
            changes += [f"{part}: {n}" for n in names if before.get(n) != after.get(n)]
        return changes


def take_snapshot(model: Any) -> Snapshot:
    """Return the state of a model and of this process."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    numpy_state = np.random.get_state()  # noqa: NPY002 - that of the user's own code
    return Snapshot(
        modes={name: module.training for name, module in modules.items()},
        attributes=dict(_list_attributes(modules)),
        hooks={
            f"{name} {kind}": len(getattr(module, kind))
            for name, module in modules.items()
            for kind in _HOOKS
        }
        | {kind: len(getattr(torch.nn.modules.module, f"_global{kind}")) for kind in _HOOKS[:4]},
        requires_grad={name: each.requires_grad for name, each in parameters.items()},
        tensors={name: (type(each).__name__, read_bytes(each)) for name, each in tensors.items()},
        gradients={
            name: None if each.grad is None else read_bytes(each.grad)
            for name, each in parameters.items()
        },
        quantised=dict(_list_quantised(modules)),
        sharding=dict(_list_sharding(modules)),
        configs={
            "config": model.config.to_dict(),
            "attention": model.config._attn_implementation,
            "generation": model.generation_config.to_dict(),
        },
        generators={
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy": (numpy_state[1].tobytes(), numpy_state[2:]),
            "python": random.getstate(),
        },
        process={
            "gradients": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "threads": torch.get_num_threads(),
            **{f"environment {name}": value for name, value in os.environ.items()},
            "folder": Path.cwd(),
            "signals": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)],
        },
    )


def _list_attributes(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, module in modules.items():
        for key, value in vars(module).items():
            if key in ("forward", "_compiled_call_impl", "generate", "_original_forward"):
                yield f"{name} {key}", id(value)
            elif isinstance(value, _PLAIN):
                yield f"{name} {key}", value


def _list_quantised(modules: Mapping[str, Any]) -> Iterator[tuple[str, bytes | bool]]:
    for name, module in modules.items():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            yield f"{name} is packed", bool(getattr(state, "packing_format_for_cpu", False))
            yield f"{name} shape", str((tuple(module.weight.shape), state.shape)).encode()
            for key, value in state.as_dict(packed=True).items():
                yield f"{name} {key}", read_bytes(value)


def _list_sharding(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, module in modules.items():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            shared = state._comm_ctx
            # Backward gathers in the order of what has run since the last one.
            yield f"{name} has run", len(getattr(shared, "post_forward_order", ()))
            yield f"{name} gathers", getattr(shared, "all_gather_state", None) is not None
            for group in state._fsdp_param_groups:
                yield f"{name} runs", list(group._post_forward_indices)
                yield f"{name} state", str(group._training_state)
                yield f"{name} is gathering", group._all_gather_result is not None
                yield f"{name} reshards", group._reshard_after_forward


class Before(transformers.TrainerCallback):
    """Disturbs the model, and takes a snapshot before the callback under test."""

    def __init__(self) -> None:
        self.first: Snapshot | None = None
        """Before training."""
        self.snapshot: Snapshot | None = None
        self.undo: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first = take_snapshot(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        parameter = next(each for each in model.parameters() if each.requires_grad)
        assert parameter.grad is None, "the Trainer has stepped"
        parameter.grad = torch.ones_like(parameter)
        layer = next(
            module for module in model.modules() if "DecoderLayer" in type(module).__name__
        )
        was_training = layer.training
        layer.eval()
        self.undo = [lambda: layer.train(was_training), lambda: setattr(parameter, "grad", None)]
        self.snapshot = take_snapshot(model)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        if any(is_4bit(module) for module in model.modules()):
            # On a CPU with AVX512-BF16 bitsandbytes packs the weights of an evaluation; reading the
            # state unpacks them, here as in an audit.
            model.state_dict()
        self.snapshot = take_snapshot(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The hook that counts what is trained ends with training.
        assert self.first is not None
        now, name = take_snapshot(kwargs["model"]), " _forward_pre_hooks"
        self.snapshot = replace(now, hooks={**now.hooks, name: self.first.hooks[name]})


class After(transformers.TrainerCallback):
    """Compares with the snapshot after the callback under test."""

    def __init__(self, before: Before, watched: Any = None) -> None:
        self.before = before
        self.changes: list[str] = []
        self.num_compared = 0

    def _compare(self, when: str, model: Any) -> None:
        before, after = self.before.snapshot, take_snapshot(model)
        assert before is not None
        changes = before.list_changes(after)
        if isinstance(model, FSDPModule):
            # Of an evaluation of the Trainer before it, an audit frees the gathered weights.
            left = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
            changes += [f"{name} is left gathered" for name in left]
            if when.startswith("evaluation"):
                changes = [c for c in changes if not c.startswith(("tensors: ", "sharding: "))]
        self.changes += [f"{when}: {change}" for change in changes]
        self.num_compared += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._compare(f"step {state.global_step}", kwargs["model"])
        for undo in self.before.undo:
            undo()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._compare(f"evaluation at {state.global_step}", kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._compare("end", kwargs["model"])


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A training without audits and the same with them, on one rank."""

    plain: Trained
    audited: Trained
    changes: list[str]
    num_compared: int


def train_watched(training: Training, audit: Mapping[str, Any]) -> list[Watched]:
    """Train without and with audits; also resumed from the first checkpoint if there is one."""
    folders = [training.output / name for name in ("plain", "resumed")]
    runs = [replace(training, output=folders[0])]
    if training.evaluates or training.saves_at:
        runs.append(replace(training, output=folders[1], resumes=folders[0] / "checkpoint-2"))
    watched = []
    for run in runs:
        plain = kind_runs.train(run)
        before = Before()
        after = After(before)
        audited_run = replace(run, output=run.output / "audited")
        audited = kind_runs.train(audited_run, audit, before=[before], after=[after])
        watched.append(
            Watched(
                plain=plain, audited=audited, changes=after.changes, num_compared=after.num_compared
            )
        )
    return watched


_VARIANTS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "checkpointing": {"checkpointing": True},
    "accumulation": {"accumulation": 2},
    "resumed": {"saves_at": 2},
    "evaluates": {"evaluates": True},
    "all": {"checkpointing": True, "accumulation": 2, "evaluates": True},
}
_QUICK = {
    ("compiled", "transformers", "plainly"),
    ("fsdp2", "transformers", "evaluates"),
    ("lora", "trl", "all"),
    ("nf4_lora", "trl", "plainly"),
}


def list_cases() -> list[Any]:
    """Every kind, trainer and variant; one variant alone by one trainer."""
    cases = []
    for kind in KINDS.values():
        for by in ("transformers", "trl"):
            is_usual = by == ("trl" if kind.adapter else "transformers")
            for variant in _VARIANTS if is_usual else ("plainly", "all"):
                case = (kind.name, by, variant)
                cases.append(pytest.param(*case, marks=() if case in _QUICK else _LONG))
    return cases


def test_layers_in_4_bits_never_leave_training_mode(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this CPU is: on some, bitsandbytes repacks a weight at its first evaluation."""
    from bitsandbytes.nn import Linear4bit  # Ranks that import this module do not need it.

    modes: list[bool] = []
    forward = Linear4bit.forward

    def note(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        modes.append(layer.training)
        return forward(layer, hidden)

    monkeypatch.setattr(Linear4bit, "forward", note)
    training = Training(kind="nf4_lora", base=base, output=tmp_path, steps=2)
    kind_runs.train(training)
    num_trained = len(modes)
    kind_runs.train(training, {"base": "adapter-off"})
    assert len(modes) > 2 * num_trained > 0
    assert all(modes)


@pytest.mark.parametrize(("kind", "by", "variant"), list_cases())
def test_training_is_the_same_with_and_without_audits(
    kind: str, by: Any, variant: str, base: Path, tmp_path: Path, ranks: RankPool
) -> None:
    training = Training(
        kind=kind,
        base=base,
        output=tmp_path,
        by=by,
        steps=5,
        dropout=0.5 if KINDS[kind].adapter else 0.0,
        **_VARIANTS[variant],
    )
    # Either way after steps 2 and 4, and at the end.
    audit = {"on_evaluate": True} if training.evaluates else {"every_steps": 2}
    for runs in kinds.call(ranks, kind, train_watched, training, audit):
        for run, steps in zip(runs, ([2, 4, 5], [4, 5]), strict=False):
            assert run.changes == []
            assert run.num_compared >= len(steps)
            assert run.audited.losses == run.plain.losses, "bit by bit"
            assert run.audited.weights == run.plain.weights
            # The end: the last step, or of the best model that was loaded unless it was audited.
            last = run.audited.best_step
            expected = [*steps, *([last] if last is not None and last not in steps else [])]
            assert [each.name for each in run.audited.folders] == [f"step-{n}" for n in expected]
            assert len(run.plain.losses) == training.steps
            if KINDS[kind].sharding == "fsdp2":
                assert run.plain.num_sharded == run.plain.num_parameters
