"""Misspelled settings get the right name; words that resemble none get the list of names."""

from pathlib import Path

import pytest

from memguard.config import load_run_config
from memguard.errors import ConfigError

RUN = "name: x\nmodel: {path: m}\ndata: {train: a.jsonl}\nmitigations: [{name: goldfish}]\n"

MISSPELLED = {
    "nmae": "name",
    "outptu_dir": "output_dir",
    "sead": "seed",
    "modell": "model",
    "mitigation": "mitigations",
    "adaptor": "adapter",
    "optin": "optim",
    "paralell": "parallel",
    "optim.beta": "betas",
    "optim.weight_decy": "weight_decay",
    "optim.warm_up_fraction": "warmup_fraction",
    "optim.scheduler": "schedule",
    "optim.min_lr_ratio": "min_lr_fraction",
    "optim.grad_norm": "max_grad_norm",
    "train.epoch": "epochs",
    "train.bach_size": "batch_size",
    "train.microbatch_size": "micro_batch_size",
    "train.max_step": "max_steps",
    "train.checkpointing_every_steps": "checkpoint_every_steps",
    "train.trainable_module": "trainable_modules",
    "train.activation_checkpoint": "activation_checkpointing",
    "train.log_every": "log_every_steps",
    "train.precission": "precision",
    "data.seqlen": "seq_len",
    "data.max_doc_tokens": "max_document_tokens",
    "data.held_out_documents": "heldout_documents",
    "data.canarys": "canaries",
    "data.colums": "columns",
    "data.columns.promt": "prompt",
    "audit.max_generation_minute": "max_generation_minutes",
    "audit.prefix_token": "prefix_tokens",
    "parallel.timeout_minute": "timeout_minutes",
    "mitigations[0].contextwidth": "context_width",
}

UNRELATED = [
    *(
        "banana",
        "colour",
        "hidden_units",
        "surname",
        "password",
        "gpu",
        "nodes",
        "address",
        "verbose",
    ),
    *("beam_width", "wandb_project", "hub_model_id", "accelerate", "callbacks", "metric_for_best"),
    *("loss_fn", "remove_unused_columns", "use_cache", "jinja", "rlhf", "zzz"),
]


def read_problem(folder: Path, override: str) -> str:
    path = folder / "run.yaml"
    path.write_text(RUN)
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, [override])
    (problem,) = caught.value.problems
    return problem


def test_there_are_enough() -> None:
    assert len(MISSPELLED) >= 30
    assert len(UNRELATED) >= 20


@pytest.mark.parametrize("wrong", MISSPELLED)
def test_a_misspelled_setting_is_recognised(tmp_path: Path, wrong: str) -> None:
    problem = read_problem(tmp_path, f"{wrong}=1")
    assert problem.endswith(f"'{wrong}' is not a setting; did you mean '{MISSPELLED[wrong]}'?")


@pytest.mark.parametrize("word", UNRELATED)
def test_an_unrelated_word_has_no_suggestion(tmp_path: Path, word: str) -> None:
    for at in ("", "optim.", "train.", "data.", "audit.", "parallel.", "model.", "data.canaries."):
        problem = read_problem(tmp_path, f"{at}{word}=1")
        assert f"'{at}{word}' is not a setting; known here: " in problem


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("lr", "optim.lr"),
        ("train.lr", "optim.lr"),
        ("epochs", "train.epochs"),
        ("micro_batch_size", "train.micro_batch_size"),
        ("data.deterministic", "train.deterministic"),
        ("train.suite", "audit.suite"),
        ("optim.count", "data.canaries.count"),
        ("data.k", "mitigations[0].k"),
    ],
)
def test_the_same_name_in_another_block_is_found(tmp_path: Path, wrong: str, right: str) -> None:
    problem = read_problem(tmp_path, f"{wrong}=1")
    assert problem.endswith(f"'{wrong}' is not a setting; did you mean '{right}'?")
