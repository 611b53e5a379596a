"""Labels that TRL trains on, from goldfish_dataset and wrap_collator, against memguard's own."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import trainer_program as program
import trl

from memguard.config.mitigations import GoldfishConfig
from memguard.errors import ConfigError
from memguard.integrations.transformers import goldfish_dataset, wrap_collator
from memguard.mitigation import build_mitigations
from memguard.records import IGNORE_LABEL

# TRL warns that packing without flash attention may mix documents; labels are all that is read.
pytestmark = pytest.mark.filterwarnings("ignore")
MAX_LENGTH = 12
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"max_length": None},
    "cut": {"max_length": MAX_LENGTH},
    "dft": {"max_length": None, "loss_type": "dft"},
    "padding_free": {"max_length": None, "padding_free": True},
    "bfd": {"packing": True, "max_length": MAX_LENGTH},
    "bfd_split": {"packing": True, "packing_strategy": "bfd_split", "max_length": MAX_LENGTH},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": MAX_LENGTH},
}


def mask_alone(text: list[int], kept: list[int] | None = None) -> list[int]:
    """The labels of a document in memguard's own training."""
    masks = build_mitigations(
        [GoldfishConfig(name="goldfish", **program.GOLDFISH)], special_ids=[0, 1]
    )
    labels = masks.mask_labels(
        np.array(text), np.array(text if kept is None else kept), generator=np.random.default_rng(0)
    )
    labels[0] = IGNORE_LABEL
    result: list[int] = labels.tolist()
    return result


def make_trainer(folder: Path, dataset: datasets.Dataset, **settings: Any) -> Any:
    tokenizer = program.build_tokenizer()
    arguments = trl.SFTConfig(
        **program.set_up(folder, 4, 1) | {program.RECOMPUTE: False},
        bf16=False,
        dataset_num_proc=None,
        **settings,
    )
    return trl.SFTTrainer(
        model=program.build_model(),
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
    )


