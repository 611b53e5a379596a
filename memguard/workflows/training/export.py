"""Writes a checkpoint's model, or an adapter merged into its base if the logits agree.

The model of a step is read tensor group by tensor group, from a checkpoint of any mesh; weights
that were not trained are the base's, and adapters are whole in memory. Its audit is that of a run
that ended there: with the repetitions and the log of that step, in a folder that is deleted.
"""

import shlex
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
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
    make_peft_config,
    refuse_difference,
    write_adapter,
    write_merged,
)
from memguard.hf.assembly import Assembly, build_meta_layer, find_aliases
from memguard.hf.checkpoint import (
    find_positions,
    has_tokenizer,
    load_config,
    load_tokenizer,
)
from memguard.hf.export import export_stored
from memguard.hf.export_rehearsal import repair_generation
from memguard.hf.identity import hash_sums, hash_weights, split_sums, sum_model
from memguard.hf.load import open_stored
from memguard.hf.merged_weights import open_merged
from memguard.hf.safetensors import ModuleWeights, WeightSource, match_names
from memguard.parallel.layout import ShardSlice
from memguard.parallel.lora import is_adapter_parameter
from memguard.records import save_manifest
from memguard.records.folders import CheckpointFolder
from memguard.records.record import (
    TEMPORARY,
    atomic_folder,
    clear_left_folders,
    list_left_folders,
)
from memguard.records.run_files import CheckpointManifest, load_checkpoint_manifest
from memguard.records.sealed import refuse_damage
from memguard.report.model_card import render_merged_card
from memguard.runtime import Console, Runtime, quiet_libraries
from memguard.runtime.shared_sums import sum_ahead
from memguard.seeds import derive_seed
from memguard.train.checkpoint import LOG, check_belongs, list_listed
from memguard.train.checkpoint_storage import CheckpointMetadata, load_metadata, read_tensor
from memguard.workflows.auditing.checks import AuditedRun
from memguard.workflows.auditing.pages import render_card
from memguard.workflows.auditing.target import find_base
from memguard.workflows.common.folder import RunFolder
from memguard.workflows.common.setup import (
    choose_export_dtype,
    draw_model,
    load_known_tokenizer,
    make_lora,
    read_model_config,
    sum_base,
)
from memguard.workflows.training.checks import ExportRequest
from memguard.workflows.training.data import PreparedRun, count_until, load_trained_tokenizer
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
    largest, mean_kl = difference.find_bounds(weights.dtype)
    console.info(
        f"export: largest difference of a logit from adapter and base: {difference.largest:.2g} "
        f"(at most {largest:.2g}); KL {difference.mean_kl:.2g} nats a token (at most {mean_kl:.2g})"
    )
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


# -- a run after one of its steps -----------------------------------------------------------------


def export_step(request: ExportRequest) -> dict[str, Any]:
    """Write a checkpoint's model, and return what `--json` prints."""
    quiet_libraries()
    config, step = RunFolder(request.folder).read_config(), request.step
    run = AuditedRun(folder=request.folder, config=config, base=request.base, step=step)
    _clear_left(request.out, Console())
    model = StepModel(run)
    model.export(request.out, card=model.render_card())
    return {"folder": str(request.out), "step": step, "weights_sha256": hash_weights(request.out)}


@contextmanager
def run_at_step(run: AuditedRun, beside: Path, console: Console) -> Iterator[AuditedRun]:
    """Yield the run that ended after a step, in a temporary folder ``beside`` its report."""
    console.info(f"audit: exporting the model of step {run.step}")
    # What a killed process leaves is deleted by the next that locks the folder.
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=beside) as name:
        yield StepModel(run).write_run(Path(name))


