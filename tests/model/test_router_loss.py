"""The load-balancing loss of experts is that of transformers, on one process."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from step_examples import make_batch, make_step
from tiny_families import VOCAB_SIZE, build
from torch import Tensor

from memguard.config.mitigations import DpSgdConfig
from memguard.data.loader import Batch
from memguard.errors import ModelError
from memguard.model.checks import build_causal_lm
from memguard.model.router_loss import check_recorded, explain_missing, find_router_loss
from memguard.parallel.shard import checkpoint_blocks
from memguard.records import IGNORE_LABEL
from memguard.train.dp_sgd import RowClipping
from memguard.train.step import TrainStep

NUM_ROWS, NUM_TOKENS = 4, 8
# Of transformers' causal LMs, those whose tiny model has a forward on a CPU.
FAMILIES = (
    *("ernie4_5_moe", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared"),
    *("jetmoe", "laguna", "mellum", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral"),
    *("olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
)
COEFFICIENT = 1.0
# fp32: 1e-7 an operation, some hundred operations deep.
SINGLE = 1e-5


def build_with_loss(family: str) -> Any:
    model = build(family, output_router_logits=True)
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if hasattr(model, name):
            setattr(model, name, COEFFICIENT)
    return model


def draw_rows() -> tuple[Tensor, Tensor]:
    """Token ids, and a mask that is 0 on padding; the first row has none."""
    ids_BT = torch.randint(3, VOCAB_SIZE, (NUM_ROWS, NUM_TOKENS), generator=torch.manual_seed(0))
    mask_BT = torch.arange(NUM_TOKENS) < (NUM_TOKENS - torch.arange(NUM_ROWS))[:, None]
    return ids_BT, mask_BT.long()


def build_batch() -> Batch:
    """The same rows as the loader builds them."""
    ids_BT, mask_BT = draw_rows()
    labels_BT = ids_BT.masked_fill(mask_BT == 0, IGNORE_LABEL).numpy()
    labels_BT[:, 0] = IGNORE_LABEL
    columns = np.tile(np.arange(NUM_TOKENS), (NUM_ROWS, 1))
    ends_B1 = mask_BT.sum(1, keepdim=True).numpy()
    return make_batch(
        ids_BT.numpy(),
        labels_BT,
        position_ids=np.where(columns < ends_B1, columns, columns - ends_B1),
        document_ids=np.where(columns < ends_B1, 0, -1),
    )


def take_step(step: TrainStep) -> tuple[Any, dict[str, Tensor]]:
    """The result of a step, and its gradients."""
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        for part in step.parameters:
            gradients[part.name] = part.local.grad.clone()

    step.optimizer.inner.register_step_pre_hook(keep)
    step.lm.model.train()
    return step.run(build_batch(), lr=1e-3, step=1, first_sample=0), gradients


def run_plainly(model: Any, rows: slice = slice(None)) -> Any:
    """Run the forward of transformers with labels."""
    ids_BT, mask_BT = (each[rows] for each in draw_rows())
    labels_BT = ids_BT.masked_fill(mask_BT == 0, IGNORE_LABEL)
    return model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT, use_cache=False)


def check_gradients(model: Any, gradients: dict[str, Tensor], tolerance: float = SINGLE) -> None:
    for name, parameter in model.named_parameters():
        expected = parameter.grad.view(gradients[name].shape)
        error = (gradients[name] - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error < tolerance, name


@pytest.mark.parametrize(
    ("family", "mode"),
    [("mixtral", "none"), ("mixtral", "full"), ("gpt_oss", "selective"), ("jetmoe", "none")],
)
def test_a_step_has_the_loss_and_gradients_of_transformers(family: str, mode: Any) -> None:
    plain = build_with_loss(family).train()
    output = run_plainly(plain)
    output.loss.backward()
    lm = build_causal_lm(build_with_loss(family))
    checkpoint_blocks(lm.model, mode)
    result, gradients = take_step(make_step(lm, batch_size=NUM_ROWS))
    assert result.router_loss == pytest.approx(float(output.aux_loss.detach()), rel=SINGLE)
    # The reported loss is that of the labels alone.
    loss = float((output.loss - COEFFICIENT * output.aux_loss).detach())
    assert result.loss == pytest.approx(loss, rel=SINGLE)
    check_gradients(plain, gradients)


def test_micro_batches_have_the_mean_of_their_losses() -> None:
    plain = build_with_loss("mixtral").train()
    run_plainly(plain).loss.backward()
    whole = run_plainly(plain)
    for parameter in plain.parameters():
        parameter.grad = None
    halves = [run_plainly(plain, slice(first, first + 2)).aux_loss for first in (0, 2)]
    mean = (halves[0] + halves[1]) / 2
    (whole.loss - COEFFICIENT * whole.aux_loss + COEFFICIENT * mean).backward()
    lm = build_causal_lm(build_with_loss("mixtral"))
    result, gradients = take_step(make_step(lm, micro_batch_size=2, batch_size=NUM_ROWS))
    assert result.router_loss == pytest.approx(float(mean.detach()), rel=SINGLE)
    assert abs(float((mean - whole.aux_loss).detach())) > 1e-3
    check_gradients(plain, gradients)


def test_a_clipped_row_has_its_own_loss() -> None:
    plain = build_with_loss("mixtral").train()
    parameters, losses = list(plain.parameters()), []
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for row in range(NUM_ROWS):
        output = run_plainly(plain, slice(row, row + 1))
        gradients = torch.autograd.grad(output.loss, parameters)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        torch._foreach_add_(sums, gradients, alpha=min(1.0, float(1 / norm)))
        losses.append(float(output.aux_loss.detach()))
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total / NUM_ROWS
    config = DpSgdConfig(name="dp_sgd", max_grad_norm=1, noise_multiplier=1e-6)
    lm = build_causal_lm(build_with_loss("mixtral"))
    clipping = RowClipping(config, noise_seed=1)
    result, ours = take_step(make_step(lm, row_clipping=clipping, batch_size=NUM_ROWS))
    assert result.router_loss == pytest.approx(np.mean(losses), rel=SINGLE)
    # Noise of 1e-6 a number, on a sum of norm 4.
    check_gradients(plain, ours, tolerance=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_loss_of_transformers(family: str) -> None:
    model = build_with_loss(family)
    lm = build_causal_lm(model)
    ids_BT, mask_BT = draw_rows()
    logits: list[Tensor] = []
    with torch.no_grad():
        expected = run_plainly(model).aux_loss
        lm(lambda: lm.hidden_states(ids_BT, router_logits=logits))
        loss = lm.router_loss.share(logits, mask_BT.flatten().bool())
    assert float(loss) == pytest.approx(float(expected), rel=SINGLE)


def test_no_logits_are_recorded_without_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits would keep those of all layers until the forward ends."""
    model = build_with_loss("mixtral")
    lm = build_causal_lm(model)
    ids_BT, _ = draw_rows()
    seen = []
    forward = type(model.model).forward

    def keep(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        seen.append(output.get("router_logits"))
        return output

    monkeypatch.setattr(type(model.model), "forward", keep)
    with torch.no_grad():
        lm(lambda: lm.hidden_states(ids_BT))
    assert seen == [None]
    assert model.config.output_router_logits


def test_without_the_field_there_is_no_loss() -> None:
    lm = build_causal_lm(build("mixtral"))
    assert lm.router_loss is None
    result, _ = take_step(make_step(lm, batch_size=NUM_ROWS))
    assert result.router_loss is None


@pytest.mark.parametrize(
    ("family", "reason"),
    [("doge", "memguard does not support"), ("afmoe", "transformers has no load-balancing loss")],
)
def test_other_losses_are_named(family: str, reason: str) -> None:
    model = build(family, output_router_logits=True)
    assert find_router_loss(model) is None
    assert reason in explain_missing(model)


def test_a_changed_formula_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_with_loss("mixtral")
    module = transformers.models.mixtral.modeling_mixtral
    function = module.load_balancing_loss_func

    def changed(
        gate_logits: Any, num_experts: Any, top_k: Any = 2, attention_mask: Any = None
    ) -> Any:
        return 2 * function(gate_logits, num_experts, top_k, attention_mask)

    monkeypatch.setattr(module, "load_balancing_loss_func", changed)
    assert find_router_loss(model) is None


def test_a_model_without_routers_is_refused() -> None:
    model = build_with_loss("mixtral")
    with pytest.raises(ModelError, match="Set 'output_router_logits' to false"):
        check_recorded(model, ())
