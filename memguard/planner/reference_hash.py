"""Counts the windows that goldfish mode ``hash_reference`` cannot distinguish.

The published code hashes a window by the product of its token ids. Where an id is 0 ('!' in the
vocabulary of GPT-2, <unk> in Llama's) the product is 0, and the labels of all these windows are
dropped together or kept together, independent of their text.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.config import GoldfishConfig, MitigationConfig
from memguard.config.mitigations import find_mitigation
from memguard.data.corpus import Corpus
from memguard.mitigation.goldfish import drops_zero_products, find_zero_products
from memguard.planner.dry_run import Remark, note, warn
from memguard.records.percent import format_percent

_MANY = 0.01
"""Share of the windows from which on a warning is given."""
_TOKENS_AT_ONCE = 1 << 20


def remark_on_reference_hash(
    corpus: Corpus, tokenizer: Any, mitigations: Sequence[MitigationConfig]
) -> list[Remark]:
    """Return a remark on the trained windows whose product is 0; empty in other modes.

    Documents longer than a row are counted whole. Training cuts them into pieces, which
    have slightly fewer windows.

    Args:
        corpus: all prepared documents.
        tokenizer: names the token with id 0.
        mitigations: of the run.
    """
    config = find_mitigation(mitigations, GoldfishConfig)
    if config is None or config.mode != "hash_reference":
        return []
    num_windows = num_zero = num_ids = 0
    for ids, start in _read_trained(corpus):
        is_window, is_zero = find_zero_products(ids, start, config.context_width)
        num_windows += int(is_window.sum())
        num_zero += int(is_zero.sum())
        num_ids += int((ids == 0).sum())
    token = f"'{tokenizer.convert_ids_to_tokens(0)}'"
    if not num_zero:
        text = f"No window of mode hash_reference has the product 0; token id 0 is {token}."
        return [note("goldfish", text)]
    share = num_zero / num_windows
    text = (
        f"Mode hash_reference multiplies the {config.context_width} token ids of a window, and "
        f"{num_zero:,} of {num_windows:,} windows ({format_percent(share)}) have the product 0: "
        + (f"token id 0, {token}, occurs {num_ids:,} times. " if num_ids else "it overflows. ")
        + _describe_fate(config)
    )
    if share < _MANY:
        return [note("goldfish", text)]
    return [warn("goldfish", f"{text} Mode 'hash' distinguishes all windows.")]


def _describe_fate(config: GoldfishConfig) -> str:
    """Describe whether the labels of these windows receive loss."""
    ks = [config.k, *config.k_by_dose.values()]
    dropped = [k for k in ks if drops_zero_products(k)]
    if len(dropped) == len(ks):
        return "None of the labels of these windows receives loss."
    if not dropped:
        return "All labels of these windows receive loss, so the mitigation does not protect them."
    return (
        f"With k up to {max(dropped)} all labels of these windows are left out of the loss; with a "
        "larger k all of them receive loss."
    )


def _read_trained(corpus: Corpus) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Yield tokens ``[N]`` of trained documents, a million at a time, and where each starts."""
    held: list[NDArray[np.int32]] = []
    size = 0
    for index, entry in enumerate(corpus.manifest):
        if not entry.planned_repetitions:
            continue
        held.append(corpus.document(index).input_ids)
        size += len(held[-1])
        if size >= _TOKENS_AT_ONCE:
            yield _lay_end_to_end(held)
            held, size = [], 0
    if held:
        yield _lay_end_to_end(held)


def _lay_end_to_end(
    documents: Sequence[NDArray[np.int32]],
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    sizes = np.array([len(ids) for ids in documents])
    return np.concatenate(documents), np.repeat(np.cumsum(sizes) - sizes, sizes)
