"""The settings of training: the optimizer and its schedule, the steps, and the risk budget."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from memguard.config.settings import Fraction, NonNegative, Positive, PositiveInt, Settings, Times


class OptimConfig(Settings):
    """Optimizer, with a linear warm-up of the learning rate and a schedule after it."""

    name: Literal["adamw", "adamw_8bit", "adalomo", "lomo", "mezo"] = Field(
        "adamw",
        description="State is 8 bytes a parameter in adamw, 2.1 in adamw_8bit and none in the "
        "others: adalomo and lomo update inside backward, mezo has two forwards and no backward.",
    )
    lr: Annotated[float, Field(gt=0, le=1000)] = Field(2e-5, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW's decay rates.")
    eps: Positive = Field(1e-8, description="AdamW's denominator offset.")
    weight_decay: NonNegative = Field(
        0.0, description="Decoupled weight decay of matrices; vectors have none."
    )
    warmup_fraction: Fraction = Field(0.03, description="Share of the steps spent warming up.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine",
        description="Learning rate after the warm-up. cosine, linear: falls to 'min_lr_fraction' "
        "at the end; constant: stays at 'lr'.",
    )
    min_lr_fraction: Fraction = Field(
        0.1, description="Final learning rate as a share of 'lr'; not for 'schedule: constant'."
    )
    max_grad_norm: Positive | None = Field(
        1.0,
        description="Gradients are clipped to this norm; null leaves them, and is required "
        "of adalomo, lomo and mezo.",
    )
    num_seeds: PositiveInt | None = Field(
        None,
        description="Of mezo: its random directions are those of this many seeds, so that a run is "
        "as many numbers; null: a new one in each step.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        # A run's own config.yaml has every default written out.
        default = type(self).model_fields["min_lr_fraction"].default
        if self.schedule == "constant" and self.min_lr_fraction != default:
            raise ValueError(
                "'min_lr_fraction' does nothing with 'schedule: constant', which stays at 'lr': "
                f"leave it out (or at {default:g}); got {self.min_lr_fraction:g}"
            )
        return self


class ProfileConfig(Settings):
    """Steps that torch's profiler records."""

    steps: tuple[PositiveInt, PositiveInt] = Field(description="The first and the last step.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"'steps' must be a first step and a last one; got {[*self.steps]}")
        return self


class TrainConfig(Settings):
    """Duration, batch sizes, precision and checkpoints of training."""

    epochs: Times = Field(1, description="Times each document is trained (not for studies).")
    max_steps: PositiveInt | None = Field(
        None, description="Stop after this many optimizer steps; null trains everything."
    )
    batch_size: PositiveInt = Field(16, description="Rows of an optimizer step (rows).")
    micro_batch_size: PositiveInt | Literal["auto"] | None = Field(
        "auto",
        description="Rows of one forward pass of a process (rows); null: all that it has; auto: as "
        "many as fit on a GPU, all on a CPU.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="Arithmetic of forward and backward. auto: bf16 on a GPU, or with 'weights' "
        "bf16; else fp32.",
    )
    weights: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="How trained weights are stored. bf16: half the bytes, rounded stochastically "
        "after an update in fp32, on every mesh to the same bits; needs 'precision' bf16.",
    )
    trainable_modules: tuple[str, ...] | None = Field(
        None,
        description="Modules whose weights are trained, by the last part of their names, e.g. "
        "[lm_head]; all others are frozen. null trains all.",
    )
    activation_checkpointing: Literal["auto", "none", "full", "selective"] = Field(
        "auto",
        description="To save memory, full recomputes each decoder block in backward; selective "
        "does so but keeps the outputs of matmuls and of all-reduces. auto: the fastest that fits "
        "on a GPU, none on a CPU.",
    )
    deterministic: bool = Field(
        False,
        description="Use only deterministic algorithms, so that a resumed run ends with the same "
        "bits on a GPU too; slower there.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Share of activations dropped wherever the model's family has dropout; above 0 "
        "on one process only. null leaves what the checkpoint says.",
    )
    compile: Literal[True, False, "auto"] = Field(
        "auto",
        description="torch.compile each decoder block. auto: on a GPU, for runs planned to take "
        "more than ten minutes, if one block can be compiled; not with an adapter, and not with "
        "'deterministic'.",
    )
    nll_chunk_tokens: PositiveInt = Field(
        1024, description="Tokens whose logits exist at a time (tokens)."
    )
    checkpoint_every_steps: PositiveInt | None = Field(
        500,
        description="Steps between checkpoints, and one after step 2; null saves only on "
        "interruption, or by 'checkpoint_every_minutes'.",
    )
    checkpoint_every_minutes: Positive | None = Field(
        None, description="Minutes after which a checkpoint is due whatever the step; null: none."
    )
    keep_checkpoints: PositiveInt = Field(2, description="Newest checkpoints that are kept.")
    stall_minutes: Positive = Field(
        10, description="Longest wait in a step or save for a silent rank, then exit 1 (minutes)."
    )
    heldout_every_steps: PositiveInt | None = Field(
        None,
        description="Steps between measurements of the held-out loss, on the same documents; null "
        "measures before and after training only.",
    )
    keep: Literal["last", "best"] = Field(
        "last",
        description="best: a step with the lowest held-out loss so far is saved when it is "
        "measured, and kept besides the newest checkpoints.",
    )
    export: Literal["last", "best"] = Field(
        "last",
        description="Weights of the run's model: of its last step, or of the step with the lowest "
        "held-out loss, which needs 'keep: best'.",
    )
    stop_after_worse: PositiveInt | None = Field(
        None,
        description="End training after this many measurements without a lower held-out loss; null "
        "takes all steps.",
    )
    profile: ProfileConfig | None = Field(
        None, description="Steps whose traces, and time of each axis, are written; null: none."
    )
    log_every_steps: PositiveInt = Field(10, description="Steps between log lines.")
    audit_every_steps: PositiveInt | None = Field(
        None, description="Steps between audits of a few documents; null audits at the end only."
    )
    audit_documents: PositiveInt = Field(
        64, description="Documents per bucket in these audits; always the same ones."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        # A run's own config.yaml has every default written out.
        if self.trainable_modules is not None and not self.trainable_modules:
            raise ValueError("'trainable_modules' must name a module, or be null; got []")
        if self.weights == "bf16" and self.precision == "fp32":
            raise ValueError(
                "'precision' must be bf16 or auto with 'weights' bf16, which are used as they are "
                "stored; got fp32. Or set 'weights' to fp32"
            )
        is_default = self.audit_documents == type(self).model_fields["audit_documents"].default
        if self.audit_every_steps is None and not is_default:
            raise ValueError(
                "'audit_documents' does nothing without 'audit_every_steps': set it, or leave "
                f"'audit_documents' out; got {self.audit_documents}"
            )
        chooses = {"keep": self.keep == "best", "stop_after_worse": self.stop_after_worse}
        for name in (name for name, is_set in chooses.items() if is_set):
            if self.heldout_every_steps is None:
                raise ValueError(
                    f"'{name}' needs measurements of the held-out loss: set 'heldout_every_steps', "
                    f"or leave '{name}' out; got {getattr(self, name)}"
                )
        if self.export == "best" and self.keep != "best":
            raise ValueError("'export' best needs 'keep' best; got last. Set both, or neither")
        return self

    @property
    def checkpointing(self) -> Literal["none", "full", "selective"]:
        """`activation_checkpointing`, once auto is resolved."""
        assert self.activation_checkpointing != "auto", _UNRESOLVED
        return self.activation_checkpointing

    def count_micro_rows(self, num_rows: int) -> int:
        """Return the rows of one forward pass of a process that has ``num_rows`` in a step."""
        assert self.micro_batch_size != "auto", _UNRESOLVED
        return self.micro_batch_size or num_rows


_UNRESOLVED = "auto is resolved by workflows.auto_settings before it is used"


# The risk budget: the extraction rate at which training reacts.


class BudgetConfig(Settings):
    """Limit on the extraction rate of each trained bucket, and the action that enforces it.

    The rate is measured by audits during training, on text generated by greedy decoding. Documents
    that were extracted before training do not count.
    """

    metric: Literal["near_verbatim", "verbatim"] = Field(
        "near_verbatim", description="What counts as extracted."
    )
    limit: Fraction = Field(
        0.1, description="Largest share of a bucket's audited documents that may be extracted."
    )
    action: Literal["tighten", "stop"] = Field(
        "tighten",
        description="tighten: documents whose teacher-forced accuracy is halfway to 90 % are "
        "trained with goldfish loss of a lower k, in the end without loss; stop: training ends "
        "with the weights of the last audit within the limit.",
    )
