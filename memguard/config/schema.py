"""The settings of a run: one sentence, a unit and a default each."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from memguard.config.data import DataConfig
from memguard.config.mitigations import MitigationConfig, check_forgetting, check_mitigations
from memguard.config.settings import (
    Fraction,
    Name,
    NonNegative,
    Positive,
    PositiveInt,
    Seed,
    Settings,
    Times,
)
from memguard.errors import shorten

# The risk budget: how much may become extractable before training reacts.


class BudgetConfig(Settings):
    """How much of each trained bucket may be extracted, and what happens before more is.

    Judged by the audits during training, on text that greedy decoding generates. Documents that
    were extracted before training do not count.
    """

    metric: Literal["near_verbatim", "verbatim"] = Field(
        "near_verbatim", description="What counts as extracted."
    )
    limit: Fraction = Field(0.1, description="Share of a bucket's audited documents that may.")
    action: Literal["tighten", "stop"] = Field(
        "tighten",
        description="tighten: documents whose teacher-forced accuracy is halfway to 90 % are "
        "trained with goldfish loss of a lower k, in the end without loss; stop: training ends "
        "with the weights of the last audit within the limit.",
    )


AxisName = Literal["data", "z", "y", "x"]
MAX_RANKS = 10**7


def _check_degree(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError(
            f"should be 1 or more, or -1 for the rest of the ranks; got {shorten(str(value))}"
        )
    if value > MAX_RANKS:
        raise ValueError(f"should be at most {MAX_RANKS:,} ranks; got {shorten(str(value))}")
    return value


Degree = Annotated[int, AfterValidator(_check_degree)]


class ScratchConfig(Settings):
    """Random initial weights instead of a checkpoint, for studies on small models."""

    config: dict[str, Any] = Field(
        description="Hugging Face configuration fields with 'model_type'; vocab_size is filled in."
    )
    tokenizer: str | None = Field(
        None, description="Tokenizer folder; null trains a byte-level BPE on 'data.train'."
    )
    vocab_size: Annotated[int, Field(ge=300, le=10**7)] = Field(
        2048, description="Entries of the trained BPE vocabulary (tokens)."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "model_type" not in self.config:
            raise ValueError("'config' needs 'model_type', e.g. llama")
        return self


class ModelConfig(Settings):
    """Which model is fine-tuned. Weights are read from safetensors; remote code is never run."""

    path: str | None = Field(None, description="Hugging Face folder or hub id to start from.")
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit).")
    scratch: ScratchConfig | None = Field(
        None, description="Random initial weights instead of 'path'."
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = Field(
        None, description="Attention kernel; null takes what transformers chooses for the family."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("exactly one of 'path' and 'scratch' must be set")
        return self


class OptimConfig(Settings):
    """AdamW with linear warm-up and cosine decay."""

    lr: Annotated[float, Field(gt=0, le=1000)] = Field(2e-5, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW's decay rates.")
    eps: Positive = Field(1e-8, description="AdamW's denominator offset.")
    weight_decay: NonNegative = Field(
        0.0, description="Decoupled weight decay of matrices; vectors have none."
    )
    warmup_fraction: Fraction = Field(0.03, description="Share of the steps spent warming up.")
    min_lr_fraction: Fraction = Field(0.1, description="Final learning rate as a share of 'lr'.")
    max_grad_norm: Positive | None = Field(
        1.0, description="Gradients are clipped to this norm; null leaves them."
    )


class TrainConfig(Settings):
    """How long, in what portions and in which precision."""

    epochs: Times = Field(1, description="Times each document is trained (not for studies).")
    max_steps: PositiveInt | None = Field(
        None, description="Stop after this many optimizer steps; null trains everything."
    )
    batch_size: PositiveInt = Field(16, description="Rows of an optimizer step (rows).")
    micro_batch_size: PositiveInt | None = Field(
        None,
        description="Rows of one forward pass of a process; null takes all it has (rows).",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Arithmetic of forward and backward; weights stay fp32."
    )
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none",
        description="To save memory, full recomputes each decoder block in backward; selective "
        "does so but keeps the outputs of matmuls and of all-reduces.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Share of activations dropped wherever the model's family has dropout, on one "
        "process; null leaves what the checkpoint says.",
    )
    compile: bool = Field(False, description="torch.compile each decoder block.")
    nll_chunk_tokens: PositiveInt = Field(
        1024, description="Tokens whose logits exist at a time (tokens)."
    )
    checkpoint_every_steps: PositiveInt | None = Field(
        500, description="Steps between checkpoints; null saves only on interruption."
    )
    keep_checkpoints: PositiveInt = Field(2, description="Newest checkpoints that are kept.")
    log_every_steps: PositiveInt = Field(
        10, description="Steps between log lines where there is no terminal."
    )
    audit_every_steps: PositiveInt | None = Field(
        None, description="Steps between audits of a few documents; null audits at the end only."
    )
    audit_documents: PositiveInt = Field(
        64, description="Documents of each bucket that these audits ask for, always the same ones."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        # A run's own config.yaml has every default written out.
        is_default = self.audit_documents == type(self).model_fields["audit_documents"].default
        if self.audit_every_steps is None and not is_default:
            raise ValueError(
                "'audit_documents' does nothing without 'audit_every_steps': set it, or leave "
                f"'audit_documents' out; got {self.audit_documents}"
            )
        return self


class ParallelConfig(Settings):
    """The mesh: how many ranks split the batch, the weights and the model's width.

    The four degrees multiply to the number of ranks. They do not decide what is trained: a run may
    go on with others.
    """

    data: Degree = Field(
        -1, description="Copies of the model, each with its share of the batch (ranks)."
    )
    z: Degree = Field(
        1, description="Ranks that share the storage of the weights, and the batch (ranks)."
    )
    y: Degree = Field(1, description="Ranks that split the hidden size (ranks).")
    x: Degree = Field(1, description="Ranks that split heads, FFN width and vocabulary (ranks).")
    order: tuple[AxisName, ...] = Field(
        ("data", "z", "y", "x"),
        description="Axes from far to near; ranks along the last are neighbours.",
    )
    reshard_after_forward: bool = Field(
        True, description="Free a block's gathered weights after its forward; false keeps them."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names: tuple[AxisName, ...] = get_args(AxisName)
        if sum(getattr(self, name) == -1 for name in names) > 1:
            raise ValueError(
                "only one of 'data', 'z', 'y' and 'x' can be -1, the rest of the ranks"
            )
        if sorted(self.order) != sorted(names):
            raise ValueError(
                f"'order' must name each of {', '.join(names)} once; got {', '.join(self.order)}"
            )
        return self


class AuditConfig(Settings):
    """What is measured when training has ended."""

    enabled: bool = Field(True, description="Audit the model as soon as it is exported.")
    suite: str = Field("extraction", description="Shipped suite or path of a suite's YAML.")
    continuation_tokens: PositiveInt | None = Field(
        None, description="Length of the continuation (tokens); null takes the suite's."
    )
    prefix_tokens: PositiveInt | None = Field(
        None, description="Length of the prefix (tokens); null takes the suite's (everything)."
    )
    min_prefix_tokens: PositiveInt = Field(
        5, description="Documents with fewer tokens before the continuation are too short."
    )
    window: Literal["last", "first"] = Field(
        "last",
        description="Part that is audited of a document longer than a row ('data.seq_len', of a "
        "run) or than the model's context (--model).",
    )
    min_documents: PositiveInt = Field(
        5, description="Refuse the audit below this many trained documents (documents)."
    )
    max_documents_per_bucket: PositiveInt | None = Field(
        None, description="Score a seeded sample of this size of each bucket; null scores all."
    )
    base: bool = Field(True, description="Score the model before training on the same documents.")
    reference: str | None = Field(
        None,
        description="Another model of the same vocabulary, for the membership score 'reference'.",
    )
    batch_tokens: PositiveInt | None = Field(
        None,
        description="Tokens of one forward pass, padding included (tokens); null takes what fits.",
    )
    device_map: Literal["auto"] | None = Field(
        None,
        description="auto: one process spreads the model over its GPUs, then memory, then disk; "
        "null: it must fit on one device, or be split by --nproc.",
    )
    max_memory: dict[str, str] | None = Field(
        None,
        description="For 'device_map': room on each device, e.g. {'0': '70GiB', cpu: '200GiB'}.",
    )
    cache: bool = Field(
        True, description="Keep scores (no text) in the cache folder, so that none is made twice."
    )
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Arithmetic of the audit.")
    excerpts: bool = Field(
        False, description="Write the worst findings' text to audit/private/ (mode 0600)."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_memory is not None and self.device_map is None:
            raise ValueError("'max_memory' does nothing without 'device_map'")
        return self


class RunConfig(Settings):
    """One training run and its audit."""

    name: Name = Field(description="Name of the run; its folder is 'output_dir'/'name'.")
    output_dir: str = Field("runs", description="Where run folders are made.")
    seed: Seed = Field(0, description="Decides every random draw of the run.")
    model: ModelConfig
    data: DataConfig
    mitigations: tuple[MitigationConfig, ...] = Field(
        (), description="Applied in this order; [] trains with the plain loss."
    )
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    budget: BudgetConfig | None = Field(
        None,
        description="Risk budget: {metric, limit, action}; acts on audits during training.",
    )
    parallel: ParallelConfig = ParallelConfig()
    audit: AuditConfig = AuditConfig()

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, values: Any) -> Any:
        # A template whose section has only comments left reads as `optim: null`.
        if isinstance(values, dict):
            sections = ("optim", "train", "parallel", "audit", "mitigations")
            values = {k: v for k, v in values.items() if v is not None or k not in sections}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        micro = self.train.micro_batch_size
        if micro is not None and self.train.batch_size % micro:
            raise ValueError(
                f"'train.micro_batch_size' must divide 'train.batch_size'; got {micro} and "
                f"{self.train.batch_size}"
            )
        tightens = self.budget is not None and self.budget.action == "tighten"
        used = {
            "data.study": self.data.study,
            "train.micro_batch_size": micro,
            "budget": self.budget,
            "budget.action: tighten": tightens or None,
        }
        check_mitigations(
            self.mitigations, beside=[name for name, value in used.items() if value is not None]
        )
        if self.budget is not None and self.train.audit_every_steps is None:
            raise ValueError(
                "'budget' is judged by audits during training: set 'train.audit_every_steps'"
            )
        forget, repetitions = self.data.forget, self.data.forget_repetitions
        check_forgetting(self.mitigations, forget=forget, repetitions=repetitions)
        if forget and self.model.scratch is not None:
            raise ValueError(
                "'data.forget' needs a trained model in 'model.path'; random weights of "
                "'model.scratch' have nothing to forget"
            )
        return self


# The settings of a sweep: runs that differ in few settings, trained and compared.


class SweepSetting(Settings):
    """One setting of a sweep: what differs from the common run."""

    name: Name = Field(description="Name of the setting in tables and charts.")
    overrides: dict[str, Any] = Field(
        {}, description="Settings that differ, e.g. {optim.lr: 1e-4}; not the data, model or audit."
    )
    mitigations: tuple[MitigationConfig, ...] = Field(
        (), description="Mitigations of this setting; [] is the plain loss."
    )


class SweepConfig(Settings):
    """Settings trained and audited on the same documents, steps and seeds, then compared."""

    name: Name = Field(description="Name of the sweep; its folder is 'output_dir'/'name'.")
    output_dir: str = Field("runs", description="Where the sweep's folder is made.")
    pretrain: dict[str, Any] | None = Field(
        None, description="A run trained first; its model is what every setting starts from."
    )
    run: dict[str, Any] = Field(
        description="What all settings share: a run without 'name', 'seed', 'mitigations' and "
        "'output_dir'; without 'model' where there is 'pretrain'."
    )
    settings: Annotated[tuple[SweepSetting, ...], Field(min_length=1, max_length=1000)] = Field(
        description="The settings to compare; the first is what the others are compared with."
    )
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, max_length=1000)] = Field(
        (0,), description="Each setting is trained once with each seed."
    )
    equal: Literal["steps", "supervised_tokens"] = Field(
        "steps",
        description="What settings that drop labels have as much of as the others: steps; "
        "supervised_tokens: labels that receive loss, by more background in more steps, documents "
        "of the study as often as before.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [setting.name for setting in self.settings]
        if len(set(names)) != len(names):
            raise ValueError(f"'settings' has a name twice: {', '.join(names)}")
        return self
