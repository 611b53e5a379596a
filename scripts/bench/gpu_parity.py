"""Parity of meshes on several devices with one process: losses, gradients and updated weights.

Tiny Llamas of tests/parallel/parity.py train for three steps in float64, with the reference and the
tolerances of the test suite, but over NCCL: on all meshes of degrees 1 and 2, and on (z=N).
"""

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import torch

from memguard.runtime import Runtime

TESTS = Path(__file__).resolve().parents[2] / "tests"
# float64: sums over ranks differ by some units in the last place (1e-16), matmuls of a few dozen
# terms by 1e-15; a wrong factor or a missing reduction is 1e-3 and more. AdamW divides by
# sqrt(v) + 1e-8, which magnifies differences where a gradient is nearly zero.
EXACT, EXACT_WEIGHTS = 1e-10, 1e-9
TOLERANCES = {"loss": EXACT, "gradient": EXACT, "norm": EXACT, "weight": EXACT_WEIGHTS}

Degrees = tuple[int, int, int, int]


def sample_meshes(num_ranks: int) -> list[Degrees]:
    """Return the meshes (data, z, y, x) of some ranks: degrees 1 and 2, and all ranks on z."""
    meshes = [
        degrees
        for degrees in itertools.product((1, 2), repeat=4)
        if math.prod(degrees) == num_ranks
    ]
    everything_on_z = (1, num_ranks, 1, 1)
    return meshes if everything_on_z in meshes else [*meshes, everything_on_z]


def compare_meshes(meshes: list[Degrees], runtime: Runtime) -> dict[str, Any]:
    """Return the largest relative differences on each mesh; every rank must call this."""
    for folder in (TESTS, TESTS / "parallel", TESTS.parent / "scripts"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import parity

    device = str(runtime.device)
    results = {}
    for degrees in meshes:
        rows = parity.NUM_ROWS // (degrees[0] * degrees[1])
        # An odd vocabulary: the last rank has fewer rows. Rows are packed and masked by goldfish.
        cases = [
            parity.Case(
                changes=(("tie_word_embeddings", True), ("vocab_size", 131)), device=device
            ),
            parity.Case(
                changes=(("tie_word_embeddings", False), ("vocab_size", 97)),
                micro_batch_size=max(1, rows // 2),
                device=device,
            ),
        ]
        differences = parity.compare(degrees, cases)
        results[str(degrees)] = {
            name: max(getattr(worst, name) for worst in differences) for name in TOLERANCES
        }
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()
    return results
