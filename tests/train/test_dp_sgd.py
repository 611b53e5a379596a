"""DP-SGD: rows clipped as by hand, noise of the right size, and epsilon against plain formulas."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_examples import make_run, train_checked
from step_examples import make_batch, make_step
from tiny_families import build
from torch import nn
from torch.nn import functional

from memguard.config.mitigations import DpSgdConfig
from memguard.data.loader import Batch
from memguard.model.checks import build_causal_lm
from memguard.parallel.local_parameters import LocalParameter
from memguard.records import AuditReport, load_manifest, load_record
from memguard.seeds import derive_secret_generator
from memguard.train.dp_sgd import RowClipping, compute_privacy
from memguard.train.metrics import EndMetrics, read_metrics
from memguard.workflows.training import train as train_module

X = -100


def config(**settings: Any) -> DpSgdConfig:
    return DpSgdConfig(name="dp_sgd", **settings)


def without_noise(**settings: Any) -> DpSgdConfig:
    """Less noise than a run may have, so that sums can be compared."""
    return config(**settings).model_copy(update={"noise_multiplier": 1e-14})


def draw_batch() -> Batch:
    """Three rows, the second with few labels, the third with none."""
    draw = np.random.default_rng(0)
    input_ids = draw.integers(0, 97, (3, 10))
    labels = input_ids.copy()
    labels[:, 0] = X
    labels[1, 3:] = X
    labels[2] = X
    return make_batch(input_ids, labels)


def test_rows_are_clipped_one_by_one() -> None:
    """Against autograd on transformers' own logits; the noise is too small to be seen."""
    max_grad_norm = 0.5
    clipping = RowClipping(without_noise(max_grad_norm=max_grad_norm), noise_seed=1)
    # In float64: what transformers computes in fp32 it does on both sides.
    layer = build_causal_lm(build("llama").double())
    step = make_step(layer, batch_size=3, row_clipping=clipping)
    found: dict[str, torch.Tensor] = {}
    step.optimizer.inner.register_step_pre_hook(
        lambda *_: found.update({p.name: p.local.grad.clone() for p in step.parameters})
    )
    batch = draw_batch()
    model: nn.Module = build("llama").double()
    parameters = dict(model.named_parameters())
    expected = {name: torch.zeros_like(each) for name, each in parameters.items()}
    norms, total = [], 0.0
    for ids, labels in zip(batch.input_ids[:2], batch.labels[:2], strict=True):
        logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1]
        loss = functional.cross_entropy(logits, torch.from_numpy(labels)[1:])
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        norm = math.sqrt(sum(float(each.pow(2).sum()) for each in gradients))
        norms.append(norm)
        total += float(loss.detach()) * int((labels[1:] != X).sum())
        for name, gradient in zip(parameters, gradients, strict=True):
            expected[name] += gradient * min(1, max_grad_norm / norm) / 3
    assert min(norms) > max_grad_norm
    result = step.run(batch, lr=1e-3, step=1, first_sample=0)
    assert result.loss == pytest.approx(total / 11, rel=1e-9)
    for name, each in expected.items():
        # Sums in another order; noise of 1e-14.
        torch.testing.assert_close(found[name], each, rtol=1e-7, atol=1e-10)


def make_parameters(*sizes: int) -> list[LocalParameter]:
    made = [nn.Parameter(torch.zeros(size)) for size in sizes]
    return [
        LocalParameter(name=str(number), source=each, local=each, num_copies=1)
        for number, each in enumerate(made)
    ]


def draw_noise(*, seed: int = 1, step: int = 1) -> torch.Tensor:
    clipping = RowClipping(config(noise_multiplier=2.0, max_grad_norm=0.5), noise_seed=seed)
    parameters = make_parameters(60_000, 40_000)
    clipping.put_mean(parameters, step=step, num_rows=4)
    gradients = [each.local.grad for each in parameters]
    return torch.cat([each for each in gradients if each is not None])


def test_noise_is_of_the_norm_and_of_a_secret() -> None:
    noise = draw_noise()
    # 2 x 0.5 / 4; a standard deviation of 1e5 draws is known to 0.22 %, a mean to 0.0008.
    assert float(noise.std()) == pytest.approx(0.25, rel=0.01)
    assert abs(float(noise.mean())) < 0.004
    assert torch.equal(noise, draw_noise())
    for other in (draw_noise(seed=2), draw_noise(step=2)):
        # Of 1e5 fp32 numbers a few may agree.
        assert (noise == other).sum() < 10


def test_noise_is_drawn_from_the_whole_secret() -> None:
    """Of a seed, torch takes 32 bits on a CPU: who tries them all has the noise."""
    generator = derive_secret_generator(1, "dp noise", 1)
    expected = [generator.standard_normal(size, np.float32) / 4 for size in (60_000, 40_000)]
    torch.testing.assert_close(draw_noise(), torch.from_numpy(np.concatenate(expected)))


def test_a_small_row_is_left_and_rows_add_up() -> None:
    clipping = RowClipping(without_noise(max_grad_norm=5.0), noise_seed=1)
    parameters = make_parameters(2, 1)
    for first, second in (([3.0, 0.0], [0.0]), ([0.0, 30.0], [40.0])):
        parameters[0].local.grad = torch.tensor(first)
        parameters[1].local.grad = torch.tensor(second)
        clipping.add_row(parameters)
        assert parameters[0].local.grad is None
    clipping.add_row(parameters)
    clipping.put_mean(parameters, step=1, num_rows=3)
    # (3, 0, 0) as it is; (0, 30, 40) of norm 50 becomes (0, 3, 4); a row without gradients.
    assert parameters[0].local.grad is not None
    assert parameters[1].local.grad is not None
    torch.testing.assert_close(parameters[0].local.grad, torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(parameters[1].local.grad, torch.tensor([4 / 3]))


_ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))