def list_runs(trainer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens and labels of each run between restarts of the positions, padding left out."""
    for batch in trainer.get_train_dataloader():
        for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
            kept = ids != 0
            starts = [0]
            if "position_ids" in batch:
                starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
            for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                here = kept[begin:end]
                if here.any():
                    yield ids[begin:end][here].tolist(), labels[begin:end][here].tolist()


def find_piece(run: list[int], texts: list[list[int]]) -> tuple[list[int], int]:
    """The document that a run is a piece of, and where in it the piece begins."""
    places = [
        (text, begin)
        for text in texts
        for begin in range(len(text) - len(run) + 1)
        if text[begin : begin + len(run)] == run
    ]
    assert places, "a run of no document"
    return places[0]


@pytest.mark.parametrize("way", WAYS)
def test_labels_of_the_dataset_are_ours_however_it_is_packed(tmp_path: Path, way: str) -> None:
    texts = program.draw_texts()
    tokens = datasets.Dataset.from_list([{"input_ids": text} for text in texts])
    dataset = goldfish_dataset(tokens, program.build_tokenizer(), **program.GOLDFISH)
    assert dataset["labels"] == [mask_alone(text) for text in texts]
    trainer = make_trainer(tmp_path, dataset, **WAYS[way])
    runs = list(list_runs(trainer))
    if way == "wrapped":
        # Rows are slices of one stream: the labels of each token stand where the token does.
        stream = [pair for text in texts for pair in zip(text, mask_alone(text), strict=True)]
        rows = [list(zip(*run, strict=True)) for run in runs]
        ours = [stream[at : at + MAX_LENGTH] for at in range(0, len(stream), MAX_LENGTH)]
        assert sorted(rows) == sorted(ours[: len(rows)])
        return
    assert sum(len(ids) for ids, _ in runs) == sum(
        min(len(text), MAX_LENGTH if way in ("cut", "bfd") else len(text)) for text in texts
    )
    num_dropped = 0
    for ids, labels in runs:
        text, begin = find_piece(ids, texts)
        ours = mask_alone(text)[begin : begin + len(ids)]
        ours[0] = IGNORE_LABEL  # TRL does not predict the first token of a piece.
        assert labels == ours
        num_dropped += labels[1:].count(IGNORE_LABEL)
    assert num_dropped


@pytest.mark.parametrize("way", ["padded", "padding_free", "bfd"])
def test_a_wrapped_collator_gives_the_same_labels(tmp_path: Path, way: str) -> None:
    texts = program.draw_texts()
    tokens = datasets.Dataset.from_list([{"input_ids": text} for text in texts])
    of_dataset = make_trainer(
        tmp_path,
        goldfish_dataset(tokens, program.build_tokenizer(), **program.GOLDFISH),
        **WAYS[way],
    )
    wrapped = make_trainer(tmp_path, tokens, **WAYS[way])
    wrap_collator(wrapped, **program.GOLDFISH)
    assert sorted(list_runs(wrapped)) == sorted(list_runs(of_dataset))


@pytest.mark.parametrize("column", ["completion_mask", "assistant_masks"])
def test_what_trl_leaves_out_has_no_label(tmp_path: Path, column: str) -> None:
    texts = program.draw_texts()
    rows = [{"input_ids": text, column: [0] * 6 + [1] * (len(text) - 6)} for text in texts]
    dataset = goldfish_dataset(
        datasets.Dataset.from_list(rows), program.build_tokenizer(), **program.GOLDFISH
    )
    kept = [[IGNORE_LABEL] * 6 + text[6:] for text in texts]
    ours = [mask_alone(text, labels) for text, labels in zip(texts, kept, strict=True)]
    assert dataset["labels"] == ours
    trainer = make_trainer(tmp_path, dataset, completion_only_loss=True, **WAYS["bfd"])
    for ids, labels in list_runs(trainer):
        text, begin = find_piece(ids, texts)
        assert labels == ours[texts.index(text)][begin : begin + len(ids)]


def test_training_on_the_dataset_has_the_collators_losses(tmp_path: Path) -> None:
    texts = program.draw_texts()
    tokens = datasets.Dataset.from_list([{"input_ids": text} for text in texts])
    dataset = goldfish_dataset(tokens, program.build_tokenizer(), **program.GOLDFISH)
    losses = [
        program.run(make_trainer(tmp_path, dataset, max_length=None, **settings))
        for settings in ({}, {"padding_free": True})
    ]
    by_collator = program.train_by_trl(tmp_path, 4, 1, "model")
    # The padded rows are the collator's; without padding a sum over tokens has another order.
    assert losses[0] == pytest.approx(by_collator, rel=1e-6)
    assert losses[1] == pytest.approx(by_collator, rel=1e-4)


def test_what_cannot_have_goldfish_is_refused_by_name() -> None:
    tokenizer = program.build_tokenizer()

    def refuse(row: dict[str, Any], message: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            goldfish_dataset(datasets.Dataset.from_list([row]), tokenizer, **settings)

    refuse({"text": "a"}, "needs the column 'input_ids'; it has text. Tokenise it first")
    refuse({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences .DPO.")
    refuse({"prompt": "a", "completion": "b", "label": True}, "preferences .KTO.")
    refuse({"input_ids": [1, 2]}, "'mode' random drops other labels", mode="random")
    refuse({"input_ids": [1, 2]}, r"goldfish\.k", k=1)

    class DPOTrainer:
        args = SimpleNamespace(packing=False)

    class MyTrainer(DPOTrainer):
        pass

    for kind in (DPOTrainer, MyTrainer):
        with pytest.raises(ConfigError, match=f"'{kind.__name__}' compares sequences"):
            wrap_collator(kind())
    plain = SimpleNamespace(
        args=SimpleNamespace(packing=True, packing_strategy="wrapped"), processing_class=tokenizer
    )
    with pytest.raises(ConfigError, match="'packing_strategy' wrapped cuts rows"):
        wrap_collator(plain)
    plain.args.packing, plain.processing_class = False, None
    with pytest.raises(ConfigError, match="has no tokenizer"):
        wrap_collator(plain)
