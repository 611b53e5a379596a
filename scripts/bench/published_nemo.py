"""Published runs of Megatron-Bridge and NeMo AutoModel on H100s, and the planner's estimates.

No constant of the planner is fitted to them, and none has a limit: they are printed by
published.py, to see what the planner says of adapters, of FP8 and of pipelines.

NeMo AutoModel trains adapters in BF16 with FSDP2 and tensor parallelism: the estimate is that of
memguard on the same mesh, with the same micro-batch and recomputation. Megatron-Bridge trains in
FP8 on pipelines, both of which memguard has not: the estimate is that of the fastest mesh which
memguard would plan in BF16 for the same rows on as many GPUs. The ratio is what both gain
together; the peak of an H100 in FP8 is twice that in BF16. The element-wise kernels of these
libraries are fused (Transformer Engine, Triton), and count as those of a compiled block.
"""

from dataclasses import dataclass, replace

from published_titan import LLAMA_8B, LLAMA_70B, LLAMA_405B

from memguard.parallel.mesh_shape import MeshShape, list_meshes
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.cost import estimate_step
from memguard.planner.fit import Fit, find_fit, rank_meshes
from memguard.planner.machine import load_machine
from memguard.planner.step_settings import AdapterSizes, Work

BRIDGE = (
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/067f987df03b8355b03192d88d70f1709fedf51a/"
    "docs/performance-summary-archive.md"
)
AUTOMODEL = (
    "https://github.com/NVIDIA-NeMo/Automodel/blob/2861c4143cd335539213b1b6d0c890cb17682444/"
    "docs/performance-summary.mdx"
)
MACHINE = load_machine("dgx-h100")


@dataclass(frozen=True, kw_only=True, slots=True)
class NemoRun:
    """A published run of Megatron-Bridge or NeMo AutoModel."""

    name: str
    sizes: ModelSizes
    num_gpus: int
    precision: str
    work: Work
    tokens_per_s: float
    """Published, for each GPU."""
    source: str
    mesh: MeshShape | None = None
    """The mesh with the same degrees; None of pipelines."""

    def plan(self) -> tuple[Fit, float]:
        """Return what memguard would run and its tokens a second for each GPU."""
        if self.mesh is None:
            meshes = list_meshes(self.num_gpus, self.sizes, batch_size=self.work.batch_size)
            ranked, _ = rank_meshes(self.sizes, meshes, self.work, MACHINE)
            fit = ranked[0]
        else:
            fit = find_fit(self.sizes, self.mesh, self.work, MACHINE)
        length = self.work.seq_len
        step = estimate_step(self.sizes, fit.mesh, fit.settings, MACHINE, seq_len=length)
        return fit, step.tokens_per_s / self.num_gpus


# Rows of a step, tokens of a row and precision as in the tables: containers 26.04.01 (405B) and
# 26.06 (70B). Its recipes adapt queries, keys and values only (perf_recipes/llama/h100/llama3.py).
_PRETRAINED = NemoRun(
    name="405B",
    sizes=LLAMA_405B,
    num_gpus=1024,
    precision="FP8",
    work=Work(seq_len=8192, batch_size=1536, is_compiled=True),
    tokens_per_s=328,
    source=BRIDGE,
)
_TUNED = Work(seq_len=4096, batch_size=32, is_compiled=True)
_QKV = AdapterSizes(r=16, targets=("q_proj", "k_proj", "v_proj"))
# Recipes of examples/llm_benchmark: rank 16 on all linear layers. That of 8B does not recompute and
# has dropout; that of 70B compiles and recomputes.
_ADAPTED_8B = NemoRun(
    name="8B LoRA",
    sizes=LLAMA_8B,
    num_gpus=1,
    precision="BF16",
    work=Work(
        seq_len=4096,
        batch_size=32,
        micro_batch_size=2,
        checkpointing="none",
        is_compiled=True,
        adapter=AdapterSizes(r=16, has_dropout=True),
    ),
    tokens_per_s=12_473,
    source=AUTOMODEL,
    mesh=MeshShape(),
)
NEMO_RUNS = (
    _PRETRAINED,
    replace(_PRETRAINED, name="70B", sizes=LLAMA_70B, num_gpus=32, work=_TUNED, tokens_per_s=1638),
    replace(
        _PRETRAINED,
        name="70B LoRA",
        sizes=LLAMA_70B,
        num_gpus=8,
        work=replace(_TUNED, adapter=_QKV),
        tokens_per_s=2643,
    ),
    NemoRun(
        name="70B LoRA",
        sizes=LLAMA_70B,
        num_gpus=8,
        precision="BF16",
        work=replace(_TUNED, micro_batch_size=2, checkpointing="full", adapter=AdapterSizes(r=16)),
        tokens_per_s=1092,
        source=AUTOMODEL,
        mesh=MeshShape(z=4, x=2),
    ),
    _ADAPTED_8B,
)
