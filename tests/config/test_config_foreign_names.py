"""Each name that people bring from other libraries is answered with a setting that exists."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from memguard.compare import load_sweep
from memguard.config import RunConfig, apply_settings, load_run_config
from memguard.config.foreign_names import _ADVICE, find_advice
from memguard.config.loading import _fields_at
from memguard.config.yaml_text import KeyPath
from memguard.errors import ConfigError

TEXT = "name: x\nmodel: {path: m}\ndata: {train: a.jsonl}\n"
RUN: dict[str, Any] = yaml.safe_load(TEXT)
# What budgets, adapters and the best step need beside the setting that the advice names.
BESIDE: dict[str, Any] = {
    "adapter": {"adapter.name": "lora"},
    "budget": {"train.audit_every_steps": 5},
    "train.keep": {"train.heldout_every_steps": 5, "data.heldout_documents": 5},
    "train.export": {
        "train.heldout_every_steps": 5,
        "data.heldout_documents": 5,
        "train.keep": "best",
    },
}
NONE = None
"""There is no such setting."""

_NAMES_OF: dict[str | None, str] = {
    "optim.lr": "learning_rate",
    "optim.name": "optimizer",
    "optim.schedule": "lr_scheduler_type lr_scheduler",
    "optim.warmup_fraction": "warmup_ratio",
    NONE: (
        "warmup_steps gradient_accumulation_steps per_device_eval_batch_size "
        "eval_batch_size resume_from_checkpoint fp16 deepspeed "
        "fsdp fsdp_config load_in_8bit packing sample_packing chat_template push_to_hub "
        "dataloader_num_workers group_by_length"
    ),
    "track: [tensorboard, wandb, trackio]": "report_to",
    "track: [wandb]": "use_wandb",
    "optim.betas: [0.9, 0.999]": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.max_grad_norm": "gradient_clipping",
    "train.epochs": "num_train_epochs num_epochs",
    "train.micro_batch_size": "per_device_train_batch_size",
    "data.heldout_documents": "val_set_size",
    "train.checkpoint_every_steps": "save_steps save_strategy",
    "train.keep_checkpoints": "save_total_limit",
    "train.log_every_steps": "logging_steps",
    "train.heldout_every_steps": "eval_steps eval_strategy evaluation_strategy",
    "train.export: best": "load_best_model_at_end",
    "train.stop_after_worse": "early_stopping_patience",
    "train.precision: bf16": "bf16",
    "train.activation_checkpointing: full": "gradient_checkpointing",
    "train.compile: true": "torch_compile",
    "parallel.timeout_minutes": "ddp_timeout",
    "adapter.r": "lora_r",
    "adapter.lora_alpha": "lora_alpha",
    "adapter.lora_dropout": "lora_dropout",
    "adapter.target_modules": "lora_target_modules",
    "adapter.quantization: nf4": "load_in_4bit",
    "data.seq_len": "sequence_len max_seq_length max_length",
    "data.train": "datasets dataset_path",
    "data.columns.text": "dataset_text_field text_column",
    "model.path": "base_model model_name_or_path",
    "model.attn_implementation: flash_attention_2": "flash_attention",
    "mitigations: [{name: neftune, alpha: 5}]": "neftune_noise_alpha",
    "mitigations: [{name: label_smoothing, epsilon: 0.1}]": "label_smoothing_factor",
}
NAMES = {name: setting for setting, names in _NAMES_OF.items() for name in names.split()}
SHARED: dict[str, str] = {
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "attn_implementation": "model.attn_implementation",
    "output_dir": "output_dir",
}
"""Names that memguard has too, in one block."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def read_problem(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, overrides)
    (problem,) = caught.value.problems
    assert "\n" not in problem
    return problem


def test_all_names_have_a_row_here() -> None:
    assert len(NAMES) == 61
    assert _ADVICE.keys() == NAMES.keys() | SHARED.keys() | {"optim"}


def expect(setting: str | None, name: str) -> str:
    return f"'{name}' is not a setting; " + (f"use '{setting}'" if setting else "there is no")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_answered_wherever_it_is_written(run: Path, name: str) -> None:
    setting = NAMES[name]
    for at in ("", "train.", "optim.", "data.", "parallel.", "audit.", "data.canaries."):
        problem = read_problem(run, f"{at}{name}=1")
        assert expect(setting, at + name) in problem
        assert "did you mean" not in problem
    run.write_text(f"{TEXT}{name}: [1]\n")
    problem = read_problem(run)
    assert problem.startswith(f"{run}:4:1 {expect(setting, name)}")