class StepModel:
    """The model of one of a run's checkpoints."""

    def __init__(
        self, run: AuditedRun, *, tokenizer: Any = None, runtime: Runtime | None = None
    ) -> None:
        """Check the run's checkpoint and open it; every rank calls this.

        The tokenizer is that of the run, whose training ends here; None loads it.

        Raises:
            ModelError: there is none of this step, or the model before training is missing.
            RecordError: it is damaged, or weights that it does not have were changed.
        """
        self._runtime = runtime = runtime or Runtime()
        step = run.step
        assert step is not None, "a checkpoint has a step"
        path = runtime.from_main(lambda: RunFolder(run.folder).find_checkpoint(step))
        read = sum_ahead(partial(list_listed, path), runtime)

        def open_records() -> tuple[CheckpointManifest, CheckpointMetadata]:
            damages = CheckpointFolder(path).find_damage(read=read)
            again = "Name another --step" if tokenizer is None else "Run the same command again"
            refuse_damage(path, damages, again)
            manifest = load_checkpoint_manifest(path)
            return manifest, load_metadata(path, manifest.files)

        self.progress, stored = runtime.from_main(open_records)
        self.path, self.read = path, partial(read_tensor, path, stored)
        model, base = run.config.model, find_base(run.folder, run.config, run.base)
        revision = model.revision if base == model.path else None
        model = model.model_copy(update={"path": base, "revision": revision})
        self.run = replace(run, base=base)
        self.config = run.config.model_copy(update={"model": model})
        # Adapters of a run that ends here do not need the weights that they belong to.
        if self.progress.base and (tokenizer is None or run.config.adapter is None):
            key, sample = self.progress.run_key, self.progress.sample_sha256
            sums = sum_base(self.config, runtime)
            check_belongs(path, self.progress, run_key=key, sample_sha256=sample, base=sums)
        known = tokenizer or load_known_tokenizer(self.config)
        self.tokenizer = known or load_trained_tokenizer(run.folder)

    def export(self, out: Path, *, card: str) -> None:
        """Write the model or the adapter; every rank calls this."""
        config, path = self.config, self.config.model.path
        spec, trainable = make_lora(config), config.train.trainable_modules
        assembly = Assembly(
            mesh=None, device=torch.device("cpu"), adapter=spec, trainable_modules=trainable
        )
        before: WeightSource | None = None
        if path is None:
            model = build_meta_layer(read_model_config(config, self.tokenizer), assembly).lm.model
        else:
            stored = open_stored(path, assembly, revision=config.model.revision)
            model, before = stored.outline(assembly).lm.model, stored.weights
        parameters, aliases = dict(model.named_parameters()), find_aliases(model)
        if spec is not None and path is not None:
            names = [name for name in parameters if is_adapter_parameter(name)]
            fields = make_peft_config(model, spec, base=path, revision=config.model.revision)
            write = partial(write_adapter, config=fields, tokenizer=self.tokenizer, folder=out)
            form = None if config.adapter is None else config.adapter.quantization
            self._runtime.only_on_main(
                lambda: write(
                    {name: self.read(f"model.{name}") for name in names},
                    card=card,
                    base_quantization=form,
                )
            )
            return
        frozen = {n: tuple(p.shape) for n, p in parameters.items() if not p.requires_grad}
        if before is None and frozen:
            before = ModuleWeights(draw_model(config, self.tokenizer))
        found: dict[str, str] = {}
        if before is not None:
            found, _ = match_names(frozen, aliases, before, model=str(path))

        def read(name: str, dtype: torch.dtype) -> Tensor:
            name = aliases.get(name, name)
            if before is None or name not in found:
                return self.read(f"model.{name}", dtype)
            return before.read(found[name], ShardSlice.whole(parameters[name].shape)).to(dtype)

        repair_generation(model)
        dtype, runtime = choose_export_dtype(config), self._runtime
        export_stored(model, read, self.tokenizer, out, dtype=dtype, card=card, runtime=runtime)

    def render_card(self) -> str:
        """Return README.md of the step's model."""
        config = self.run.config
        return render_card(config, name=f"{config.name}, step {self.run.step}")

    def write_run(self, out: Path) -> AuditedRun:
        """Write a run that ended after the step."""
        folder = self.run.folder
        prepared = PreparedRun(folder=folder, corpus=load_corpus(folder), tokenizer=self.tokenizer)
        manifest, end = count_until(self.config, prepared, self.progress, self.read)
        target = out / ("model" if self.config.adapter is None else "adapter")
        self.export(target, card=self.render_card())
        save_manifest(manifest, out / "manifest.jsonl")
        log = (self.path / LOG).read_bytes() + f"{end.model_dump_json()}\n".encode()
        (out / LOG).write_bytes(log)
        (out / "prepared").symlink_to((folder / "prepared").resolve())
        return replace(self.run, folder=out)
