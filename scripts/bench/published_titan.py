"""Published torchtitan runs of Llama 3 on H100s and A100s, and the planner's estimates of them.

Rows of 8,192 tokens in bf16. No constant of the planner is fitted to them: they check it on another
library, other models, tensor parallelism and torch.compile. Printed by published.py.

The estimate is that of memguard on the mesh with the same degrees: FSDP of torchtitan is z, its
tensor parallelism is x. Their tensor parallelism also splits norms and residuals over the ranks,
which memguard does not. Of their selective checkpointing, which computes every second matmul again,
the estimate is the mean of memguard's selective (no matmul again) and full (all but the last): half
of the matmuls, by number of operations.
"""

from dataclasses import dataclass, replace

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.cost import estimate_step
from memguard.planner.machine import Machine, load_machine
from memguard.planner.step_settings import Checkpointing, StepSettings

SEQ_LEN = 8192

DECEMBER = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
JUNE = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "asyncTP_llama3_h100_2025-06_torchtitan.md"
)
AUGUST = "https://github.com/pytorch/torchtitan/blob/3faaa1a0d/docs/performance.md"

# As these pages describe it. 400 Gb/s of network for each GPU. It is limited to 500 W, at which its
# peak is not published: that of 700 W, to which the constants are fitted, stands here.
GRAND_TETON = Machine(
    name="grand-teton",
    gpu="H100 SXM 96 GB",
    memory_gib=96,
    gpus_per_node=8,
    link_gb_per_s=450,
    network_gb_per_s=400,
    memory_gb_per_s=2400,
    peak_tflops=989,
    sources=(DECEMBER, JUNE, AUGUST),
)
# Its cluster is not described.
A100 = load_machine("dgx-a100-80gb")

# From the config.json published with each model; equal for Llama 3 and 3.1.
LLAMA_8B = ModelSizes(
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    num_layers=32,
)
LLAMA_70B = replace(
    LLAMA_8B, hidden_size=8192, num_heads=64, intermediate_size=28672, num_layers=80
)
LLAMA_405B = replace(
    LLAMA_8B, hidden_size=16384, num_heads=128, intermediate_size=53248, num_layers=126
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TitanRun:
    """A published run of torchtitan."""

    name: str
    sizes: ModelSizes
    z: int
    x: int
    rows: int
    """Rows of a step on the ranks of one group along x."""
    tokens_per_s: float
    """Published, for each GPU."""
    is_compiled: bool
    checkpointing: Checkpointing
    source: str
    machine: Machine = GRAND_TETON

    @property
    def mesh(self) -> MeshShape:
        """The mesh with the same degrees."""
        return MeshShape(z=self.z, x=self.x)

    def estimate(self) -> float:
        """Return the planner's tokens a second for each GPU."""
        modes: tuple[Checkpointing, ...] = ("full",)
        if self.checkpointing == "selective":
            modes = ("selective", "full")
        tokens = self.rows * SEQ_LEN
        seconds = 0.0
        for mode in modes:
            settings = StepSettings(
                num_tokens=tokens,
                num_labels=tokens,
                checkpointing=mode,
                has_mask=False,
                is_compiled=self.is_compiled,
            )
            step = estimate_step(self.sizes, self.mesh, settings, self.machine, seq_len=SEQ_LEN)
            seconds += step.step_s / len(modes)
        return tokens / self.x / seconds


_EAGER_8B = TitanRun(
    name="8B",
    sizes=LLAMA_8B,
    z=8,
    x=1,
    rows=2,
    tokens_per_s=5762,
    is_compiled=False,
    checkpointing="selective",
    source=DECEMBER,
)
# Pages, tables: December: 1 and 3, batch size 2 a GPU, "op" selective checkpointing. June: the rows
# without quantization and without asynchronous tensor parallelism; their batch size is that of a
# tensor-parallel group. August: 405B without Float8, batch size 2 a group; its settings of that day
# (train_configs/llama3_405b.toml) compile the model; those of the A100 runs do not.
TITAN_RUNS = (
    replace(_EAGER_8B, tokens_per_s=6667, is_compiled=True),
    _EAGER_8B,
    replace(_EAGER_8B, z=128, tokens_per_s=6514, is_compiled=True),
    replace(_EAGER_8B, z=128, tokens_per_s=5605),
    TitanRun(
        name="8B",
        sizes=LLAMA_8B,
        z=8,
        x=8,
        rows=12,
        tokens_per_s=4378,
        is_compiled=True,
        checkpointing="selective",
        source=JUNE,
    ),
    TitanRun(
        name="70B",
        sizes=LLAMA_70B,
        z=32,
        x=8,
        rows=16,
        tokens_per_s=597.3,
        is_compiled=True,
        checkpointing="full",
        source=JUNE,
    ),
    TitanRun(
        name="405B",
        sizes=LLAMA_405B,
        z=16,
        x=8,
        rows=2,
        tokens_per_s=109,
        is_compiled=True,
        checkpointing="full",
        source=AUGUST,
    ),
    TitanRun(
        name="8B",
        sizes=LLAMA_8B,
        z=64,
        x=1,
        rows=1,
        tokens_per_s=2973,
        is_compiled=False,
        checkpointing="selective",
        source=AUGUST,
        machine=A100,
    ),
    TitanRun(
        name="70B",
        sizes=LLAMA_70B,
        z=64,
        x=1,
        rows=1,
        tokens_per_s=331,
        is_compiled=False,
        checkpointing="full",
        source=AUGUST,
        machine=A100,
    ),
)
