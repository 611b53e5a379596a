"""The settings of a run and of a sweep: one sentence, a unit and a default each."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from memguard.config.adapters import LoraConfig
from memguard.config.data import DataConfig
from memguard.config.mitigations import MitigationConfig, check_forgetting, check_mitigations
from memguard.config.optimizers import check_optimizer
from memguard.config.settings import Name, Positive, PositiveInt, Seed, Settings
from memguard.config.training import BudgetConfig, OptimConfig, TrainConfig
from memguard.config.utility import UtilityTask, check_tasks_differ, read_tasks
from memguard.errors import shorten

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


class ParallelConfig(Settings):
    """The mesh: how many ranks split the batch, the weights and the model's width.

    The product of the four degrees is the number of ranks. They do not affect the result: a run may
    resume with other degrees.
    """

    data: Degree = Field(
        1, description="Copies of the model, each with its share of the batch (ranks)."
    )
    z: Degree = Field(
        -1,
        description="Ranks that share the storage of the weights, and the batch (ranks); 1 by "
        "default where another axis is -1.",
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
    timeout_minutes: Positive = Field(
        30, description="Longest wait of a rank for the others in a step (minutes)."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_rest_once(cls, values: Any) -> Any:
        if isinstance(values, dict) and "z" not in values:
            others = {name: values.get(name) for name in get_args(AxisName)}
            if any(degree in (-1, "-1") for degree in others.values()):
                return {**values, "z": 1}
        return values

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
    """The audit after training."""

    enabled: bool = Field(True, description="Audit the model as soon as it is exported.")
    suite: str = Field("extraction", description="Shipped suite or path of a suite's YAML.")
    continuation_tokens: PositiveInt | None = Field(
        None, description="Length of a text's continuation (tokens); null takes the suite's."
    )
    prefix_tokens: PositiveInt | None = Field(
        None, description="Length of a text's prefix (tokens); null takes the suite's (everything)."
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
    max_generation_minutes: Positive | None = Field(
        30,
        description="Longest time that all models of an audit generate text where their weights do "
        "not fit at once and are gathered for each token (minutes); null: no limit.",
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
    cache: bool = Field(True, description="Cache scores (no text), so that none is computed twice.")
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="Arithmetic of the audit. auto: bf16 on a GPU that is fast in it (compute "
        "capability 8 or more), else fp32; logits and all after them are fp32 in any case.",
    )
    excerpts: bool = Field(
        False, description="Write the worst findings' text to audit/private/ (mode 0600)."
    )
    utility: tuple[UtilityTask, ...] = Field(
        (),
        description="Benchmark tasks of lm-eval (extra 'bench') that model and base model run, by "
        "name or YAML, e.g. hellaswag:200,./my_task.yaml, or as a list with 'task' and 'limit'.",
    )
    allow_download: bool = Field(
        False, description="Whether tasks of 'utility' may download their dataset from the hub."
    )

    @field_validator("utility", mode="before")
    @classmethod
    def _read_utility(cls, value: Any) -> Any:
        return read_tasks(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_memory is not None and self.device_map is None:
            raise ValueError("'max_memory' does nothing without 'device_map'")
        check_tasks_differ(self.utility)
        if self.allow_download and not self.utility:
            raise ValueError("'allow_download' does nothing without 'utility'")
        return self


class RunConfig(Settings):
    """One training run and its audit."""

    name: Name = Field(description="Name of the run; its folder is 'output_dir'/'name'.")
    output_dir: str = Field("runs", description="Folder of all run folders.")
    seed: Seed = Field(0, description="Decides every random draw of the run.")
    model: ModelConfig
    data: DataConfig
    mitigations: tuple[MitigationConfig, ...] = Field(
        (), description="Applied in this order; [] trains with the plain loss."
    )
    adapter: LoraConfig | None = Field(
        None,
        description="Train adapters of the layers instead of the weights: {name: lora, r: 8}; null "
        "trains the weights.",
    )
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    budget: BudgetConfig | None = Field(
        None, description="Risk budget: {metric, limit, action}; acts on audits during training."
    )
    parallel: ParallelConfig = ParallelConfig()
    audit: AuditConfig = AuditConfig()
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (), description="Trackers that get the numbers of metrics.jsonl and of the verdict."
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, values: Any) -> Any:
        # A section of the template whose lines are all commented out reads as `optim: null`.
        if isinstance(values, dict):
            sections = ("optim", "train", "parallel", "audit", "mitigations")
            values = {k: v for k, v in values.items() if v is not None or k not in sections}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        micro = self.train.micro_batch_size
        if isinstance(micro, int) and self.train.batch_size % micro:
            raise ValueError(
                f"'train.micro_batch_size' must divide 'train.batch_size'; got {micro} and "
                f"{self.train.batch_size}"
            )
        stall, timeout = self.train.stall_minutes, self.parallel.timeout_minutes
        if stall >= timeout:
            allowed = f"below 'parallel.timeout_minutes', {timeout:g}"
            raise ValueError(f"'train.stall_minutes' must be {allowed}; got {stall:g}")
        if self.adapter is not None:
            self._check_adapter()
        has_dp = any(mitigation.name == "dp_sgd" for mitigation in self.mitigations)
        check_optimizer(self.optim, self.train, has_adapter=self.adapter is not None, has_dp=has_dp)
        tightens = self.budget is not None and self.budget.action == "tighten"
        used = {
            "data.study": self.data.study,
            "train.micro_batch_size": micro if isinstance(micro, int) else None,
            "budget": self.budget,
            "budget.action: tighten": tightens or None,
        }
        check_mitigations(
            self.mitigations, beside=[name for name, value in used.items() if value is not None]
        )
        if self.budget is not None and self.train.audit_every_steps is None:
            raise ValueError("'budget' needs audits during training: set 'train.audit_every_steps'")
        chooses = self.train.keep == "best" or self.train.stop_after_worse is not None
        if chooses and not (self.data.heldout or self.data.heldout_documents):
            raise ValueError(
                "'train.keep' best and 'train.stop_after_worse' need documents of their own, since "
                "the control must not choose the step it is compared with: set "
                "'data.heldout_documents'"
            )
        forget, repetitions = self.data.forget, self.data.forget_repetitions
        check_forgetting(self.mitigations, forget=forget, repetitions=repetitions)
        if forget and self.model.scratch is not None:
            raise ValueError(
                "'data.forget' needs a trained model in 'model.path'; random weights of "
                "'model.scratch' have nothing to forget"
            )
        return self

    def _check_adapter(self) -> None:
        if self.model.scratch is not None:
            raise ValueError(
                "'adapter' needs a trained model in 'model.path'; random weights of "
                "'model.scratch' would stay random"
            )
        if self.train.trainable_modules is not None:
            raise ValueError(
                "'adapter' and 'train.trainable_modules' cannot be combined: with an adapter all "
                "weights of the model are frozen; remove one of them"
            )


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
    output_dir: str = Field("runs", description="Parent folder of the sweep's folder.")
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
        description="Quantity that is equal for all settings. steps: optimizer steps; "
        "supervised_tokens: labels with loss, by adding background rows in more steps for settings "
        "that drop labels, with unchanged repetitions of the study's documents.",
    )
    utility: str = Field(
        "heldout_nll",
        description="What front and recommendation take as utility: heldout_nll, or the name of a "
        "task of 'run.audit.utility'.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [setting.name for setting in self.settings]
        if len(set(names)) != len(names):
            raise ValueError(f"'settings' has a name twice: {', '.join(names)}")
        return self