@pytest.mark.parametrize("name", SHARED)
def test_a_name_of_ours_is_answered_in_another_block(run: Path, name: str) -> None:
    assert expect(SHARED[name], f"parallel.{name}") in read_problem(run, f"parallel.{name}=1")


def test_the_command_line_takes_options_and_the_optimizer_by_name(run: Path) -> None:
    assert expect("optim.lr", "learning-rate") in read_problem(run, "--learning-rate=1")
    expected = (
        "'optim' should be a block of settings ('key: value' lines); got 'adamw_torch'; use "
        "'optim.name': adamw, adamw_8bit (also paged), adalomo (galore), lomo or mezo"
    )
    assert expected in read_problem(run, "optim=adamw_torch")
    problem = read_problem(run, "train=adamw_torch")
    assert problem.endswith("('key: value' lines); got 'adamw_torch'")
    problem = read_problem(run, "train.optim=1")
    assert "'train.optim' is not a setting; use 'optim.name': adamw, adamw_8bit" in problem


def test_one_kind_of_block_among_several(run: Path) -> None:
    problem = read_problem(run, "mitigations=[{name: goldfish, learning_rate: 1}]")
    assert expect("optim.lr", "mitigations[0].learning_rate") in problem
    problem = read_problem(run, "adapter={name: lora, lora_r: 1}")
    assert expect("adapter.r", "adapter.lora_r") in problem


def test_settings_of_a_sweep_are_below_its_run(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    sweep = {
        "name": "x",
        "run": {**{key: RUN[key] for key in ("model", "data")}, "learning_rate": 1},
        "settings": [{"name": "plain", "output_dir": "o"}, {"name": "b", "overrides": {"bf16": 1}}],
        "report_to": "wandb",
        "warmup_ratio": 0.1,
    }
    path.write_text(yaml.safe_dump(sweep))
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    text = "\n".join(caught.value.problems)
    for expected in (
        expect("run.optim.lr", "run.learning_rate"),
        expect("run.optim.warmup_fraction", "warmup_ratio"),
        expect("run.track: [tensorboard, wandb, trackio]", "report_to"),
        "'settings[0].output_dir' is not a setting; did you mean 'output_dir' (at the top level)?",
    ):
        assert expected in text
    del sweep["run"]["learning_rate"], sweep["report_to"], sweep["warmup_ratio"]
    del sweep["settings"][0]["output_dir"]
    path.write_text(yaml.safe_dump(sweep))
    with pytest.raises(ConfigError, match=r"'run\.bf16' is not a setting; use 'run\.train\.precis"):
        load_sweep(path)


def list_marked() -> list[tuple[str, str]]:
    """Return each setting that is named in an answer, with its value as YAML or ""."""
    marked = {
        (found[1], (found[2] or "").removeprefix(": "))
        for text in _ADVICE.values()
        for found in re.finditer(r"<(.*?)(: .*?)?>", text)
    }
    return sorted(marked)


@pytest.mark.parametrize(("setting", "value"), list_marked())
def test_each_setting_that_is_named_exists(setting: str, value: str) -> None:
    key_path: KeyPath = tuple(setting.split("."))
    assert key_path[-1] in _fields_at(RunConfig, key_path[:-1])
    if value:
        beside = BESIDE.get(setting, BESIDE.get(setting.partition(".")[0], {}))
        settings = {**beside, setting: yaml.safe_load(value)}
        config: Any = RunConfig.model_validate(apply_settings(RUN, settings))
        plain: Any = RunConfig.model_validate(apply_settings(RUN, beside))
        # A value that does something; 'adapter.name' has only one.
        assert config != plain or setting == "adapter.name"


def test_an_answer_has_no_mark_and_quotes_only_settings() -> None:
    known = {setting for setting, _ in list_marked()}
    for name in _ADVICE:
        answer = find_advice(name)
        assert answer is not None
        assert not re.search(r"[<>]", answer)
        quoted = {text.partition(":")[0] for text in re.findall(r"'([^']+)'", answer)}
        assert quoted <= known | {"memguard train --nproc"}, name
    assert find_advice("wandb_project") is None
