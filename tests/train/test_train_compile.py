"""Whole runs whose blocks are compiled by `train.compile: auto`, and ranks where that fails.

torch.compile is replaced by stand-ins that call the block as it is, and the GPU by the name of its
device type: what is tested is which ranks do what. The last test calls the compiler itself.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from run_examples import copy_run, make_run, read_losses, run_folder, train_checked
from tiny_llama import TINY_LLAMA
from torch import Tensor
from torch import distributed as dist

from memguard.config import RunConfig
from memguard.parallel.hf_plan import find_blocks
from memguard.records.run_files import CompileChoice, load_compile_choice
from memguard.runtime import Console, Runtime
from memguard.train.trainer import Trainer
from memguard.workflows.common.setup import DistributedContext
from memguard.workflows.training import compile as compile_module
from memguard.workflows.training.compile import find_compile_problem
from memguard.workflows.training.data import build_training_data, prepare
from memguard.workflows.training.memory import resolve_auto_for_documents

pytestmark = pytest.mark.slow

HOUR_S = 3600.0
NO_AUDIT: dict[str, Any] = {"audit": {"enabled": False}}


class FailsInBackward(torch.autograd.Function):
    """What a compiler does that fails where torch compiles the backward of a graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("backend='stand-in' raised:\n\nno kernel for this backward")


class StandIn:
    """A compiler that calls the function as it is, in place of `torch.compile`."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.shapes: list[tuple[int, ...]] = []
        """Of the hidden states that compiled blocks were called with."""

    def __call__(self, function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            hidden = [value for value in args if isinstance(value, Tensor)]
            self.shapes.append(tuple(hidden[0].shape) if hidden else ())
            result = function(*args, **kwargs)
            return FailsInBackward.apply(result) if self.fails else result  # type: ignore[no-untyped-call]

        return call


def train_as_on_a_gpu(
    config: RunConfig, failing_ranks: tuple[int, ...] = (), planned_s: float = HOUR_S
) -> tuple[StandIn, int, list[bool], int]:
    """Train a run as if its device were a GPU.

    Returns:
        The compiler; calls of it before training; whether each block was compiled in training; the
        change of the number of process groups by the choice.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    compiler = StandIn(fails=rank in failing_ranks)
    compiled: list[bool] = []
    num_tried, num_groups = 0, 0
    train, choose = Trainer.run, compile_module.find_compile_problem
    decide = compile_module.decide_compile

    def run(self: Trainer) -> None:
        nonlocal num_tried
        num_tried = len(compiler.shapes)
        blocks = [self.step.lm.model.get_submodule(n) for n in find_blocks(self.step.lm.model)]
        compiled.extend(block._compiled_call_impl is not None for block in blocks)
        train(self)

    def find(*args: Any) -> str | None:
        nonlocal num_groups
        before = _count_groups()
        problem = choose(*args)
        num_groups = _count_groups() - before
        return problem

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compiler)
        patch.setattr(
            compile_module,
            "decide_compile",
            lambda config, **given: decide(config, **{**given, "device_type": "cuda"}),
        )
        patch.setattr(compile_module, "estimate_run_s", lambda *_: planned_s)
        patch.setattr(compile_module, "find_compile_problem", find)
        patch.setattr(Trainer, "run", run)
        train_checked(config)
    return compiler, num_tried, compiled, num_groups


def _count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else 0


def train_on_ranks(config: RunConfig, failing_ranks: tuple[int, ...]) -> tuple[list[bool], int]:
    """On a rank: see `train_as_on_a_gpu`."""
    _, _, compiled, num_groups = train_as_on_a_gpu(config, failing_ranks)
    return compiled, num_groups


def load_choice(config: RunConfig) -> CompileChoice | None:
    return load_compile_choice(run_folder(config))


# One key/value head, which both ranks of x share: its group is replaced too.
ONE_KEY_HEAD = {"scratch": {"config": {**TINY_LLAMA, "num_key_value_heads": 1}, "vocab_size": 400}}


