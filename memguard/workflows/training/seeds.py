"""A run by `mezo` with `optim.num_seeds` as its base model and some numbers.

seeds.json    in the run's folder: of each seed the sum of -lr s of its steps
weights       base + sum of number x direction of its seed         `export --from-seeds`
"""

from pathlib import Path

import torch

from memguard.config import ParallelConfig, RunConfig
from memguard.errors import ConfigError, RecordError
from memguard.hf.checkpoint import get_folder, load_tokenizer
from memguard.hf.export import export_model
from memguard.hf.identity import hash_weights
from memguard.optim.mezo import Mezo, choose_seed
from memguard.parallel.local_parameters import find_local_parameters
from memguard.records.run_files import find_weights_folder
from memguard.records.sealed import SealedRecord, load_sealed, save_sealed
from memguard.runtime import quiet_libraries
from memguard.train.metrics import StepMetrics, read_metrics
from memguard.workflows.auditing.pages import render_card
from memguard.workflows.common.folder import RunFolder, check_outside_runs
from memguard.workflows.common.setup import load_known_tokenizer, open_distributed, start_model
from memguard.workflows.training.memory import set_train

_FILE = "seeds.json"


class SeedSums(SealedRecord):
    """`seeds.json`."""

    base_sha256: str | None
    """Of the base model; null for random weights, which follow from the run's seed."""
    sums: tuple[float, ...]
    """Of each seed."""


def save_sums(config: RunConfig, run: Path, num_steps: int) -> None:
    """Write the sums of a run that ends with the weights of a step."""
    assert config.optim.num_seeds is not None, "its directions have seeds"
    sums = [0.0] * config.optim.num_seeds
    for line in read_metrics(run / "metrics.jsonl"):
        if isinstance(line, StepMetrics) and line.slope is not None and line.step <= num_steps:
            sums[choose_seed(config.seed, line.step, len(sums))] -= line.lr * line.slope
    save_sealed(SeedSums(base_sha256=_hash_base(config), sums=tuple(sums)), run / _FILE)


def export_from_seeds(run: Path, out: Path) -> None:
    """Write the model of a run, in fp32, from its base, its settings and `seeds.json`."""
    check_outside_runs(out, "OUT")
    if out.exists():
        raise ConfigError(f"'{out}' exists already; choose another name or delete it")
    if not (run / _FILE).exists():
        has_one = "a finished run by 'optim.name: mezo' with 'optim.num_seeds' has one"
        raise ConfigError(f"'{run}' has no {_FILE}: {has_one}")
    quiet_libraries()
    sums = load_sealed(SeedSums, run / _FILE)
    plain = {"precision": "fp32", "activation_checkpointing": "none", "compile": False}
    config = set_train(RunFolder(run).read_config(), **plain)
    if sums.base_sha256 != _hash_base(config):
        raise RecordError(
            f"'{config.model.path}' was changed since '{run}' was trained: restore it"
        )
    with open_distributed(ParallelConfig(), None) as distributed:
        tokenizer = load_known_tokenizer(config) or load_tokenizer(str(find_weights_folder(run)))
        started = start_model(config, tokenizer, distributed)
        parameters = find_local_parameters(started.lm.model)
        optimizer = Mezo(parameters, config.seed, config.optim.num_seeds)
        for seed, by in enumerate(sums.sums):
            if by:
                optimizer.move(by, seed)
        card = render_card(config)
        export_model(started.lm.model, tokenizer, out, dtype=torch.float32, card=card)


def _hash_base(config: RunConfig) -> str | None:
    path = config.model.path
    return None if path is None else hash_weights(get_folder(path, config.model.revision))
