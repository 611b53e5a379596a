"""What a block changes of a program's model and random numbers is undone at its end."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from memguard.model.evaluation import evaluating, is_4bit, keep_random_states


def build() -> nn.Module:
    """Some modules in evaluation mode, as where a part of a model is frozen."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2)))
    model.train()
    model[1][1].eval()
    return model


def read_modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_each_module_has_its_own_mode_again() -> None:
    model = build()
    before = read_modes(model)
    with evaluating(model):
        assert not any(read_modes(model))
    assert read_modes(model) == before
    with pytest.raises(ValueError, match="within"), evaluating(model):
        raise ValueError("within")
    assert read_modes(model) == before


def test_layers_in_4_bits_keep_training_mode_and_their_bytes() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32)
    layer.load_state_dict({"weight": torch.randn(64, 64)})
    model = nn.Sequential(layer.to("cpu"), nn.Dropout(0.5)).train()
    packed = model[0].weight.data.clone()
    row = torch.randn(1, 64)
    with torch.no_grad():
        before = model[0](row)
        with evaluating(model):
            assert read_modes(model) == [False, True, False]
            assert is_4bit(model[0])
            assert torch.equal(model(row), before)
        assert torch.equal(model[0](row), before)
    assert torch.equal(model[0].weight.data, packed)


def test_random_states_are_as_before() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))  # noqa: NPY002

    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    first = draw()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    with keep_random_states():
        draw()
    assert draw() == first