@pytest.mark.parametrize("mesh", [{"x": 2}, pytest.param({"z": 2}, marks=pytest.mark.mesh)])
def test_where_the_compiler_fails_in_backward_on_one_rank_all_go_on_eagerly(
    tmp_path: Path, ranks: RankPool, mesh: dict[str, int]
) -> None:
    """Both ranks of x wait for each other in every block: a failing one would stop the other."""
    short = {"train": {"max_steps": 2}, "model": ONE_KEY_HEAD, "parallel": mesh, **NO_AUDIT}
    config = make_run(tmp_path, **short)
    for compiled, num_groups in ranks(train_on_ranks, 2, config, (1,)):
        assert compiled == [False, False]
        assert num_groups == 0
    choice = load_choice(config)
    assert choice is not None
    assert not choice.is_on
    assert choice.reason == (
        "compiling one block failed on rank 1: RuntimeError: no kernel for this backward"
    )
    # The steps are those of a run that never tried; the same operations in the same order.
    plain = make_run(tmp_path, name="plain", **short)
    ranks(train_checked, 2, plain)
    assert read_losses(config) == read_losses(plain)


def test_where_the_compiler_works_on_all_ranks_all_compile(tmp_path: Path, ranks: RankPool) -> None:
    config = make_run(
        tmp_path, train={"max_steps": 2}, model=ONE_KEY_HEAD, parallel={"x": 2}, **NO_AUDIT
    )
    for compiled, num_groups in ranks(train_on_ranks, 2, config, ()):
        assert compiled == [True, True]
        assert num_groups == 0
    choice = load_choice(config)
    assert choice is not None
    assert choice.is_on


def test_one_block_is_tried_with_the_rows_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"micro_batch_size": 4, "max_steps": 2}
    config = make_run(tmp_path, train=rows, **NO_AUDIT)
    compiler, num_tried, compiled, _ = train_as_on_a_gpu(config)
    assert compiled == [True, True]
    # The first micro-batches of two steps; each may have its own length.
    tried, trained = compiler.shapes[:num_tried], compiler.shapes[num_tried:]
    assert len(tried) == 2
    assert set(tried) <= set(trained)
    assert all(shape[0] == 4 for shape in tried)
    assert "compile: decoder blocks are compiled (the run is" in capsys.readouterr().err


def test_a_resumed_run_keeps_its_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_run(tmp_path, train={"max_steps": 2}, **NO_AUDIT)
    train_as_on_a_gpu(config)
    assert load_choice(config) == CompileChoice(
        is_on=True, reason="the run is planned to take 60:00 min"
    )
    first = copy_run(config, tmp_path / "first")
    for resumed in (config, first):
        # Training is repeated from its last checkpoint where the exported model is missing.
        shutil.rmtree(run_folder(resumed) / "model")
    capsys.readouterr()
    # It would be too short to begin with.
    _, num_tried, compiled, _ = train_as_on_a_gpu(config, planned_s=1.0)
    assert compiled == [True, True]
    assert num_tried == 2
    assert "are compiled, as when the run began" in capsys.readouterr().err
    # Where a block cannot be compiled any more, it goes on without.
    _, _, compiled, _ = train_as_on_a_gpu(first, failing_ranks=(0,))
    assert compiled == [False, False]
    assert "warning: decoder blocks are not compiled" in capsys.readouterr().err
    choice = load_choice(first)
    assert choice is not None
    assert choice.reason.startswith("compiling one block failed: RuntimeError")


def test_on_a_cpu_nothing_is_tried_and_nothing_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "find_compile_problem", pytest.fail)
    config = make_run(tmp_path, train={"max_steps": 1}, **NO_AUDIT)
    train_checked(config)
    assert load_choice(config) == CompileChoice(is_on=False, reason="the run began on a CPU")
    assert "compile" not in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler to compile with"
)
# The compiler reads them of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_torch_compiles_the_block(tmp_path: Path) -> None:
    # One step: its shapes are compiled once.
    config = make_run(tmp_path, train={"batch_size": 64, "micro_batch_size": 4, "epochs": 1})
    config = resolve_auto_for_documents(config, "cpu")
    prepared = prepare(config, tmp_path / "run", Console())
    loader = build_training_data(config, prepared, share_rows=True).loader
    assert loader.num_steps == 1
    alone = DistributedContext(runtime=Runtime(), mesh=None)
    assert find_compile_problem(config, prepared.tokenizer, loader, alone) is None
