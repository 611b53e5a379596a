"""Whose rows a step had whose loss or gradient norm is not finite; their ids in a private file."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from memguard.data.loader import Loader
from memguard.errors import Diverged, list_first, plural, shorten
from memguard.records import PRIVATE_MODE, write_atomically
from memguard.train.run_state import RunState
from memguard.train.step import NotFinite, TrainStep, list_own_samples


@contextmanager
def explained(run: RunState, loader: Loader, step: TrainStep, number: int) -> Iterator[None]:
    """Name ranks and documents if a step, from 0, is not finite; all ranks call this.

    Raises:
        Diverged: the documents are those of the ranks whose own loss is not finite, or of all.
    """
    try:
        yield
    except NotFinite as error:
        documents: set[int] = set()
        for sample in list_own_samples(loader, number, step.lm)[0]:
            first, last = loader.rows.row_start[loader.schedule[sample] :][:2]
            documents.update(loader.rows.document[first:last].tolist())
        parts = run.runtime.gather_objects((error.is_own, documents))
        ranks = [rank for rank, (is_own, _) in enumerate(parts) if is_own] or list(
            range(len(parts))
        )
        ids = [
            loader.corpus.manifest[n].id for n in sorted(set().union(*(parts[r][1] for r in ranks)))
        ]
        path, values = run.folder / "diverged.json", {"step": number + 1, "ranks": ranks}
        text = json.dumps({**values, "what": str(error), "documents": ids}, indent=2)
        run.runtime.only_on_main(lambda: write_atomically(path, text.encode(), PRIVATE_MODE))
        named = f"rank{'s' * (len(ranks) > 1)} {list_first([str(rank) for rank in ranks], 4)}"
        raise Diverged(
            number + 1,
            f"{error} on {named}, with {plural(len(ids), 'document')} in the rows, see "
            f"'{shorten(str(path), 50)}'. Lower 'optim.lr' (now {step.optim.lr:g})",
        ) from None
