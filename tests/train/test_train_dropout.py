"""Dropout as a setting of a run: its losses differ in training alone."""

from pathlib import Path

import torch
from run_examples import make_run, train_checked

from memguard.config import TrainConfig
from memguard.hf.assembly import Assembly
from memguard.train.metrics import HeldoutMetrics, StepMetrics, read_metrics


def test_a_run_with_dropout_has_other_losses_from_the_first_step(tmp_path: Path) -> None:
    curves, heldout = [], []
    for number, dropout in enumerate((None, 0.0, 0.3)):
        config = make_run(
            tmp_path,
            name=f"run{number}",
            audit={"enabled": False},
            train={"max_steps": 4, "dropout": dropout},
        )
        train_checked(config)
        lines = list(read_metrics(tmp_path / "runs" / config.name / "metrics.jsonl"))
        curves.append([line.loss for line in lines if isinstance(line, StepMetrics)])
        heldout.append([line.nll for line in lines if isinstance(line, HeldoutMetrics)])
    plain, none, some = curves
    assert plain == none
    assert plain[0] != some[0]
    # Utility is measured without it.
    assert heldout[0][0] == heldout[2][0]


def test_the_rate_of_a_run_reaches_its_model() -> None:
    for dropout in (None, 0.0, 0.2):
        train = TrainConfig(dropout=dropout, precision="fp32", activation_checkpointing="none")
        assembly = Assembly.for_training(train, mesh=None, device=torch.device("cpu"))
        assert assembly.dropout == dropout
