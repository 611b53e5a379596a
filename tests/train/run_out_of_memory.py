"""`memguard train` whose rank 1 has memory for few rows: `python run_out_of_memory.py ROWS ...`.

Takes the place of `python -m memguard`; the remaining arguments are the command's.
"""

import sys
from typing import Any

import torch

from memguard.cli import main
from memguard.runtime.children import own_rank
from memguard.train.step import TrainStep

if __name__ == "__main__":
    most = int(sys.argv.pop(1))
    original = TrainStep._sum_loss

    def sum_loss(self: TrainStep, batch: Any, rows: slice) -> Any:
        if own_rank() == 1 and rows.stop - rows.start > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, batch, rows)

    TrainStep._sum_loss = sum_loss  # type: ignore[method-assign]
    main()
