"""Writes a model as a Hugging Face folder that appears under its name only when complete.

    plain   `export_model`     through save_pretrained, which renames some families' weights back
    mesh    `export_sharded`   tensor by tensor: shards [N/(y z), K/x] -> full [N, K] -> file

On a mesh all ranks of data replica 0 send their shards, in the written dtype and on the CPU, to the
rank that writes the present file; files go round the ranks. Each rectangle comes from the first
rank that has it, point-to-point over the default group, whose CPU side is gloo. No rank holds more
than its shard and one tensor. After every file all ranks agree that it is written: a full disk on
one ends them all.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor.placement_types import Placement

from memguard.errors import MemguardError, OtherRankFailed
from memguard.hf.safetensors import FileWriter, StoredTensor, WeightsFile, build_index, plan_files
from memguard.hf.sharded import ShardedLayer, count_sharded_parameters
from memguard.parallel.hf_plan import PLACEMENTS
from memguard.parallel.layout import Rectangle, all_rectangles
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Mesh4D
from memguard.records.record import cleared_on_error, commit, make_aside, written_aside


def list_replica_ranks(mesh: Mesh4D) -> list[int]:
    """Return the ranks of data replica 0, x fastest: together they hold the model once."""
    ranks: list[int] = mesh.device_mesh.mesh[0].flatten().tolist()
    return ranks


def gather_tensor(
    source: Tensor,
    placements: tuple[Placement, Placement],
    mesh: Mesh4D,
    *,
    dtype: torch.dtype,
    to_rank: int,
) -> Tensor | None:
    """Return the whole tensor, on the CPU, on one rank; None on the others.

    All ranks of data replica 0 call this in the same order.

    Args:
        source: a parameter whose shards are not gathered.
        placements: over (y, x).
        mesh: the ranks.
        dtype: of the result; shards are cast before they are sent.
        to_rank: one of `list_replica_ranks`.
    """
    rank = dist.get_rank()
    local = to_local(source.detach()).to("cpu", dtype)
    shape = tuple(source.shape)
    owners = _find_owners(shape, placements, mesh)
    if rank != to_rank:
        if rank in owners.values():
            dist.send(local.contiguous(), to_rank)
        return None
    full = torch.empty(shape, dtype=dtype)
    for rectangle, owner in owners.items():
        target = full[rectangle.slices]
        if owner == rank:
            target.copy_(local)
        elif target.is_contiguous():
            dist.recv(target, owner)
        else:
            piece = torch.empty(rectangle.shape, dtype=dtype)
            dist.recv(piece, owner)
            target.copy_(piece)
    return full


def _find_owners(
    shape: tuple[int, ...], placements: tuple[Placement, Placement], mesh: Mesh4D
) -> dict[Rectangle, int]:
    """Return the rectangles that make up a tensor and the first rank that stores each."""
    owners: dict[Rectangle, int] = {}
    stored = all_rectangles(shape, placements, mesh.shape)
    for rank, (_, rectangle) in zip(list_replica_ranks(mesh), stored, strict=True):
        if rectangle.num_elements:
            owners.setdefault(rectangle, rank)
    return owners


def export_model(
    model: Any, tokenizer: Any, folder: Path, *, dtype: torch.dtype, card: str
) -> None:
    """Write a Hugging Face folder: weights, configuration, tokenizer and README.md.

    The folder appears under its name only when it is complete (written aside, then renamed).

    Args:
        model: the trained module; its weights are cast to ``dtype`` on the way.
        tokenizer: saved beside it, so that the folder loads alone.
        folder: where; an older one of that name is replaced.
        dtype: of the written floating-point weights.
        card: text of README.md.
    """
    with written_aside(folder) as aside:
        # Cloning a tied weight per name would untie it: transformers drops the names that share
        # storage only where they still do.
        cast: dict[int, Tensor] = {}
        state = {}
        for name, tensor in model.state_dict().items():
            source = tensor.detach()
            if source.data_ptr() not in cast or source.numel() == 0:
                cast[source.data_ptr()] = source.to("cpu", _written_dtype(source, dtype))
            state[name] = cast[source.data_ptr()].view(source.shape)
        kept_dtype = model.config.dtype
        try:
            model.save_pretrained(aside, state_dict=state)
        finally:
            # It has set the module's dtype.
            model.config.dtype = kept_dtype
        _write_surroundings(model, tokenizer, aside, dtype=dtype, card=card)


def export_sharded(
    layer: ShardedLayer,
    tokenizer: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    card: str,
    max_file_bytes: int = 4 << 30,
) -> None:
    """Write the same folder from a mesh; all ranks call this, with the same arguments.

    Args:
        layer: the trained model.
        tokenizer: saved beside it, so that the folder loads alone.
        folder: where, on a file system that all ranks see; an older one of that name is replaced.
        dtype: of the written floating-point weights.
        card: text of README.md.
        max_file_bytes: of one file's weights.

    Raises:
        OSError: a file could not be written by this rank.
        OtherRankFailed: something failed on another rank.
    """
    is_main = dist.get_rank() == 0
    asides: list[Path | None] = [None]
    with _agreed():
        if is_main:
            asides = [make_aside(folder)]
    dist.broadcast_object_list(asides, src=0)
    aside = asides[0]
    assert aside is not None, "rank 0 has made it, or all ranks have ended"
    with cleared_on_error(aside if is_main else None):
        model = layer.vocab.model
        sources = _list_sources(model)
        files = plan_files(
            [
                StoredTensor(name=name, shape=tuple(each.shape), dtype=_written_dtype(each, dtype))
                for name, each in sources.items()
            ],
            max_file_bytes,
        )
        writers = list_replica_ranks(layer.sharding.mesh)
        for number, file in enumerate(files):
            _agree(_write_file(layer, sources, file, aside, writers[number % len(writers)]))
        with _agreed():
            if is_main:
                if len(files) > 1:
                    index = build_index(files, num_parameters=count_sharded_parameters(layer))
                    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                    (aside / "model.safetensors.index.json").write_text(text, encoding="utf-8")
                if model.can_generate():
                    model.generation_config.save_pretrained(aside)
                _write_surroundings(model, tokenizer, aside, dtype=dtype, card=card)
                commit(aside, folder)


def _list_sources(model: nn.Module) -> dict[str, Tensor]:
    """Return what is stored by name, tied parameters once, in the model's order."""
    parameters = dict(model.named_parameters())
    with_tied = dict(model.named_parameters(remove_duplicate=False))
    state: dict[str, Tensor] = model.state_dict()
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return {
        name: parameters.get(name, tensor)
        for name, tensor in state.items()
        if name not in left_out and (name in parameters or name not in with_tied)
    }


