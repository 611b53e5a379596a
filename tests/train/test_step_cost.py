"""What the lines of metrics.jsonl say a step costs, against hand calculations."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from run_examples import QUIET, make_run, read_lines, train_checked
from step_flops import count_flops
from tiny_llama import TINY_LLAMA
from torch import nn

from memguard.config import OptimConfig
from memguard.data.loader import Batch, Loader
from memguard.data.packing import Rows
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.compute import count_token_flops
from memguard.planner.machine import load_machine
from memguard.planner.step_settings import AdapterSizes, StepOptions, StepSettings
from memguard.runtime import Runtime
from memguard.train.metrics import StepMetrics
from memguard.train.prefetch import Prefetcher
from memguard.train.step import TrainStep
from memguard.train.step_cost import measure_cost
from memguard.workflows.training import memory

SIZES = ModelSizes(
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1408,
    vocab_size=4096,
    num_layers=3,
)


@pytest.mark.parametrize(
    "options",
    [
        StepOptions(),
        StepOptions(trained_modules=("lm_head", "layers.2", "embed_tokens")),
        StepOptions(adapter=AdapterSizes(r=4), trained_modules=None),
    ],
    ids=["all", "some", "adapters"],
)
def test_flop_by_hand_and_by_torch(options: StepOptions) -> None:
    """`step_flops` is compared with what torch counts."""
    settings = StepSettings(
        num_tokens=100,
        num_labels=70,
        adapter=options.adapter,
        trained_modules=options.trained_modules,
    )
    token, pair, label = count_token_flops(SIZES, options)
    expected = count_flops(SIZES, MeshShape(), settings, seq_len=19)
    if options.adapter is not None:
        # The input of the first block needs no gradient, which only the step's own count knows.
        expected += 2 * 100 * 512 * (512 + 2 * 256 + 3 * 4)
    # A token of whole rows of 19 attends to 10.
    assert 100 * token + 1000 * pair + 70 * label == expected
    if options == StepOptions():
        block = 512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * 1408
        assert (token, pair, label) == (6 * 3 * block, 12 * 3 * 512, 6 * 512 * 4096)


def test_ranks_share_the_peak() -> None:
    """Two rows of pieces of 2, 3 and 4 tokens, on 4 ranks, in 2 seconds."""
    model, nothing = nn.Linear(2, 3), np.zeros(3, dtype=np.int64)
    lengths = np.array([2, 3, 4])
    rows = Rows(row_start=np.array([0, 2, 3]), document=nothing, start=nothing, stop=lengths)
    step: Any = SimpleNamespace(
        lm=SimpleNamespace(model=model), parameters=[], optimizer=None, optim=OptimConfig()
    )
    loader: Any = SimpleNamespace(rows=rows, schedule=np.array([1, 0, 1]))
    run: Any = SimpleNamespace(runtime=Runtime(world_size=4), peak_s=(0.1, 0.01, 0.2))
    cost = measure_cost(step, loader, run, range(1, 3), 5, 2.0)
    assert cost["tokens_per_s_per_gpu"] == pytest.approx(9 / 8, abs=0.05)
    # 3, 6 and 10 pairs.
    assert cost["mfu"] == pytest.approx((9 * 0.1 + 19 * 0.01 + 5 * 0.2) / 8, rel=1e-3)
    assert cost["tokens_per_s"] == 2.5


def test_waits_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 5.0, 7.0, 8.0, 8.25])
    clock = SimpleNamespace(perf_counter=lambda: next(moments))
    monkeypatch.setattr("memguard.train.prefetch.time", clock)
    with Prefetcher(lambda _: Batch.__new__(Batch)) as batches:
        batches.take(1)
        assert batches.waited_s == 1
        batches.start(2)
        batches.peek()
        assert batches.waited_s == 3
        batches.take(2)
        assert batches.waited_s == 0.25


@pytest.mark.slow
def test_a_slow_loader_shows_as_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built and computed is measured too: both depend on the machine's other load."""
    built: list[float] = []
    computed: list[float] = []
    build, run = Loader.batch, TrainStep.run

    def batch(self: Loader, *arguments: Any, **settings: Any) -> Batch:
        started = time.perf_counter()
        time.sleep(1.0)
        result = build(self, *arguments, **settings)
        built.append(time.perf_counter() - started)
        return result

    def timed_run(self: TrainStep, *arguments: Any, share: Any, **settings: Any) -> Any:
        started = time.perf_counter()

        def timed_share() -> Any:
            computed.append(time.perf_counter() - started)
            return share()

        return run(self, *arguments, share=timed_share, **settings)

    monkeypatch.setattr(Loader, "batch", batch)
    monkeypatch.setattr(TrainStep, "run", timed_run)
    config = train_checked(make_run(tmp_path, train={"max_steps": 5}, **QUIET))
    waits = [line.wait_data_s or 0 for line in read_lines(config, StepMetrics)]
    # The first step waits for its own batch, then each for the next one, which is built meanwhile.
    late = [max(0, one - other) for one, other in zip(built[1:], computed[:-1], strict=True)]
    assert sum(waits) == pytest.approx(built[0] + sum(late), rel=0.1)
    assert waits[0] > 1.0
    assert waits[-1] < 0.1


@pytest.mark.slow
def test_a_run_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = load_machine("dgx-h100")
    monkeypatch.setattr(memory, "_detect", lambda *_: machine)
    calls: list[Any] = []

    def measure(step: Any, loader: Any, run: Any, samples: range, *others: Any) -> Any:
        calls.append((loader, samples, *others))
        return measure_cost(step, loader, run, samples, *others)

    monkeypatch.setattr("memguard.train.trainer.measure_cost", measure)
    train = {"max_steps": 3, "checkpoint_every_steps": 1, "batch_size": 4}
    config = train_checked(make_run(tmp_path, train=train, **QUIET))
    lines, c = read_lines(config, StepMetrics), TINY_LLAMA
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    # Half as many keys and values as queries.
    block = hidden * 3 * hidden + 3 * hidden * c["intermediate_size"]
    for line, (loader, samples, num_kept, took_s) in zip(lines, calls, strict=True):
        rows, flop, num_tokens = loader.rows, 6 * hidden * 400 * line.num_kept_tokens, 0
        for sample in samples:
            row = loader.schedule[sample]
            for piece in range(rows.row_start[row], rows.row_start[row + 1]):
                length = int(rows.stop[piece] - rows.start[piece])
                num_tokens += length
                # Forward and twice as much in backward: scores and values of each pair.
                flop += 6 * block * layers * length
                flop += sum(3 * 2 * 2 * hidden * layers * (place + 1) for place in range(length))
        assert num_kept == line.num_kept_tokens
        assert line.mfu == pytest.approx(flop / took_s / machine.peak_flops(4), rel=0.001)
        assert line.tokens_per_s_per_gpu == pytest.approx(num_tokens / took_s, rel=0.001)
        kinds = line.memory_bytes
        assert kinds is not None
        assert list(kinds) == ["weights", "gradients", "optimizer", "other"]
        assert kinds["weights"] >= kinds["gradients"] > 4 * block * layers
        assert kinds["optimizer"] == pytest.approx(2 * kinds["gradients"], rel=0.01)
        assert sum(kinds.values()) == line.peak_memory_bytes
    assert lines[0].wait_save_s == 0
    assert (lines[1].wait_save_s or 0) > 0, "the state was copied after step 1"
    monkeypatch.undo()
    config = train_checked(make_run(tmp_path, name="cpu", train={"max_steps": 1}, **QUIET))
    assert [line.mfu for line in read_lines(config, StepMetrics)] == [None]
