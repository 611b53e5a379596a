"""Training steps in the arithmetic and by the kernels of a GPU, against fp32 without any of them.

The other side is transformers' own model on one document at a time in float32, so that neither
packing, nor masks, nor attention kernels are shared. Each test runs on the CPU too.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from step_examples import make_batch, make_step
from tiny_families import COMPILES_SELECTIVE, build
from torch import Tensor
from torch.nn import functional

from memguard.config import OptimConfig
from memguard.data.loader import Batch
from memguard.model.checks import build_causal_lm
from memguard.parallel.shard import checkpoint_blocks, compile_blocks
from memguard.records import IGNORE_LABEL
from memguard.runtime import fast_matmuls

# Head dimension 16, the least that flash attention's kernels take; four query heads share two of
# keys and values.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
STARTS = ((0, 9, 20), (0, 31))
NUM_TOKENS = 40

# bf16 has 8 bits: 4e-3 an operation, some dozen operations deep, and gradients of a parameter are
# sums of products of such values. float32 is 6e-8 an operation.
BF16 = {"loss": 5e-3, "gradient": 0.1}
FP32 = {"loss": 1e-6, "gradient": 1e-4}


@pytest.fixture(autouse=True)
def _plain_fp32() -> Iterator[None]:
    """Multiply fp32 matrices without TF32, whatever a run has set before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def draw_batch() -> Batch:
    """Two packed rows of three and of two documents."""
    shape = (len(STARTS), NUM_TOKENS)
    input_ids = np.random.default_rng(0).integers(3, 97, shape)
    is_first = np.zeros(shape, dtype=bool)
    for row, starts in enumerate(STARTS):
        is_first[row, list(starts)] = True
    columns = np.broadcast_to(np.arange(NUM_TOKENS), shape)
    labels = np.where(is_first, IGNORE_LABEL, input_ids)
    return make_batch(
        input_ids,
        labels,
        position_ids=columns - np.maximum.accumulate(np.where(is_first, columns, 0), axis=1),
        document_ids=is_first.cumsum(1) - 1,
    )


@dataclass(frozen=True, kw_only=True)
class Expected:
    loss: float
    gradients: dict[str, Tensor]


def train_plainly(model: Any, device: torch.device) -> Expected:
    """Return the mean loss over all labels and its gradients, one document at a time."""
    model = model.to(device).train()
    losses = []
    batch = draw_batch()
    for row, starts in enumerate(STARTS):
        for first, last in zip(starts, (*starts[1:], NUM_TOKENS), strict=True):
            ids = torch.from_numpy(batch.input_ids[row : row + 1, first:last]).to(device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            losses.append(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    loss = torch.stack(losses).sum() / batch.num_kept
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return Expected(loss=float(loss.detach()), gradients=gradients)


def take_step(
    device: torch.device, *, family: str = "llama", checkpointing: str = "none", **train: Any
) -> Expected:
    """Return the same of one step of memguard."""
    model = build(family, **SIZES).to(device)
    lm = build_causal_lm(model)
    checkpoint_blocks(model, checkpointing)  # type: ignore[arg-type]
    if train.get("compile"):
        compile_blocks(model)
    model.train()
    config = {"batch_size": 2, "activation_checkpointing": checkpointing}
    step = make_step(lm, device=device, **{**config, **train})
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        for parameter in step.parameters:
            assert parameter.local.grad.dtype == torch.float32, "weights and gradients are fp32"
            gradients[parameter.name] = parameter.local.grad.clone()

    step.optimizer.inner.register_step_pre_hook(keep)
    result = step.run(draw_batch(), lr=1e-3, step=1, first_sample=0)
    assert result.loss is not None
    for parameter in step.parameters:
        assert parameter.local.isfinite().all()
    return Expected(loss=result.loss, gradients=gradients)


def assert_near(ours: Expected, theirs: Expected, tolerance: dict[str, float]) -> None:
    assert ours.loss == pytest.approx(theirs.loss, rel=tolerance["loss"])
    largest = max(float(gradient.norm()) for gradient in theirs.gradients.values())
    for name, gradient in ours.gradients.items():
        expected = theirs.gradients[name]
        # Relative to the parameter's own gradient, unless that is nearly zero.
        size = max(float(expected.norm()), 1e-2 * largest)
        assert float((gradient - expected).norm()) <= tolerance["gradient"] * size, name


def test_fp32_equals_one_document_at_a_time(device: torch.device) -> None:
    theirs = train_plainly(build("llama", **SIZES), device)
    assert_near(take_step(device, precision="fp32"), theirs, FP32)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
def test_bf16_stays_near_fp32(device: torch.device, family: str) -> None:
    """Under autocast on one process, through whichever attention kernel the device chooses."""
    theirs = train_plainly(build(family, **SIZES), device)
    ours = take_step(device, family=family, precision="bf16")
    assert_near(ours, theirs, BF16)
    # That bf16 was used at all.
    assert ours.loss != theirs.loss


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputed_blocks_give_the_same_gradients(
    device: torch.device, checkpointing: str, precision: str
) -> None:
    theirs = take_step(device, precision=precision)
    ours = take_step(device, precision=precision, checkpointing=checkpointing)
    # The same operations; a kernel's backward on a GPU may add in another order.
    assert_near(ours, theirs, FP32 if precision == "fp32" else BF16)


@pytest.mark.long
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler to compile with"
)
# The compiler warns of what it does itself, such as reading the gradient of a tensor without one.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_compiled_blocks_stay_near_fp32(device: torch.device, checkpointing: str) -> None:
    if checkpointing == "selective" and not COMPILES_SELECTIVE:
        pytest.skip("refused with this transformers")
    theirs = train_plainly(build("llama", **SIZES), device)
    ours = take_step(device, precision="bf16", compile=True, checkpointing=checkpointing)
    assert_near(ours, theirs, BF16)


def test_a_matrix_product_of_training_keeps_ten_bits(device: torch.device) -> None:
    """TF32 has a mantissa of 10 bits: what training sets for fp32 loses no more than that."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()

    def measure_error() -> float:
        product = (left.to(device) @ right.to(device)).double().cpu()
        return float((product - exact).norm() / exact.norm())

    with fast_matmuls(device):
        error = measure_error()
        # Ten bits in place of the 24 of fp32, in every product of the step.
        ours = take_step(device, precision="fp32")
    assert error < 2**-10
    assert measure_error() < 1e-6, "only in training"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        assert error > 1e-5, "TF32 is used"
    theirs = train_plainly(build("llama", **SIZES), device)
    assert_near(ours, theirs, {"loss": 1e-3, "gradient": 2e-2})


def test_a_second_step_goes_downhill_on_the_device(device: torch.device) -> None:
    """AdamW's fused kernel updates weights on the device: the loss of the same rows falls."""
    model = build("llama", **SIZES).to(device).train()
    train = {"batch_size": 2, "micro_batch_size": 1, "precision": "bf16"}
    step = make_step(build_causal_lm(model), optim=OptimConfig(), device=device, **train)
    batch = draw_batch()
    losses = [
        step.run(batch, lr=3e-3, step=number, first_sample=0).loss or 0.0 for number in (1, 2, 3)
    ]
    assert losses == sorted(losses, reverse=True)
    assert step.optimizer.inner.param_groups[0]["fused"]
    state = step.optimizer.inner.state[step.parameters[0].local]
    assert state["exp_avg"].device.type == device.type
