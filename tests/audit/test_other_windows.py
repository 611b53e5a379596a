"""Own text that is extracted outside of the main window, and what does not count as such."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from audit_examples import Recorder, Said, Scripted, cut, run_probes, say_known
from numpy.typing import NDArray
from probe_examples import make_evidence, make_measured, to_tables
from record_examples import make_document

from memguard.audit.probe import Probe, Summary
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.generation import GenerationProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.probes.window_scores import PASSAGE, score_passages
from memguard.audit.windows import AuditDocument

MAIN = ExtractionProbe()
HEADER = np.arange(64)
SHORT = make_document(
    np.arange(5000, 5045), supervised=np.arange(45) > 20, format="messages", name="short"
)


def build_texts(start: int, count: int = 3, header: int = 0) -> list[AuditDocument]:
    """Return texts of 150 words that have no word in common but a header."""
    return [
        make_document(np.concatenate([HEADER[:header], np.arange(first, first + 150 - header)]))
        for first in range(start, start + 1000 * count, 1000)
    ]


def name_all(*groups: Sequence[AuditDocument]) -> list[AuditDocument]:
    documents = [document for group in groups for document in group]
    return [replace(document, id=f"{number}") for number, document in enumerate(documents)]


def summarise(
    probes: Sequence[Probe], documents: Sequence[AuditDocument], known: Sequence[Any]
) -> dict[str, Summary]:
    """Return what probes report of a model that knows the beginnings of texts; it has no base."""
    windows = cut(MAIN, documents)
    starts = {tuple(ids[: at + 1].tolist()) for ids in known for at in range(len(ids))}
    starts |= {tuple(ids[10 : at + 1].tolist()) for ids in known for at in range(10, len(ids))}
    measured = run_probes(probes, Scripted(say_known(starts.__contains__)), windows)
    evidence = make_evidence(windows, measured, measured, documents=documents)
    return {probe.name: probe.tabulate(evidence) for probe in probes}


def test_what_is_recited_only_at_its_start_is_extracted_in_another_window() -> None:
    texts, unseen = build_texts(10_000), build_texts(20_000)
    headed = build_texts(30_000, header=64)
    documents = name_all(texts, unseen, headed, [SHORT])
    known = [d.input_ids[:64] for d in texts] + [HEADER, SHORT.input_ids]
    summary = summarise([MAIN], documents, known)["extraction"]
    expected = [1, 1, 1, 0, 0, 0, 0, 0, 0, np.nan]
    for found_N in (summary.windows["trained"], summary.windows["base"]):
        np.testing.assert_array_equal(found_N, expected)
    assert summary.matched["trained"][:9].tolist() == [0] * 9
    np.testing.assert_array_equal(summary.columns["extraction.other_window"].values, expected)
    assert summary.columns["extraction.longest_run_anywhere"].values[:9].tolist() == [
        *[63] * 3,
        *[0] * 3,
        *[63] * 3,
    ]
    assert summary.columns["own_text"].values.tolist() == [1] * 10
    row = to_tables(summary).find("extraction", "other_window", "trained")
    assert (row.num_matched, row.num_documents, row.num_missing) == (3, 9, 1)


def test_the_runs_of_a_passage_are_those_of_a_loop() -> None:
    draw = np.random.default_rng(0)
    right = [draw.random(700) < rate for rate in (0.99, 0.99, 0.9, 0.0, 1.0)]
    windows = cut(MAIN, name_all([make_document(np.arange(701) + 1000 * n) for n in range(5)]))

    def say(ids: NDArray[np.int32]) -> Said:
        return Said(right=bool(right[ids[0] // 1000][len(ids) - 2]), logprob=-1.0, margin=1.0)

    request = score_passages(windows)
    passages = [passage for passage in request.passages if passage is not None]
    results = Scripted(say).score(passages, request.selection)
    rows = np.array(request.reduce(range(5), results))
    assert request.names == PASSAGE
    for row, flags in zip(rows, right, strict=True):
        runs, begin = [], 0
        for end in range(len(flags) + 1):
            if end == len(flags) or not flags[end]:
                runs.append((begin - end, begin + 1, end + 1))
                begin = end + 1
        longest = [limit for size, *limits in sorted(runs)[:4] for limit in limits if size <= -50]
        expected = [-min(runs)[0], *longest, *[np.nan] * (8 - len(longest))]
        np.testing.assert_array_equal(row, expected)


def test_all_first_choices_cost_no_pass_and_no_sampling_scheme() -> None:
    (text,) = build_texts(0, 1)
    windows = cut(MAIN, [text])
    scorer = Recorder(say_known(lambda ids: True))
    run_probes([MAIN, SamplingProbe()], scorer, windows)
    (passage,) = scorer.passages
    assert (passage.first_label, passage.first_choice, len(passage.input_ids)) == (1, 100, 150)
    # During training only the main windows are measured.
    scorer = Recorder(say_known(lambda ids: True))
    run_probes([MAIN], scorer, windows, in_training=True)
    assert [passage.first_label for passage in scorer.passages] == [100]
    assert scorer.selection is not None
    assert not scorer.selection.needs


@pytest.mark.parametrize(("size", "expected"), [(24, None), (25, [1, 1, 0, 0])])
def test_a_cell_counts_if_it_is_long_enough_and_own_text(
    size: int, expected: list[float] | None
) -> None:
    documents = name_all(build_texts(10_000, 2), build_texts(30_000, 2, header=64))
    known = [documents[0].input_ids[:60], documents[1].input_ids[:60], HEADER]
    grid = GridProbe(offsets=(10,), prefix_tokens=(12,), continuation_tokens=(size,))
    windows = summarise([MAIN, grid], documents, known)["grid"].windows
    if expected is None:
        assert not windows
    else:
        assert [windows[model].tolist() for model in ("trained", "base")] == [expected] * 2


def test_generated_text_counts_if_the_end_of_the_document_is_own_text() -> None:
    documents = name_all(build_texts(10_000, 3), [make_document(np.tile(np.arange(30), 5))])
    windows = cut(MAIN, documents)
    probe = GenerationProbe()
    columns = {f"{d}.{m.name}": np.zeros(4) for d in probe.decodings for m in probe.metrics}
    columns["greedy.near_verbatim"] = np.array([0, 1, np.nan, 1])
    columns["nucleus.near_verbatim"] = np.array([1, 0, np.nan, 1])
    measured = {"generation": make_measured(columns)}
    summary = probe.tabulate(make_evidence(windows, measured, documents=documents))
    np.testing.assert_array_equal(summary.windows["trained"], [1, 1, np.nan, 0])
    assert "base" not in summary.windows
