"""Repetitions that `TrainedRows` counts, against a count by the test of the trainer's own batches.

The test takes batches from the trainer's `training_step`, finds each run of tokens by looking
through all documents, and counts how often each token of a document was trained.
"""

import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import torch
import trainer_program as program
import transformers
import trl
from numpy.typing import NDArray
from ranks import RankPool

from memguard.data.documents import load_documents, make_table
from memguard.data.tokenization import tokenize_documents
from memguard.integrations.token_runs import RowFormat, RunIndex
from memguard.integrations.trained_rows import TrainedRows, find_resumed
from memguard.runtime import Runtime, detect_runtime
from memguard.workflows.auditing.trained_counts import TrainedCounts

# TRL warns that packing without flash attention may mix documents; rows are all that is read.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MAX_LENGTH = 12
EOS = 1
Run = tuple[int, ...]


def draw_words(size: int, seed: int = 3) -> list[str]:
    """Texts of 6 to 30 tokens: in rows of 12, one, two or three pieces."""
    draw = np.random.default_rng(seed)
    return [
        " ".join(f"w{id}" for id in draw.integers(2, program.VOCAB, draw.integers(6, 31)))
        for _ in range(size)
    ]


def tokenise(dataset: datasets.Dataset) -> list[tuple[str, list[int]]]:
    """Ids and tokens as an audit of the dataset has them."""
    table = make_table(dataset, name="members")
    loaded = load_documents((table,), setting="members", cache_dir=Path("nowhere"))
    tokens = tokenize_documents(
        loaded.documents,
        program.build_tokenizer(),
        append_eos=False,
        max_tokens=None,
        setting="members",
    )
    return [(each.id, each.input_ids.tolist()) for each in tokens]