def _write_file(
    layer: ShardedLayer, sources: dict[str, Tensor], file: WeightsFile, aside: Path, writer: int
) -> OSError | None:
    """Gather one file's tensors, one by one, on the rank that writes them.

    Returns:
        Why the file could not be written: raised only after all tensors have come, because the
        others are in the middle of sending.
    """
    mesh, roles = layer.sharding.mesh, layer.plan.roles
    if dist.get_rank() not in list_replica_ranks(mesh):
        return None

    def gather_all() -> Iterator[Tensor | None]:
        for stored in file.tensors:
            source = sources[stored.name]
            module, _, leaf = stored.name.rpartition(".")
            if isinstance(source, nn.Parameter):
                placements = PLACEMENTS[roles[module], leaf]
                yield gather_tensor(source, placements, mesh, dtype=stored.dtype, to_rank=writer)
            else:  # A buffer: every rank has it.
                yield source.to("cpu", stored.dtype)

    gathered = gather_all()
    failure = None
    if dist.get_rank() == writer:
        try:
            with FileWriter(aside, file) as output:
                for full in gathered:
                    assert full is not None, "this rank is the writer"
                    output.write(full)
                    # Or it would still be there while the next one comes.
                    del full
        except OSError as error:
            failure = error
    for _ in gathered:
        pass
    return failure


@contextmanager
def _agreed() -> Iterator[None]:
    """Run something on every rank, then raise on all what was raised on any; see `_agree`."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    _agree(failure)


def _agree(failure: Exception | None) -> None:
    """Raise this rank's failure, or that another rank has one.

    Raises:
        OtherRankFailed: on ranks that did not fail themselves.
    """
    code = 0
    if failure is not None:
        code = failure.exit_code if isinstance(failure, MemguardError) else 1
    codes = [0] * dist.get_world_size()
    dist.all_gather_object(codes, code)
    if failure is not None:
        raise failure
    for rank, each in enumerate(codes):
        if each:
            raise OtherRankFailed(rank, each)


def _written_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _write_surroundings(
    model: Any, tokenizer: Any, aside: Path, *, dtype: torch.dtype, card: str
) -> None:
    """Write all but weights and generation settings."""
    config = copy.deepcopy(model.config)
    # The loader takes what stands there.
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / "README.md").write_text(card, encoding="utf-8")
    aside.chmod(0o755)
