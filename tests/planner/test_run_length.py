"""Steps, rows and labels: against the batches that the loader builds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_examples import EOS, make_corpus, make_loader

from memguard.config import RunConfig
from memguard.data.loader import Loader
from memguard.planner.rows import count_labels, explain_fewer_steps, measure_length, remark_on_rows


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=12),
    batch_size=st.integers(1, 5),
    max_steps=st.none() | st.integers(1, 3),
)
def test_lengths_and_labels_are_those_of_the_batches(
    lengths: list[int], batch_size: int, max_steps: int | None
) -> None:
    loader = make_loader(make_corpus(lengths), batch_size=batch_size, k=3, context_width=2)
    length = measure_length(loader, max_steps=max_steps, seq_len=16, epochs=2, shared=True)
    assert length.num_steps == min(loader.num_steps, max_steps or loader.num_steps)
    batches = [loader.batch(loader.samples(step)) for step in range(length.num_steps)]
    assert length.num_rows == sum(len(batch.input_ids) for batch in batches)
    assert length.num_tokens + length.num_padding_tokens == sum(b.input_ids.size for b in batches)
    # The pad id is no token's id.
    assert length.num_padding_tokens == sum(int((b.input_ids == 0).sum()) for b in batches)
    labels = count_labels(loader, length.num_rows, eos_id=EOS)
    assert labels.num_rows == length.num_rows
    assert labels.num_tokens == length.num_tokens
    assert labels.num_supervised == sum(batch.num_supervised for batch in batches)
    assert labels.num_kept == sum(batch.num_kept for batch in batches)
    assert labels.num_eos_kept == sum(int((batch.labels == EOS).sum()) for batch in batches)
    # Special tokens are never dropped in mode hash.
    assert labels.num_eos_supervised == labels.num_eos_kept


def test_labels_of_a_long_run_are_counted_over_its_first_rows() -> None:
    loader = make_loader(make_corpus([16] * 300, epochs=1))
    assert count_labels(loader, 300, eos_id=None).num_rows == 256


def remarks_on(loader: Loader, *, shared: bool | None = True, max_steps: int | None = None) -> str:
    length = measure_length(loader, max_steps=max_steps, seq_len=16, epochs=2, shared=shared)
    labels = count_labels(loader, length.num_rows, eos_id=EOS)
    remarks = remark_on_rows(length, labels, num_unreached=5 if max_steps else 0)
    return " | ".join(f"{remark.level}: {remark.text}" for remark in remarks)


def test_rows_that_fit_are_not_remarked_on() -> None:
    assert not remarks_on(make_loader(make_corpus([16, 8, 8, 16])))


def test_rows_of_one_document_and_missing_steps_are_told() -> None:
    said = remarks_on(make_loader(make_corpus([16])), shared=False)
    assert "each gets its own row" in said
    assert "could not be tested" in remarks_on(make_loader(make_corpus([16])), shared=None)
    said = remarks_on(make_loader(make_corpus([16] * 20)), max_steps=3)
    assert "'train.max_steps' ends the run after 3 of 10 steps: 5 documents" in said


def test_a_mask_that_drops_every_end_is_told() -> None:
    # Static goldfish with k = 2 drops positions 1, 3, 5, ..: the end of a document of 16 tokens.
    said = remarks_on(make_loader(make_corpus([16, 16]), k=2, mode="static"))
    assert "drop EOS wherever it is supervised" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_steps": 11}, None),
        ({"max_steps": 30}, "30, but one epoch has 11 steps: training ends after 11"),
        ({"max_steps": 30, "epochs": 2}, "30, but 2 epochs have 11 steps: training ends after 11"),
    ],
)
def test_more_steps_than_there_are_is_said(changes: dict[str, int], said: str | None) -> None:
    run = {"name": "a", "model": {"path": "m"}, "data": {"train": ["d"]}, "train": changes}
    text = explain_fewer_steps(RunConfig.model_validate(run), 11)
    assert text == (None if said is None else f"'train.max_steps' is {said}")
