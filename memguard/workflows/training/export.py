"""`memguard export --merge`: writes an adapter merged into its base, if the logits agree."""

import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memguard.data.corpus import load_corpus
from memguard.errors import UnreadableError
from memguard.hf.adapter_export import (
    LogitDifference,
    WrittenWeights,
    compare_logits,
    refuse_difference,
    write_merged,
)
from memguard.hf.checkpoint import find_positions, has_tokenizer, load_config, load_tokenizer
from memguard.hf.identity import hash_sums, hash_weights, split_sums, sum_model
from memguard.hf.merged_weights import open_merged
from memguard.records.record import atomic_folder, clear_left_folders, list_left_folders
from memguard.report.model_card import render_merged_card
from memguard.runtime import Console, quiet_libraries
from memguard.seeds import derive_seed
from memguard.workflows.training.checks import ExportRequest
from memguard.workflows.verify import format_bytes

_NUM_ROWS, _ROW_TOKENS = 4, 64
"""Rows of random tokens, and of a run's documents, on which the logits are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedExport:
    """Result of a merge."""

    folder: Path
    adapter: str
    """Kind, rank and alpha."""
    adapter_sha256: str
    base: str
    base_sha256: str
    weights_sha256: str
    """Of the written folder."""
    weights: WrittenWeights
    difference: LogitDifference
    num_own_rows: int
    """Compared rows from the run's documents."""
    is_base_form_known: bool
    """Whether the adapter was trained over the base as it was merged; peft does not store that."""
    wall_s: float

    def describe(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        dtype, values = self.weights.dtype, asdict(self)
        largest, mean_kl = self.difference.find_bounds(dtype)
        values["difference"] |= {"largest_allowed": largest, "mean_kl_allowed": mean_kl}
        values |= values.pop("weights")
        values["folder"], values["wall_s"] = str(self.folder), round(self.wall_s, 3)
        return values | {"dtype": str(dtype).removeprefix("torch.")}


def export_merged(request: ExportRequest) -> MergedExport:
    """Merge an adapter into its base and write the model, if it gives the same logits.

    Nothing is written if they differ by more than rounding.
    """
    console = Console()
    quiet_libraries()
    started = time.perf_counter()
    folder = request.adapter
    source, base_folder = open_merged(folder, base=request.base)
    own, base = split_sums(sum_model(folder, base=request.base))
    dtype = None if request.dtype is None else getattr(torch, request.dtype)
    own_rows = _read_own_rows(request.folder, console) if request.is_run else []
    _clear_left(request.out, console)
    with atomic_folder(request.out) as temporary:
        console.info(f"export: merging {source.adapter.describe()} into {source.adapter.base}")
        with console.progress("export", len(source.shapes), "tensors") as advance:
            weights = write_merged(
                source, base_folder, temporary, dtype=dtype, on_tensor=lambda: advance(1, "")
            )
        rows = [*_draw_rows(load_config(str(base_folder))), *own_rows]
        console.info(f"export: comparing logits on {sum(map(len, rows)):,} tokens, in fp32")
        difference = compare_logits(source, base_folder, temporary, rows)
        refuse_difference(difference, weights.dtype)
        if any(has_tokenizer(place) for place in (folder, base_folder)):
            load_tokenizer(str(folder), base=request.base).save_pretrained(temporary)
        else:
            console.warn("neither the adapter nor its base has a tokenizer; none was written")
        result = MergedExport(
            folder=request.out,
            adapter=source.adapter.describe(),
            adapter_sha256=hash_sums(own),
            base=source.adapter.base,
            base_sha256=hash_sums(base),
            weights_sha256=hash_weights(temporary),
            weights=weights,
            difference=difference,
            num_own_rows=len(own_rows),
            is_base_form_known=request.is_run or source.adapter.base_quantization is not None,
            wall_s=time.perf_counter() - started,
        )
        card = render_merged_card(result.describe())
        (temporary / "README.md").write_text(card, encoding="utf-8")
    console.info(
        f"export: {weights.num_merged:,} of {weights.num_tensors:,} tensors merged, "
        f"{format_bytes(weights.num_bytes)} in {result.wall_s:.1f} s"
    )
    console.info(f"export: {_write_difference(difference, weights.dtype)}")
    if not result.is_base_form_known:
        audit = f"memguard audit --model {shlex.quote(str(request.out))}"
        console.info(
            "export: if the adapter was trained over a base in 4 bits, this is another model than "
            f"the trained one, and needs an audit of its own: {audit}"
        )
    return result


def _clear_left(out: Path, console: Console) -> None:
    """Delete what killed exports to the same folder have left, which is as large as the model.

    What they may have left for other folders beside it is named.
    """
    deleted, kept = clear_left_folders(out)
    for path in deleted:
        console.info(f"export: deleted '{path}', which an export that was killed had left")
    for path in kept:
        console.warn(
            f"'{path}' may be left by an export that was killed, and was not deleted. Delete it if "
            f"no other export to '{out}' is running"
        )
    for path in list_left_folders(out):
        console.warn(
            f"'{path}' may be left by an export to another folder that was killed. Delete it if it "
            "is not in use"
        )


def _write_difference(difference: LogitDifference, dtype: torch.dtype) -> str:
    largest, mean_kl = difference.find_bounds(dtype)
    return (
        f"largest difference of a logit from adapter and base: {difference.largest:.2g} (at most "
        f"{largest:.2g}); KL {difference.mean_kl:.2g} nats a token (at most {mean_kl:.2g})"
    )


def _draw_rows(config: Any) -> list[Tensor]:
    """Return rows of random tokens, the same for every model of this vocabulary."""
    text = config.get_text_config()
    length = min(_ROW_TOKENS, find_positions(config) or _ROW_TOKENS)
    generator = torch.Generator().manual_seed(derive_seed(0, "compared logits"))
    rows = torch.randint(text.vocab_size, (_NUM_ROWS, length), generator=generator)
    return list(rows)


def _read_own_rows(run: Path, console: Console) -> list[Tensor]:
    """Return the first tokens of a few documents that a run trained on.

    None are returned to a user who may not read them.
    """
    try:
        corpus = load_corpus(run)
    except UnreadableError:
        console.info(
            "export: the run's documents cannot be read (no permission); logits are compared on "
            "random tokens only"
        )
        return []
    trained = [i for i, entry in enumerate(corpus.manifest) if entry.role == "trained"]
    step = max(1, len(trained) // _NUM_ROWS)
    return [
        torch.from_numpy(corpus.document(index).input_ids[:_ROW_TOKENS].astype("int64"))
        for index in trained[::step][:_NUM_ROWS]
    ]
