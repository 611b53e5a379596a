"""NLL of every trained token under the initial model: measured once, before the first step.

    reference_nll.npy   [tokens of the corpus] NLL (nats, fp32), NaN where the token is no label
    reference_nll.json  key of the run and hash of the losses; written last, as a sign that the
                        measurement is complete

Some mitigations compare the model with its initial weights. These are overwritten by the first
step, and a second copy would double the memory. The losses of the initial model are stored instead,
for exactly the rows that training uses; a resumed run reads them, on any mesh.

Only the owner of the run can read both files: with the initial model, which may be public, the loss
of a token tells which token it was, so that the array gives the texts back.
"""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memguard.data.loader import Loader
from memguard.errors import ModelError
from memguard.model.evaluation import evaluating
from memguard.records import IGNORE_LABEL, PRIVATE_MODE, write_atomically
from memguard.records.folders import RunFiles
from memguard.records.run_files import REFERENCE, REFERENCE_RECORD, ReferenceRecord
from memguard.records.sealed import FileSum, load_sealed, save_sealed
from memguard.runtime import Console
from memguard.train.run_state import RunState
from memguard.train.step import TrainStep


def find_reference(
    step: TrainStep, loader: Loader, run: RunState, *, num_steps: int
) -> NDArray[np.float32]:
    """Return the initial model's NLL of each token of the corpus; every rank calls this.

    Stored losses are read; missing or damaged ones are measured again, with the initial weights
    that ``step`` has.

    Raises:
        ModelError: a loss is not finite.
    """
    runtime = run.runtime
    if not runtime.from_main(lambda: _is_whole(run.key, run.folder, run.console)):
        measured = _measure(step, loader, num_steps=num_steps, console=run.console)
        runtime.only_on_main(lambda: _save(measured, run.key, run.folder))
    reference: NDArray[np.float32] = np.load(run.folder / REFERENCE, mmap_mode="r")
    return reference


def _measure(
    step: TrainStep, loader: Loader, *, num_steps: int, console: Console
) -> NDArray[np.float32]:
    """Return the NLL of each token on rank 0; the other ranks' arrays are empty."""
    lm, runtime = step.lm, step.runtime
    num_samples = sum(len(loader.samples(number)) for number in range(num_steps))
    rows = np.unique(loader.schedule[:num_samples])
    # The batch size of training fits here, as training needs more memory.
    size = step.train.count_micro_rows(-(-loader.batch_size // lm.num_batch_ways))
    batches = [rows[first : first + size].tolist() for first in range(0, len(rows), size)]
    nll = np.full(len(loader.corpus.input_ids) if runtime.is_main else 0, np.nan, np.float32)
    is_first = lm.mesh is None or lm.mesh.axis("y").rank == lm.mesh.axis("x").rank == 0
    with (
        evaluating(lm.model),
        console.progress("losses before training", len(rows), "rows") as advance,
    ):
        for mine in lm.deal(batches):
            batch = loader.plain_batch(mine or [])
            nll_N = step.measure_nll(batch)
            # Ranks that share the rows have the same losses.
            measured = (mine, nll_N) if mine and is_first else ([], nll_N[:0])
            for measured_rows, losses in runtime.gather_objects(measured):
                if not np.isfinite(losses).all():
                    raise ModelError(
                        "the model's losses before training are not finite: its weights are damaged"
                    )
                advance(len(measured_rows), "")
                if runtime.is_main:
                    nll[_label_positions(loader, measured_rows)] = losses
    return nll


def _label_positions(loader: Loader, rows: Sequence[int]) -> NDArray[np.int64]:
    """Return the corpus positions of the labels of some rows, in the order of their losses."""
    labels = loader.plain_batch(rows).labels
    positions = [
        loader.token_places(row)[np.flatnonzero(labels_T[1:] != IGNORE_LABEL) + 1]
        for row, labels_T in zip(rows, labels, strict=False)
    ]
    return np.concatenate([*positions, np.empty(0, dtype=np.int64)])


def _save(nll: NDArray[np.float32], run_key: str, folder: Path) -> None:
    content = io.BytesIO()
    np.save(content, nll)
    written = content.getvalue()
    write_atomically(folder / REFERENCE, written, mode=PRIVATE_MODE)
    losses = FileSum(num_bytes=len(written), sha256=hashlib.sha256(written).hexdigest())
    record = ReferenceRecord(run_key=run_key, num_tokens=len(nll), losses=losses)
    save_sealed(record, folder / REFERENCE_RECORD, mode=PRIVATE_MODE)


def _is_whole(run_key: str, folder: Path, console: Console) -> bool:
    """Return whether stored losses exist, belong to this run and are undamaged."""
    record = folder / REFERENCE_RECORD
    if not record.exists():
        return False
    damages = RunFiles(folder).find_damage("losses")
    if not damages and load_sealed(ReferenceRecord, record).run_key == run_key:
        return True
    reason = str(damages[0]) if damages else f"{record.name} belongs to another run"
    console.warn(f"{reason}; the losses before training are measured again")
    return False
