"""Floating-point operations of one rank in one step: what estimated times are held against."""

from collections import Counter

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.parameters import RankSizes, TrainedBlock, find_trained
from memguard.planner.step_settings import StepSettings


def count_flops(sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, *, seq_len: int) -> int:
    """Count the floating-point operations of matmuls of one rank in one step.

    A token costs 2 operations per parameter in forward and 4 in backward, 2 for a frozen one, and
    attends to (seq_len + 1) / 2 others: causal attention over whole rows. Flash attention and
    attention in pieces skip masked pairs. Rows packed with shorter documents cost less, equally on
    every mesh. Heads are split over x only, so every rank along y computes their attention. The
    head is computed for the labels of the step only.
    """
    own = RankSizes.of(sizes, mesh)
    down = 2 * settings.num_tokens * own.features * own.width
    linear = 2 * settings.num_tokens * sum(outs * ins for outs, ins in own.list_linear().values())
    # Attention scores and their product with the values: two matmuls, half of them masked.
    attention = 2 * settings.num_tokens * (seq_len + 1) * own.queries
    part = find_trained(sizes, mesh, settings.adapter, settings.trained_modules)
    rank = 0 if settings.adapter is None else settings.adapter.r

    def count(block: TrainedBlock, *, is_reached: bool) -> int:
        layers = block.adapted
        adapters = sum(
            2 * settings.num_tokens * rank * (layer.ins + layer.outs) for layer in layers
        )
        forward = linear + attention + adapters
        if not is_reached:
            return forward
        trained = zip(block.unit.parameters, block.unit.shapes, strict=True)
        weights = sum(
            rows * length for name, (rows, length) in trained if name.endswith("_proj.weight")
        )
        total = 2 * forward + attention + adapters + 2 * settings.num_tokens * weights
        if settings.checkpointing == "full":
            # Recomputation ends at the last tensor that backward needs, the input of down, or what
            # the adapter of down computes. Selective checkpointing keeps the outputs of matmuls and
            # attention, but adds what adapters compute to them again.
            total += forward
            total -= 0 if any(layer.name == "down_proj" for layer in layers) else down
        if settings.checkpointing == "selective":
            total += sum(2 * settings.num_tokens * rank * layer.outs for layer in layers)
        return total

    unreached = Counter(map(id, part.blocks[: part.first]))
    total = 0
    for block, number in part.kinds:
        num_unreached = unreached[id(block)]
        total += num_unreached * count(block, is_reached=False)
        total += (number - num_unreached) * count(block, is_reached=True)
    if not part.has_embedding and part.num_reached:
        # A frozen embedding needs no gradient, nor does the input of the first block in backward.
        layers = part.blocks[part.first].adapted
        num_adapted = sum(layer.name in ("q_proj", "k_proj", "v_proj") for layer in layers)
        inputs = own.queries + 2 * own.keys + rank * num_adapted
        total -= 2 * settings.num_tokens * own.features * inputs
    head = 2 * settings.num_labels * own.features * own.vocab
    # Per-label losses recompute the logits in backward.
    num_head = (3 if settings.sums_nll else 4) - (not part.has_head)
    return settings.num_micro_batches * (total + num_head * head)
