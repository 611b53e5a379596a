"""Names of settings in transformers, TRL, axolotl and peft, and what to use here instead."""

import re
from collections.abc import Mapping

from memguard.config.yaml_text import KeyPath, format_key

_MARKED = re.compile(r"<([\w.]+)(: [^>]*)?>")
"""A setting of a run in `_ADVICE`, with a value or without."""

_TABLE: Mapping[str, str] = {
    # The optimizer and its learning rate.
    "learning_rate": "use <optim.lr>",
    "lr_scheduler_type lr_scheduler": (
        "use <optim.schedule> (cosine, linear or constant); those of transformers fall to 0, as "
        "here with <optim.min_lr_fraction: 0>"
    ),
    "warmup_ratio": "use <optim.warmup_fraction>",
    "warmup_steps": "there is none like it: set <optim.warmup_fraction> to warm-up steps / steps",
    "weight_decay": "use <optim.weight_decay>, which applies to matrices only",
    "adam_beta1 adam_beta2": (
        "use <optim.betas: [0.9, 0.999]>, the first and the second in one list"
    ),
    "adam_epsilon": "use <optim.eps>",
    "max_grad_norm": "use <optim.max_grad_norm>",
    "gradient_clipping": "use <optim.max_grad_norm>",
    "optim optimizer": (
        "use <optim.name>: adamw, adamw_8bit (also paged), adalomo (galore), lomo or mezo"
    ),
    # Steps and rows.
    "num_train_epochs": "use <train.epochs>",
    "num_epochs": "use <train.epochs>",
    "per_device_train_batch_size": (
        "use <train.micro_batch_size>, the rows of one forward pass of a process; "
        "<train.batch_size> is the rows of a whole step over all processes"
    ),
    "gradient_accumulation_steps": (
        "there is none like it: <train.batch_size> is the rows of a whole step, that is rows per "
        "device x accumulation steps x processes"
    ),
    "per_device_eval_batch_size eval_batch_size": (
        "there is none like it: a forward pass of the audit has <audit.batch_tokens> tokens"
    ),
    "eval_steps eval_strategy evaluation_strategy": (
        "use <train.heldout_every_steps> for the held-out loss; audits during training are set by "
        "<train.audit_every_steps>"
    ),
    "load_best_model_at_end": "use <train.export: best>, with <train.keep: best>",
    "early_stopping_patience": (
        "use <train.stop_after_worse>; <budget.action: stop> ends training where too much is "
        "extracted"
    ),
    # Checkpoints, logs and folders.
    "save_steps save_strategy": "use <train.checkpoint_every_steps>",
    "save_total_limit": "use <train.keep_checkpoints>",
    "logging_steps": "use <train.log_every_steps>; metrics.jsonl has every step",
    "report_to": "use <track: [tensorboard, wandb, trackio]>",
    "use_wandb": "use <track: [wandb]>",
    "output_dir": "use <output_dir>, the folder of all runs; that of a run is <output_dir>/<name>",
    "resume_from_checkpoint": "there is none like it: the same command resumes an interrupted run",
    # Arithmetic, memory and processes.
    "bf16": "use <train.precision: bf16>",
    "fp16": "there is none like it: use <train.precision: bf16>",
    "gradient_checkpointing": "use <train.activation_checkpointing: full>",
    "torch_compile": "use <train.compile: true>",
    "deepspeed fsdp fsdp_config": (
        "there is none like it: <parallel.z> shards weights, gradients and optimizer state, and "
        "'memguard train --nproc' starts the processes"
    ),
    "ddp_timeout": "use <parallel.timeout_minutes>, in minutes instead of seconds",
    # The model and its adapters.
    "base_model": "use <model.path>",
    "model_name_or_path": "use <model.path>",
    "flash_attention": "use <model.attn_implementation: flash_attention_2>",
    "attn_implementation": "use <model.attn_implementation>",
    "lora_r": "use <adapter.r>, with <adapter.name: lora>",
    "lora_alpha": "use <adapter.lora_alpha>, with <adapter.name: lora>",
    "lora_dropout": "use <adapter.lora_dropout>, with <adapter.name: lora>",
    "lora_target_modules": "use <adapter.target_modules>, with <adapter.name: lora>",
    "load_in_4bit": "use <adapter.quantization: nf4>, with <adapter.name: lora>",
    "load_in_8bit": "there is none like it: use <adapter.quantization: nf4>, or no quantisation",
    # Documents.
    "datasets": "use <data.train>",
    "dataset_path": "use <data.train>",
    "dataset_text_field": "use <data.columns.text>",
    "text_column": "use <data.columns.text>",
    "chat_template": (
        "there is none like it: the chat template is that of the tokenizer (chat_template.jinja)"
    ),
    "val_set_size": "use <data.heldout_documents>, a number of documents instead of a share",
    "sequence_len max_seq_length max_length": (
        "use <data.seq_len>: longer documents are cut into pieces; <data.max_document_tokens> "
        "cuts off what is longer"
    ),
    "packing sample_packing": (
        "there is none like it: rows are always packed, and each piece sees only its own tokens"
    ),
    # The loss.
    "neftune_noise_alpha": "use <mitigations: [{name: neftune, alpha: 5}]>",
    "label_smoothing_factor": "use <mitigations: [{name: label_smoothing, epsilon: 0.1}]>",
    # What has no use here.
    "push_to_hub dataloader_num_workers group_by_length": "there is none like it, leave it out",
}
"""What to use instead of the names of each row, as the end of a sentence. ``<key>`` and
``<key: value>`` are settings of a run, which a test looks up."""
_ADVICE = {name: advice for names, advice in _TABLE.items() for name in names.split()}


def find_advice(name: str, above: KeyPath = ()) -> str | None:
    """Return what to use instead of a setting of another library, as ``use 'optim.lr'``, or None.

    The name may have hyphens, as an option; ``above`` is the key path of the run's settings in the
    file, e.g. ``("run",)`` in a sweep.
    """
    advice = _ADVICE.get(name.replace("-", "_"))

    def quote(setting: re.Match[str]) -> str:
        return f"'{format_key((*above, *setting[1].split('.')))}{setting[2] or ''}'"

    return None if advice is None else _MARKED.sub(quote, advice)
