"""Whose rows a step had that is not finite; the ids of their documents in a private file."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from memguard.data.loader import Loader
from memguard.errors import Diverged, list_first, plural, shorten
from memguard.optim.in_backward import Lomo
from memguard.records import PRIVATE_MODE, write_atomically
from memguard.records.run_files import list_checkpoints
from memguard.train.run_state import RunState
from memguard.train.step import TrainStep, list_own_samples


@contextmanager
def explained(run: RunState, loader: Loader, step: TrainStep) -> Iterator[None]:
    """Name ranks and documents in the error of a step on all ranks that is not finite.

    They are those whose own loss is not finite, or all.
    """
    try:
        yield
    except Diverged as error:
        documents: set[int] = set()
        for sample in list_own_samples(loader, error.step - 1, step.lm)[0]:
            start, stop = loader.rows.row_start[loader.schedule[sample] :][:2]
            documents.update(loader.rows.document[start:stop].tolist())
        parts = run.runtime.gather_objects((error.is_own, documents))
        ranks = [rank for rank, (is_own, _) in enumerate(parts) if is_own] or [*range(len(parts))]
        found = sorted({index for rank in ranks for index in parts[rank][1]})
        ids = [loader.corpus.manifest[index].id for index in found]
        values = {"step": error.step, "what": error.what, "ranks": ranks, "documents": ids}
        path, text = run.folder / "diverged.json", json.dumps(values, indent=2)
        run.runtime.only_on_main(lambda: write_atomically(path, text.encode(), PRIVATE_MODE))
        named = f"rank{'s' * (len(ranks) > 1)} {list_first([str(rank) for rank in ranks], 4)}"
        counted = f"{plural(len(ids), 'document')} (ids in '{shorten(str(path), 40)}')"
        what = f"{error.what} on {named}, whose rows have {counted}; lower 'optim.lr'"
        if isinstance(step.optimizer, Lomo):
            # The update came first.
            saved = [folder.name for folder in list_checkpoints(run.folder / "checkpoints")]
            last = (saved or ["the start"])[-1]
            what = f"{error.what} on {named}, after the update: the last weights are of {last}"
            what += " ('diverged.json' names documents); lower 'optim.lr'"
        raise Diverged(error.step, what) from None
