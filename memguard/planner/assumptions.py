"""The assumptions of a plan's estimates, one phrase each. No torch.

Speeds were compared with published training runs by the length of their rows: ratios of estimated
to published tokens/s of the runs to which no constant was fitted, as printed by
scripts/bench/published.py. memguard itself has not been measured on a GPU: once figures of one are
committed, the last words of `describe_spread` are no longer true.
"""

from dataclasses import dataclass

from memguard.planner.machine import THIS_MACHINE, Machine
from memguard.records.texts import format_percent

_DEFAULTED = ("memory_gb_per_s", "matmul_share", "attention_share")
"""Figures of a GPU that a machine file may leave out."""


@dataclass(frozen=True, slots=True)
class RowClass:
    """Published runs with rows of similar lengths."""

    measured: str
    """Lengths of their rows."""
    shortest: int
    longest: int | None
    """Rows for which the spread is printed (tokens); None has no limit."""
    num_runs: int
    """Runs to which no constant was fitted."""
    lowest: float
    """Smallest ratio of estimated to published tokens/s."""
    highest: float

    def has(self, seq_len: int) -> bool:
        """Return whether rows of this length belong to it."""
        return self.shortest <= seq_len and (self.longest is None or seq_len <= self.longest)


ROW_CLASSES = (
    RowClass("up to 2,048", 1, 2048, num_runs=26, lowest=0.97, highest=1.03),
    RowClass("4,096 to 8,192", 2049, 8192, num_runs=3, lowest=0.96, highest=0.99),
    RowClass("16,384 and more", 8193, None, num_runs=6, lowest=0.97, highest=1.04),
)
OTHER_LOWEST, OTHER_HIGHEST = 0.85, 0.96
"""Of nine runs of another library, three with tensor parallelism and two on A100s."""

FUSED_LOWEST, FUSED_HIGHEST = 0.89, 0.90
"""Of two runs of LoRA in BF16 by a library with fused kernels (scripts/bench/published_nemo.py)."""


def describe_spread(seq_len: int) -> str:
    """Return how near estimated speeds are to published ones, in one phrase."""
    group = next(each for each in ROW_CLASSES if each.has(seq_len))
    return (
        f"speeds are {group.lowest:.2f} to {group.highest:.2f} of those of {group.num_runs} "
        f"published runs on H100s with rows of {group.measured} tokens, {OTHER_LOWEST:.2f} to "
        f"{OTHER_HIGHEST:.2f} of those of another library, and never measured by us"
    )


def list_assumptions(
    machine: Machine,
    *,
    has_mask: bool,
    seq_len: int,
    may_be_compiled: bool = False,
    compiles_adapters: bool = False,
) -> tuple[str, ...]:
    """Return the assumptions of the estimates, one phrase each.

    ``may_be_compiled``: the run may compile its blocks, which the times do not count;
    ``compiles_adapters``: it compiles them with adapters, which the times count.
    """
    assumptions = [
        f"{machine.reserved_gib:g} GiB per rank are used before the first tensor",
        f"the allocator loses {format_percent(machine.fragmentation, 0)} of activations, logits "
        f"and buffers to fragmentation{', as runs have measured' if machine.is_measured else ''}",
        "rows contain several documents, whose attention needs a mask"
        if has_mask
        else "flash attention reads where documents end, without a mask",
        describe_spread(seq_len)
        if machine.has_gpus
        else "speeds of a CPU are assumed, only to order the meshes",
    ]
    if may_be_compiled and machine.has_gpus:
        assumptions.append(
            "decoder blocks are taken as not compiled, while 'train.compile' at auto compiles them "
            "if the run is planned for more than ten minutes and one block can be compiled, and "
            "steps then take less time"
        )
    if compiles_adapters and machine.has_gpus:
        assumptions.append(
            "compiled blocks with adapters take as long as such blocks with fused kernels: "
            f"{FUSED_LOWEST:.2f} to {FUSED_HIGHEST:.2f} of the speeds of two published runs of "
            "LoRA, never measured by us"
        )
    assumed = [*machine.assumed, *(set(_DEFAULTED) - {*machine.assumed, *machine.model_fields_set})]
    assumed.sort(key=list(Machine.model_fields).index)
    if "peak_tflops" in assumed and machine.name == THIS_MACHINE and machine.has_gpus:
        assumptions.append(
            f"'{machine.gpu}' is in no machine file: its speeds are assumed, only to order the "
            "meshes"
        )
    if assumed:
        names = ", ".join(assumed)
        assumptions.append(f"{machine.name}'s {names}: assumed, not published")
    return tuple(assumptions)
