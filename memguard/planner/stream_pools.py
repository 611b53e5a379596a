"""Memory that CUDA's allocator keeps for the streams of FSDP2. No torch.

CUDA's caching allocator reuses freed memory only for the stream on which it was allocated, so that
what it reserves is the sum of its pools, each at its own peak. A step has three:

    computation   everything else (memory.py)
    gathers       what FSDP2 gathers, before it is copied to the weights of a unit: in forward the
                  unit before is freed only after the next has been gathered, whose own part is
                  rounded there too, where weights are stored wider than they are gathered
    reductions    stored gradients, from the first backward until the update is done; with several
                  micro-batches also what is added to those of one unit

A stored gradient is thus never replaced by activations: it counts in every phase. One process has
no FSDP2 and one pool; gradients of adapters are not reduced by it, and are in the first pool.
"""

from collections.abc import Sequence

from memguard.planner.parameters import Unit


def count_gathers(
    block: Unit,
    others: Sequence[Unit],
    *,
    num_layers: int,
    element_bytes: int,
    is_rounded: bool,
) -> int:
    """Return the peak of the pool of gathers (bytes).

    Args:
        block: a decoder block.
        others: the units of embedding, head and last norm; of tied weights one.
        num_layers: number of blocks.
        element_bytes: bytes of an element of gathered weights.
        is_rounded: whether stored weights are wider.
    """
    if block.z == 1:
        return 0
    # In the order of forward; tied weights are the root's, like the last norm, and come first.
    if len(others) == 1:
        order = [others[0], *[block] * min(2, num_layers)]
    else:
        embedding, head, last_norm = others
        order = [last_norm, embedding, *[block] * min(2, num_layers), head]
    sizes = [unit.gathered_bytes(element_bytes) for unit in order]
    rounded = [size // block.z if is_rounded else 0 for size in sizes]
    return max(map(sum, zip([0, *sizes], sizes, rounded, strict=False)))


def count_reductions(trained: Sequence[Unit], *, num_micro_batches: int, element_bytes: int) -> int:
    """Return what the pool of reductions has besides all stored gradients (bytes).

    Args:
        trained: the trained weights of each unit.
        num_micro_batches: micro-batches of a step.
        element_bytes: bytes of an element of a reduced gradient.
    """
    if num_micro_batches == 1:
        return 0
    return max((unit.stored * element_bytes for unit in trained), default=0)