class Counting(transformers.TrainerCallback):
    """Calls `TrainedRows` as an audit in a Trainer does."""

    def __init__(self, rows: TrainedRows, runtime: Runtime) -> None:
        self.rows, self.runtime = rows, runtime
        self.ranks = (runtime.rank, runtime.world_size)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rows.reset()
        if state.global_step:
            self.rows.load(find_resumed(args, state.global_step), *self.ranks)
        self.rows.watch(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rows.end_step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rows.save(Path(args.output_dir) / f"checkpoint-{state.global_step}", *self.ranks)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rows.unwatch()


class Recorder(transformers.TrainerCallback):
    """The test's own record: the runs of the batches of each step."""

    def __init__(self, trainer: Any) -> None:
        self.steps: dict[int, list[Run]] = {}
        self._open: list[Run] = []
        self._step = trainer.training_step
        trainer.training_step = self.record
        trainer.add_callback(self)

    def record(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        self._open += list_runs(inputs)
        return self._step(model, inputs, *rest, **named)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps[state.global_step], self._open = self._open, []

    @property
    def runs(self) -> list[Run]:
        """Of all steps."""
        return [run for step in self.steps.values() for run in step]


def list_runs(inputs: dict[str, Any]) -> Iterator[Run]:
    """Tokens between restarts of the positions, token by token, padding left out."""
    for row, ids in enumerate(inputs["input_ids"].tolist()):
        run: list[int] = []
        for place, token in enumerate(ids):
            mask = inputs.get("attention_mask")
            if mask is not None and not mask[row, place]:
                continue
            positions = inputs.get("position_ids")
            if positions is not None and positions[row, place] == 0 and run:
                yield tuple(run)
                run = []
            run.append(token)
        yield tuple(run)


def count_plainly(
    runs: Sequence[Run], documents: Sequence[tuple[str, list[int]]], *, size: int | None
) -> dict[str, int]:
    """Count how often each document's least trained token was trained, among those kept.

    A run is found in each document that has it, at any multiple of ``size`` tokens.
    """
    trained = {id: [0] * len(tokens) for id, tokens in documents}
    for run in runs:
        for id, tokens in documents:
            ended = [*tokens, EOS] if tokens[-1] != EOS else tokens
            for begin in range(0, len(tokens), size or len(tokens) + 1):
                end = begin + len(run)
                fits = end == len(tokens) or end == len(ended) or len(run) == size
                if fits and tuple(ended[begin:end]) == run:
                    for place in range(begin, min(end, len(tokens))):
                        trained[id][place] += 1
    return {id: min(counts) for id, counts in trained.items()}


def build(
    folder: Path, dataset: datasets.Dataset, *, rows: Any = None, **settings: Any
) -> tuple[Any, TrainedRows, Recorder]:
    """A trainer of TRL whose rows are counted, by us and by the test."""
    arguments = trl.SFTConfig(
        **program.set_up(folder, 4, 1)
        | {"max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": "random"}
        | settings
        | {program.RECOMPUTE: False},
        bf16=False,
    )
    trainer = trl.SFTTrainer(
        model=program.build_model(),
        args=arguments,
        train_dataset=dataset,
        processing_class=program.build_tokenizer(),
    )
    documents = tokenise(dataset if rows is None else rows)
    counted = TrainedRows(documents, RowFormat.of_trainer(arguments, eos_id=EOS))
    trainer.add_callback(Counting(counted, Runtime()))
    return trainer, counted, Recorder(trainer)


TEXTS = datasets.Dataset.from_dict({"text": draw_words(30)})
PAIRS = datasets.Dataset.from_dict(
    {
        "prompt": [" ".join(text.split()[:4]) + " " for text in draw_words(30)],
        "completion": [" ".join(text.split()[4:]) for text in draw_words(30)],
    }
)
CUT: dict[str, Any] = {"max_length": MAX_LENGTH}
WAYS: dict[str, tuple[datasets.Dataset, dict[str, Any]]] = {
    "padded": (TEXTS, {"max_length": None}),
    "cut": (TEXTS, CUT | {"gradient_accumulation_steps": 3}),
    "padding_free": (TEXTS, {"max_length": None, "padding_free": True, "pad_to_multiple_of": 8}),
    "bfd": (TEXTS, CUT | {"packing": True}),
    "bfd_split": (TEXTS, CUT | {"packing": True, "packing_strategy": "bfd_split"}),
    "completion": (PAIRS, CUT | {"packing": True, "completion_only_loss": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_counts_are_those_of_the_batches(tmp_path: Path, way: str) -> None:
    dataset, settings = WAYS[way]
    trainer, rows, recorder = build(tmp_path, dataset, **settings)
    trainer.train()
    counts = rows.counts(Runtime())
    documents = tokenise(dataset)
    runs = [run for run in recorder.runs if run != (0,)]  # Padding that fills a padding-free row.
    size = settings["max_length"]
    kept = documents
    if way in ("cut", "bfd", "completion"):
        kept = [(id, tokens[:size]) for id, tokens in documents]
    expected = count_plainly(runs, kept, size=size if way == "bfd_split" else None)
    assert expected == dict.fromkeys(expected, 2), "two epochs"
    assert counts.num_repetitions == expected
    assert (counts.num_runs, counts.num_unmatched, counts.num_equal) == (len(runs), 0, 0)
    assert counts.reason == ""
    pieces = {"padded": None, "padding_free": None, "bfd_split": "split"}
    assert counts.piece == pieces.get(way, "cut")
    assert counts.max_tokens == (None if counts.piece is None else MAX_LENGTH)


def test_equal_rows_have_the_sum_of_their_repetitions(tmp_path: Path) -> None:
    equal = datasets.concatenate_datasets([TEXTS, TEXTS.select([2, 3, 3])])
    settings = CUT | {"packing": True, "packing_strategy": "bfd_split"}
    trainer, rows, recorder = build(tmp_path, equal, **settings)
    trainer.train()
    counts = rows.counts(Runtime())
    # The test's count finds a run in each of the documents that have it.
    expected = count_plainly(recorder.runs, tokenise(equal), size=MAX_LENGTH)
    assert counts.num_repetitions == expected
    assert sorted(Counter(expected.values()).items()) == [(2, 28), (4, 2), (6, 3)]
    assert counts.num_equal == 5
    assert "5 members were trained as the same tokens as another member" in counts.describe()[1]


@pytest.mark.parametrize("way", ["bfd_split", "wrapped"])
def test_a_document_counts_once_all_its_pieces_are_trained(tmp_path: Path, way: str) -> None:
    settings = CUT | {"packing": True, "packing_strategy": way, "max_steps": 3}
    trainer, rows, recorder = build(tmp_path, TEXTS, **settings)
    trainer.train()
    counts = rows.counts(Runtime())
    documents = tokenise(TEXTS)
    if way == "wrapped":
        expected = count_in_stream(recorder.runs, documents, list(range(30)))
    else:
        expected = count_plainly(recorder.runs, documents, size=MAX_LENGTH)
    # Three steps of four rows are about a third of the documents.
    assert set(expected.values()) == {0, 1}
    assert counts.num_repetitions == expected
    assert counts.num_unmatched == 0


def count_in_stream(
    rows: Sequence[Run], documents: Sequence[tuple[str, list[int]]], order: Sequence[int]
) -> dict[str, int]:
    """Count the least trained token of each document in slices of all, joined with EOS."""
    stream: list[int] = []
    places: dict[str, range] = {}
    for number in order:
        id, tokens = documents[number]
        places[id] = range(len(stream), len(stream) + len(tokens))
        stream += [*tokens, EOS]
    trained = [0] * len(stream)
    for row in rows:
        (begin,) = (at for at in range(len(stream)) if tuple(stream[at : at + len(row)]) == row)
        for place in range(begin, begin + len(row)):
            trained[place] += 1
    return {id: min(trained[place] for place in places[id]) for id, _ in documents}


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_wrapped_rows_are_slices_of_the_stream(tmp_path: Path, is_shuffled: bool) -> None:
    settings = CUT | {"packing": True, "packing_strategy": "wrapped", "seed": 5}
    trainer, rows, recorder = build(tmp_path, TEXTS, shuffle_dataset=is_shuffled, **settings)
    trainer.train()
    counts = rows.counts(Runtime())
    documents = tokenise(TEXTS)
    order = TEXTS.add_column("row", list(range(30))).shuffle(seed=5)["row"]
    expected = count_in_stream(recorder.runs, documents, list(order) if is_shuffled else range(30))
    assert counts.num_repetitions == expected == dict.fromkeys(expected, 2)
    assert (counts.num_unmatched, counts.num_equal, counts.reason) == (0, 0, "")
    assert counts.piece == "split"
    # The pieces of a document end where a row does.
    first = documents[int(order[0]) if is_shuffled else 0][0]
    assert counts.first_piece_tokens[first] == min(MAX_LENGTH, len(dict(documents)[first]))


def test_wrapped_rows_of_another_order_are_not_counted(tmp_path: Path) -> None:
    settings = CUT | {"packing": True, "packing_strategy": "wrapped", "max_steps": 2}
    other = TEXTS.select(reversed(range(30)))
    trainer, rows, _ = build(tmp_path, TEXTS, rows=other, **settings)
    trainer.train()
    counts = rows.counts(Runtime())
    assert counts.num_unmatched == 8
    assert "8 of 8 sequences that were trained (100 %) match no member" in counts.reason
    assert "in the order of the training dataset" in counts.reason


@pytest.mark.parametrize("num_proc", [None, 3])
def test_rows_are_packed_in_batches_of_each_process(
    num_proc: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # datasets replaces the object by a copy where it starts processes; rich, for one, keeps the old
    # one, in which later tests would set variables in vain.
    monkeypatch.setattr(os, "environ", os.environ)
    # 2,500 documents: TRL packs 1,000 at a time, and each of its processes its own part.
    lengths = np.random.default_rng(0).integers(1, 9, 2500)
    documents = [(str(number), [number] * size) for number, size in enumerate(lengths)]
    dataset = datasets.Dataset.from_dict({"input_ids": [tokens for _, tokens in documents]})
    packed = trl.pack_dataset(dataset, 16, "wrapped", {"num_proc": num_proc})["input_ids"]
    rows = RowFormat(max_length=16, packing="wrapped", num_proc=num_proc)
    index = RunIndex(documents, rows)
    numbers = [index.find(np.array(row)) for row in packed]
    assert None not in numbers
    assert len(set(numbers)) == len(index)
    counts = index.count(np.ones(len(index), dtype=np.int64), num_runs=len(index), num_unmatched=0)
    assert list(counts.num_repetitions.values()) == [1] * 2500


class Replacing(transformers.Trainer):
    """Draws rows with replacement."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        draw = torch.Generator().manual_seed(0)
        return torch.utils.data.RandomSampler(
            self.train_dataset, replacement=True, num_samples=40, generator=draw
        )


def pad(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad on the left, as some tokenizers do."""
    size = max(len(feature["input_ids"]) for feature in features)
    ids = torch.zeros(len(features), size, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, feature in enumerate(features):
        ids[row, size - len(feature["input_ids"]) :] = torch.tensor(feature["input_ids"])
        mask[row, size - len(feature["input_ids"]) :] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def build_plain(
    folder: Path, documents: Sequence[tuple[str, list[int]]], kind: Any = None, **settings: Any
) -> tuple[Any, TrainedRows, Recorder]:
    arguments = transformers.TrainingArguments(
        **program.set_up(folder, 2, 2)
        | {"max_steps": -1, "train_sampling_strategy": "random"}
        | settings
    )
    trainer = (kind or transformers.Trainer)(
        model=program.build_model(),
        args=arguments,
        train_dataset=[{"input_ids": tokens} for _, tokens in documents],
        data_collator=pad,
    )
    rows = TrainedRows(documents, RowFormat.of_trainer(arguments, eos_id=EOS))
    trainer.add_callback(Counting(rows, detect_runtime()))
    return trainer, rows, Recorder(trainer)


def list_documents(size: int = 13) -> list[tuple[str, list[int]]]:
    return [(f"d{number}", text) for number, text in enumerate(program.draw_texts()[:size])]


def test_sampling_with_replacement_and_workers(tmp_path: Path) -> None:
    documents = list_documents()
    trainer, rows, recorder = build_plain(
        tmp_path, documents, Replacing, num_train_epochs=1, dataloader_num_workers=2
    )
    trainer.train()
    counts = rows.counts(Runtime())
    assert counts.num_repetitions == count_plainly(recorder.runs, documents, size=None)
    assert sum(counts.num_repetitions.values()) == counts.num_runs == 40
    assert len(set(counts.num_repetitions.values())) > 3


class Killed(Exception):
    """Ends training in the middle of a step."""


def kill_after(trainer: Any, num_batches: int) -> None:
    step, batches = trainer.training_step, iter(range(num_batches))

    def training_step(*args: Any, **kwargs: Any) -> Any:
        if next(batches, None) is None:
            raise Killed
        return step(*args, **kwargs)

    trainer.training_step = training_step


def test_a_killed_and_resumed_training_counts_each_batch_once(tmp_path: Path) -> None:
    documents = list_documents()
    settings: dict[str, Any] = {
        "num_train_epochs": 3,
        "dataloader_num_workers": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer, rows, before = build_plain(tmp_path, documents, **settings)
    # 13 rows are 7 batches, or 4 steps, of an epoch: killed in step 7, after one of its batches.
    kill_after(trainer, 12)
    with pytest.raises(Killed):
        trainer.train()
    assert sorted(before.steps) == [1, 2, 3, 4, 5, 6]
    checkpoint = tmp_path / "checkpoint-4"
    trainer, rows, after = build_plain(tmp_path, documents, **settings)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert sorted(after.steps) == list(range(5, 13))
    counts = rows.counts(Runtime())
    steps = {step: runs for step, runs in before.steps.items() if step <= 4} | after.steps
    runs = [run for each in steps.values() for run in each]
    expected = count_plainly(runs, documents, size=None)
    assert counts.num_repetitions == expected == dict.fromkeys(expected, 3)
    assert (counts.num_runs, counts.num_unmatched, counts.reason) == (39, 0, "")
    # Without the tally of the checkpoint it is not known what was trained before.
    (checkpoint / "memguard-tally-0-of-1.npz").unlink()
    trainer, rows, _ = build_plain(tmp_path, documents, **settings | {"max_steps": 5})
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert (
        "resumed from 'checkpoint-4', which has no memguard-tally" in rows.counts(Runtime()).reason
    )


def count_on_a_rank(folder: Path) -> tuple[list[list[Run]], TrainedCounts, str]:
    """Train and count as one of two processes that torchrun starts."""
    program.act_as_rank()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    settings = {"num_train_epochs": 2, "save_strategy": "epoch"}
    trainer, rows, recorder = build_plain(folder, list_documents(), **settings)
    trainer.train()
    wrapped = type(trainer.model_wrapped).__name__
    return list(recorder.steps.values()), rows.counts(detect_runtime()), wrapped


def test_two_processes_are_counted_together(tmp_path: Path, ranks: RankPool) -> None:
    (first, counts, wrapped), (second, same, _) = ranks(count_on_a_rank, 2, tmp_path)
    assert wrapped == "DistributedDataParallel"
    documents = list_documents()
    runs = [run for steps in (first, second) for step in steps for run in step]
    assert counts == same
    assert counts.num_repetitions == count_plainly(runs, documents, size=None)
    # 13 rows do not fill the batches of two processes: some rows are trained once more.
    assert counts.num_runs == len(runs) > 26
    # One process continues with the counts of both.
    rows = make_rows(documents)
    rows.load(tmp_path / "checkpoint-4", 0, 1)
    assert rows.counts(Runtime()) == counts
    for rank in range(3):
        rows.load(tmp_path / "checkpoint-4", rank, 3)
        assert rows.counts(Runtime()).num_runs == (counts.num_runs if rank == 0 else 0)
    (tmp_path / "checkpoint-4" / "memguard-tally-1-of-2.npz").unlink()
    rows.load(tmp_path / "checkpoint-4", 0, 1)
    assert "no memguard-tally files of all its processes" in rows.counts(Runtime()).reason


# -- the hook --------------------------------------------------------------------------------------


def watch(documents: Sequence[tuple[str, list[int]]], **settings: Any) -> tuple[TrainedRows, Any]:
    """Rows that watch a model in training."""
    rows, model = make_rows(documents, **settings), program.build_model().train()
    rows.watch(model)
    return rows, model


def make_rows(documents: Sequence[tuple[str, list[int]]], **settings: Any) -> TrainedRows:
    return TrainedRows(documents, RowFormat(eos_id=EOS, **settings))


def test_equal_documents_are_counted_together() -> None:
    documents = [("a", [5, 6, 7]), ("b", [5, 6, 7]), ("c", [8, 9]), ("d", [5, 6, 7, 2, 3])]
    rows, model = watch(documents, max_length=3)
    model(input_ids=torch.tensor([[5, 6, 7], [5, 6, 7]]))
    model(input_ids=torch.tensor([[8, 9, EOS]]))
    rows.end_step()
    counts = rows.counts(Runtime())
    # What is left of the longest document is the same tokens.
    assert counts.num_repetitions == {"a": 2, "b": 2, "c": 1, "d": 2}
    assert counts.num_equal == 3
    assert "3 members were trained as the same tokens as another member" in counts.describe()[1]


def test_a_document_of_equal_pieces_is_counted_once_a_training() -> None:
    documents = [("a", [5, 6, 5, 6, 7, 8]), ("b", [])]
    rows, model = watch(documents, max_length=2, packing="bfd_split")
    positions = torch.tensor([[0, 1, 0, 1, 0, 1, 0]])
    for _ in range(3):
        # TRL's pieces of the document and its EOS, which is a piece of its own.
        model(input_ids=torch.tensor([[5, 6, 5, 6, 7, 8, EOS]]), position_ids=positions)
    rows.end_step()
    counts = rows.counts(Runtime())
    assert counts.num_repetitions == {"a": 3, "b": 0}
    assert (counts.num_runs, counts.num_unmatched, counts.num_equal) == (12, 0, 0)


def compile_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def add_adapter(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


def checkpoint_layers(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "compiled in place": compile_in_place,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "adapter": add_adapter,
    "checkpointing": checkpoint_layers,
}


@pytest.mark.parametrize(
    # To compile takes as long as all the others.
    "kind",
    [pytest.param(kind, marks=[] if "compiled" in kind else pytest.mark.quick) for kind in KINDS],
)
def test_only_forwards_of_training_are_counted(kind: str) -> None:
    # Of one length, so that nothing is compiled twice.
    documents = [(id, tokens[:10]) for id, tokens in list_documents()]
    rows = make_rows(documents)
    original = program.build_model()
    model = KINDS[kind](original)
    # A Trainer's callbacks receive the model without the wrapper of torch.compile.
    rows.watch(original if kind == "compiled" else model)

    def feed(number: int) -> torch.Tensor:
        return torch.tensor([documents[number][1]])

    for step in range(3):
        model.train()
        ids = feed(step)
        model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            model(input_ids=feed(5))
        # The same batch again, as for TRL's metrics.
        model(input_ids=ids, labels=ids).loss.backward()
        rows.end_step()
        model.eval()
        model(input_ids=feed(6))
    expected = {id: int(number < 3) for number, (id, _) in enumerate(documents)}
    assert rows.counts(Runtime()).num_repetitions == expected
    model.train()
    model(input_ids=feed(8))
    assert rows.counts(Runtime()).num_repetitions == expected, "the step has not ended"
    rows.unwatch()
    model(input_ids=feed(9))
    rows.end_step()
    assert Counter(rows.counts(Runtime()).num_repetitions.values())[1] == 4
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.quick
def test_a_step_that_the_optimizer_skipped_is_not_counted() -> None:
    rows, model = watch(list_documents())
    model(input_ids=torch.tensor([list_documents()[0][1]]))
    rows.end_step(was_skipped=True)
    assert rows.counts(Runtime()).reason == "no training step has ended"


def test_what_is_not_recognised_is_told() -> None:
    documents = list_documents()
    rows, model = watch(documents)
    for _, tokens in documents * 8:
        model(input_ids=torch.tensor([tokens]))
    model(input_ids=torch.tensor([[9, 9, 9]]))
    rows.end_step()
    counts = rows.counts(Runtime())
    # 1 of 105 is below one in a hundred; 2 of 106 are above.
    assert (counts.num_runs, counts.num_unmatched, counts.reason) == (105, 1, "")
    assert "1 matches no member: some repetitions may be missing" in counts.describe()[0]
    model(inputs_embeds=torch.zeros(1, 3, 32))
    rows.end_step()
    counts = rows.counts(Runtime())
    assert "2 of 106 sequences that were trained (1.89 %) match no member" in counts.reason
    assert len(counts.describe()) == 1
    rows.reset()
    rows.end_step()
    assert "no batch was recorded" in rows.counts(Runtime()).reason


# -- tallies ---------------------------------------------------------------------------------------


def test_a_tally_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    documents = list_documents()
    rows, model = watch(documents)
    model(input_ids=torch.tensor([documents[0][1]]))
    rows.end_step()
    (tmp_path / "memguard-tally-1-of-2.npz").write_bytes(b"of another training")
    rows.save(tmp_path, 0, 1)
    file = tmp_path / "memguard-tally-0-of-1.npz"
    assert list(tmp_path.iterdir()) == [file]
    again = make_rows(documents)
    again.load(tmp_path, 0, 1)
    assert again.counts(Runtime()) == rows.counts(Runtime())
    # Neither text nor tokens are in the file, and nothing that runs when it is read.
    names = {"counts.npy", "runs.npy", "documents.npy", "reason.npy"}
    assert set(zipfile.ZipFile(file).namelist()) == names
    for other in (make_rows(documents[1:]), make_rows(documents, max_length=9)):
        other.load(tmp_path, 0, 1)
        assert "whose tally is of other documents" in other.counts(Runtime()).reason
    file.write_bytes(file.read_bytes()[:100])
    rows.load(tmp_path, 0, 1)
    assert "npz' is damaged" in rows.counts(Runtime()).reason
    rows.load(None, 0, 1)
    assert "whose folder is not known" in rows.counts(Runtime()).reason
    # The reason stays with the checkpoints that follow.
    rows.save(tmp_path / "later", 0, 1)
    again = make_rows(documents)
    again.load(tmp_path / "later", 0, 1)
    assert again.counts(Runtime()).reason == rows.counts(Runtime()).reason


@pytest.mark.parametrize(
    "content",
    [
        {"counts": np.array(["text"] * 3)},
        {"counts": np.zeros(2, dtype=np.int64)},
        {"counts": np.zeros(3)},
        {"runs": np.zeros((), dtype=np.int64)},
    ],
)
def test_a_tally_of_other_contents_is_damaged(
    tmp_path: Path, content: dict[str, NDArray[Any]]
) -> None:
    documents = list_documents()
    rows, _ = watch(documents)
    rows.save(tmp_path, 0, 1)
    file = tmp_path / "memguard-tally-0-of-1.npz"
    with np.load(file) as saved:
        whole = dict(saved)
    np.savez(file, **whole | content)
    rows.load(tmp_path, 0, 1)
    assert "npz' is damaged" in rows.counts(Runtime()).reason


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 300))]
)
def test_a_flipped_or_lost_byte_of_a_tally_is_no_error(tmp_path: Path, seed: int) -> None:
    rows, _ = watch(list_documents())
    rows.save(tmp_path, 0, 1)
    file = tmp_path / "memguard-tally-0-of-1.npz"
    content, rng = bytearray(file.read_bytes()), np.random.default_rng(seed)
    if seed % 2:
        content[int(rng.integers(len(content)))] ^= int(rng.integers(1, 256))
    file.write_bytes(
        content if seed % 2 else content[: int(rng.integers(len(content)))] * (seed > 0)
    )
    rows.load(tmp_path, 0, 1)
    counts = rows.counts(Runtime())
    assert counts.reason


def test_training_that_begins_again_adds_to_the_counts() -> None:
    documents = list_documents()
    rows, model = watch(documents)
    model(input_ids=torch.tensor([documents[0][1]]))
    rows.end_step()
    before = rows.counts(Runtime())
    again = make_rows(documents)
    again.go_on(rows)
    assert again.counts(Runtime()) == before
    other = make_rows(documents, max_length=9)
    other.go_on(rows)
    assert "began again with another packing" in other.counts(Runtime()).reason


def test_the_checkpoint_that_was_resumed_is_found(tmp_path: Path) -> None:
    def save(folder: Path, step: int) -> Path:
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        return folder

    def find(named: Any, step: int) -> Path | None:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, resume_from_checkpoint=named
        )
        return find_resumed(arguments, step)

    own, other = save(tmp_path / "checkpoint-4", 4), save(tmp_path / "other", 7)
    assert find(None, 4) == own
    assert find(str(other), 7) == other
    assert find(str(other), 4) == own, "another argument of trainer.train"
    assert find(None, 5) is None