def convert(rdp: list[float], orders: list[float], delta: float) -> float:
    """Balle et al. 2020, theorem 21: the best order's epsilon."""
    return min(
        each - (math.log(delta) + math.log(a)) / (a - 1) + math.log((a - 1) / a)
        for each, a in zip(rdp, orders, strict=True)
    )


def test_epsilon_is_that_of_the_gaussian_mechanisms_a_row_was_in() -> None:
    pytest.importorskip("opacus")
    sigma, delta = 2.0, 1e-5
    settings = config(noise_multiplier=sigma, delta=delta)
    # 100 steps of 9 rows; each of 300 rows is in three of them.
    spent = compute_privacy(settings, np.tile(np.arange(300), 3), batch_size=9)
    plain = convert([3 * a / (2 * sigma**2) for a in _ORDERS], _ORDERS, delta)
    assert spent.epsilon == pytest.approx(plain, rel=1e-9)
    # Mironov et al. 2019 for integer orders, summed as it stands.
    q, orders = 0.03, list(range(2, 64))
    rdp = [
        100
        / (a - 1)
        * math.log(
            sum(
                math.comb(a, i) * (1 - q) ** (a - i) * q**i * math.exp((i * i - i) / (2 * sigma**2))
                for i in range(a + 1)
            )
        )
        for a in orders
    ]
    sampled = convert(rdp, [float(a) for a in orders], delta)
    # Orders between the integers make it a little smaller.
    assert 0.95 * sampled < spent.epsilon_if_sampled <= sampled * (1 + 1e-9)
    assert spent.epsilon_if_sampled < spent.epsilon
    assert spent.delta == delta
    # A row that is in one step twice moves the sum twice as far: 2^2 + 1 mechanisms.
    spent = compute_privacy(settings, np.array([0, 1, 1, 2, 1, 0]), batch_size=3)
    twice = convert([5 * a / (2 * sigma**2) for a in _ORDERS], _ORDERS, delta)
    assert spent.epsilon == pytest.approx(twice, rel=1e-9)


def test_a_run_tells_what_it_has_spent(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    run = make_run(
        tmp_path,
        mitigations=[{"name": "dp_sgd", "noise_multiplier": 0.5, "max_grad_norm": 1.0}],
        data={"canaries": {"count": 0}},
        train={"max_steps": 3},
    )
    train_checked(run)
    folder = tmp_path / "runs" / "run"
    lines = list(read_metrics(folder / "metrics.jsonl"))
    (end,) = (line for line in lines if isinstance(line, EndMetrics))
    trained = [e for e in load_manifest(folder / "manifest.jsonl") if e.role == "trained"]
    # One document a row, and less than the first of two epochs: no row comes twice.
    assert end.num_rows == 3 * 8 < len(trained)
    once = compute_privacy(config(noise_multiplier=0.5), np.zeros(1, int), batch_size=1)
    assert end.epsilon == once.epsilon
    # Sampling would help here no longer: with so little noise, whoever is drawn more often loses.
    assert end.epsilon_if_sampled > end.epsilon
    assert end.delta == 1e-5
    report = load_record(AuditReport, folder / "audit" / "report.json")
    assert report.training.epsilon == end.epsilon
    for page in (folder / "audit" / "report.html", folder / "model" / "README.md"):
        text = page.read_text(encoding="utf-8")
        assert "Differential privacy" in text
        assert "does not cover copies of a document" in text


class Stopped(Exception):
    """Ends a run before its first step."""


def test_noise_is_of_the_identity_key_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed goes on with its noise; two runs never share it."""
    seeds: list[int] = []

    def stop(_: object, *, noise_seed: int) -> None:
        seeds.append(noise_seed)
        raise Stopped

    monkeypatch.setattr(train_module, "RowClipping", stop)
    for name, key, seed in (
        ("one", "my.key", 3),
        ("one", "my.key", 3),
        ("two", "my.key", 4),
        ("three", "other.key", 3),
    ):
        run = make_run(
            tmp_path,
            name=name,
            mitigations=[{"name": "dp_sgd", "noise_multiplier": 0.5, "max_grad_norm": 1.0}],
            data={"canaries": {"count": 0}, "identity_key": str(tmp_path / key)},
            audit={"enabled": False},
        )
        with pytest.raises(Stopped):
            train_checked(run.model_copy(update={"seed": seed}))
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3
    assert all(seed.bit_length() > 128 for seed in seeds)


def test_where_it_cannot_be_it_is_refused(tmp_path: Path) -> None:
    dp_sgd = {"name": "dp_sgd"}
    with pytest.raises(
        ValueError, match=r"dp_sgd cannot be combined with 'train.micro_batch_size'"
    ):
        make_run(tmp_path, mitigations=[dp_sgd], train={"micro_batch_size": 4})
    with pytest.raises(ValueError, match="dp_sgd cannot be combined with 'budget'"):
        make_run(
            tmp_path, mitigations=[dp_sgd], budget={"limit": 0.1}, train={"audit_every_steps": 2}
        )
