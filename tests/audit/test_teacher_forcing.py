"""Every number of one pass against a plain loop over the windows, asked one by one."""

import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from audit_examples import CHARACTERS, Said, Scripted, say_by_context
from hypothesis import given, settings
from hypothesis import strategies as st
from memguard.audit.teacher_forcing import TeacherForcedScores

from memguard.audit.extraction import AuditDocument, Window
from memguard.audit.probes.extraction import IN_A_WINDOW, ExtractionProbe
from memguard.audit.probes.grid import GridCell, GridProbe
from memguard.config.settings import SamplingScheme

MakeDocument = Callable[..., AuditDocument]
SCORES = ("loss", "min_k", "min_k_plus_plus", "zlib")
SCHEMES = (SamplingScheme(), SamplingScheme(top_k=3), SamplingScheme(temperature=0.5))


def _ask_alone(ids: Sequence[int], prefix: int, size: int) -> list[Said]:
    """What the model says of a continuation when its window is all it is given."""
    row = np.asarray(ids[: prefix + size], dtype=np.int32)
    return [say_by_context(row[: prefix + place + 1]) for place in range(size)]


def _count_naively(said: Sequence[Said]) -> dict[str, float]:
    divergence, run, longest = len(said), 0, 0
    for place, each in enumerate(said):
        if not each.right:
            divergence = min(divergence, place)
        run = run + 1 if each.right else 0
        longest = max(longest, run)
    at_the_end = 0
    while at_the_end < len(said) and said[-1 - at_the_end].right:
        at_the_end += 1
    return {
        "num_correct": sum(each.right for each in said),
        "first_divergence": divergence,
        "extraction_strength": at_the_end / len(said),
        "longest_run": longest,
        "logprob": sum(each.logprob for each in said),
    }


def _score_members_naively(window: Window) -> dict[str, float]:
    """The four scores over the tokens of the window that training gave loss to."""
    ids, document = window.input_ids, window.document
    said, trained = [], []
    for place in range(1, len(ids)):
        if document.supervised[window.start + place]:
            said.append(say_by_context(ids[: place + 1]))
            trained.append(ids[place])
    if not said:
        return dict.fromkeys(SCORES, math.nan)
    logprobs = [each.logprob for each in said]
    standardised = [(each.logprob + each.entropy) / math.sqrt(each.variance) for each in said]
    count = max(1, len(said) // 5)
    loss = sum(logprobs) / len(said)
    text = "".join(chr(32 + id) for id in trained)
    return {
        "loss": loss,
        "min_k": sum(sorted(logprobs)[:count]) / count,
        "min_k_plus_plus": sum(sorted(standardised)[:count]) / count,
        "zlib": loss / len(zlib.compress(text.encode())),
    }


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, ExtractionProbe, tuple[GridCell, ...], list[bool], str]:
    size = draw(st.integers(3, 40))
    small = st.integers(1, 12)
    probe = ExtractionProbe(
        continuation_tokens=draw(small),
        prefix_tokens=draw(st.none() | small),
        min_prefix_tokens=draw(st.integers(1, 3)),
    )
    grid = GridProbe(
        offsets=draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)),
        prefix_tokens=draw(st.lists(small, min_size=1, max_size=2)),
        continuation_tokens=draw(st.lists(small, min_size=1, max_size=2)),
    )
    supervised = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return size, probe, grid.cells, supervised, draw(st.sampled_from(["text", "messages"]))


@settings(deadline=None, max_examples=150)
@given(_cases())
def test_numbers_equal_naive_loops(
    make_document: MakeDocument,
    case: tuple[int, ExtractionProbe, tuple[GridCell, ...], list[bool], str],
) -> None:
    size, probe, cells, supervised, form = case
    document = make_document(np.arange(size) % 90, supervised=np.array(supervised), format=form)
    window = probe.window(document)
    if window is None:
        return
    teacher_forced = TeacherForcedScores(
        extraction=probe,
        tiny_margin=1.0,
        schemes=SCHEMES,
        cells=cells,
        membership=SCORES,
        decode=CHARACTERS.decode,
    )
    plan = teacher_forced.plan(window)
    scorer = Scripted(say_by_context)
    (row,) = teacher_forced.measure([window], scorer.score(plan, teacher_forced.requested))
    found = dict(zip(teacher_forced.names, row, strict=True))

    said = _ask_alone(window.input_ids, window.prefix_tokens, window.continuation_tokens)
    expected: dict[str, float] = dict(_count_naively(said))
    right = [each.margin for each in said if each.right]
    expected["min_margin"] = min(right) if right else math.nan
    choices = [
        int(id) + (not each.right) for id, each in zip(window.continuation_ids, said, strict=True)
    ]
    expected["argmax_type_token_ratio"] = len(set(choices)) / len(choices)
    divergence = int(expected["first_divergence"])
    before = [each.margin for each in said[:divergence]]
    expected["greedy_margin"] = min(before) if before else math.nan
    sure, possible = (
        all(each.margin >= 1 for each in said),
        all(each.margin > -1 for each in said),
    )
    expected["is_near_tie"] = float(sure != possible)
    for index in range(len(SCHEMES)):
        expected[f"sampled.{index}"] = sum(each.sampled[index] for each in said)
    for name, value in _score_members_naively(window).items():
        expected[f"membership.{name}"] = value
    num_fitting = 0
    for index, cell in enumerate(cells):
        end = cell.offset + cell.prefix_tokens + cell.continuation_tokens
        numbers = dict.fromkeys(IN_A_WINDOW, math.nan)
        if form == "text" and end <= size:
            num_fitting += 1
            ids = document.input_ids[cell.offset :].tolist()
            numbers = _count_naively(_ask_alone(ids, cell.prefix_tokens, cell.continuation_tokens))
        expected |= {f"grid.{index}.{name}": value for name, value in numbers.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Means and quotients of numbers that are exact: the last bits of float64.
        assert found[name] == pytest.approx(value, rel=1e-12, nan_ok=True), name

    # One passage for each place where something starts, and none longer than it must be.
    fitting = [cell for cell in cells if cell.window(document) is not None]
    starts = [window.start, *(cell.offset for cell in fitting)]
    assert len(fitting) == num_fitting
    assert len(plan) == len(set(starts))
    ends = {window.start: len(window.input_ids)}
    for cell in fitting:
        length = cell.prefix_tokens + cell.continuation_tokens
        ends[cell.offset] = max(ends.get(cell.offset, 0), length)
    assert [len(passage.input_ids) for passage in plan] == list(ends.values())


def test_a_cell_at_the_windows_start_shares_its_passage(make_document: MakeDocument) -> None:
    document = make_document(np.arange(40))
    teacher_forced = TeacherForcedScores(
        extraction=ExtractionProbe(continuation_tokens=10),
        tiny_margin=1.0,
        cells=GridProbe(offsets=(0, 5, 30), prefix_tokens=(4, 8), continuation_tokens=(6,)).cells,
    )
    window = teacher_forced.extraction.window(document)
    assert window is not None
    plan = teacher_forced.plan(window)
    # Offset 30 leaves 10 tokens: 4 + 6 fit, 8 + 6 do not.
    assert [passage.input_ids[0] for passage in plan] == [0, 5, 30]
    assert [len(passage.input_ids) for passage in plan] == [40, 14, 10]
    assert [passage.first_choice for passage in plan] == [4, 4, 4]
    # Without membership nothing but choices is scored.
    assert [passage.first_label for passage in plan] == [4, 4, 4]


def test_documents_of_all_sizes_are_measured_together(make_document: MakeDocument) -> None:
    """What is said of one does not depend on what it is measured beside."""
    draw = np.random.default_rng(0)
    probe = ExtractionProbe(continuation_tokens=6)
    teacher_forced = TeacherForcedScores(
        extraction=probe,
        tiny_margin=1.0,
        schemes=SCHEMES,
        cells=GridProbe(offsets=(0, 9), prefix_tokens=(4, 8), continuation_tokens=(5,)).cells,
        membership=SCORES,
        decode=CHARACTERS.decode,
    )
    windows = []
    for size in (30, 12, 30, 25, 17, 12):
        form = "messages" if size == 25 else "text"
        supervised = draw.random(size) < 0.6
        # Two runs that end a conversation, of which the second is long enough.
        supervised[-9:] = True
        document = make_document(
            draw.integers(0, 90, size), supervised=supervised, format=form, name=f"{size}"
        )
        window = probe.window(document)
        assert window is not None
        windows.append(window)
    scorer = Scripted(say_by_context)
    plans = [teacher_forced.plan(window) for window in windows]
    passages = [passage for plan in plans for passage in plan]
    together = teacher_forced.measure(windows, scorer.score(passages, teacher_forced.requested))
    for row, window, plan in zip(together, windows, plans, strict=True):
        (alone,) = teacher_forced.measure([window], scorer.score(plan, teacher_forced.requested))
        # float64 sums of the same numbers.
        np.testing.assert_allclose(row, alone, rtol=1e-12)


def test_only_what_is_asked_for_is_asked_of_the_model() -> None:
    probe = ExtractionProbe()
    plain = TeacherForcedScores(
        extraction=probe, tiny_margin=1.0, membership=("loss", "min_k", "zlib")
    )
    assert plain.requested.needs == frozenset()
    assert plain.requested.schemes == ()
    more = TeacherForcedScores(extraction=probe, tiny_margin=1.0, membership=("min_k_plus_plus",))
    assert more.requested.needs == {"entropy", "variance_logprob"}


def test_scores_of_text_are_missing_without_a_tokenizer(make_document: MakeDocument) -> None:
    teacher_forced = TeacherForcedScores(
        extraction=ExtractionProbe(continuation_tokens=4),
        tiny_margin=1.0,
        membership=("loss", "zlib"),
    )
    window = teacher_forced.extraction.window(make_document(np.arange(12)))
    assert window is not None
    results = Scripted(say_by_context).score(teacher_forced.plan(window))
    (row,) = teacher_forced.measure([window], results)
    found = dict(zip(teacher_forced.names, row, strict=True))
    assert math.isfinite(found["membership.loss"])
    assert math.isnan(found["membership.zlib"])


def test_only_tokens_with_loss_count_for_membership(make_document: MakeDocument) -> None:
    """A conversation: the question is given, not scored; its first answer counts as well."""
    supervised = np.zeros(30, dtype=bool)
    supervised[8:12] = supervised[20:28] = True
    document = make_document(np.arange(30), supervised=supervised, format="messages")
    teacher_forced = TeacherForcedScores(
        extraction=ExtractionProbe(), tiny_margin=1.0, membership=("loss",)
    )
    window = teacher_forced.extraction.window(document)
    assert window is not None
    (passage,) = teacher_forced.plan(window)
    assert (passage.first_label, passage.first_choice, len(passage.input_ids)) == (1, 20, 28)
    (found,) = teacher_forced.measure([window], Scripted(say_by_context).score([passage]))
    places = [*range(8, 12), *range(20, 28)]
    said = [say_by_context(document.input_ids[: place + 1]).logprob for place in places]
    assert found[teacher_forced.names.index("membership.loss")] == pytest.approx(sum(said) / 12)


def test_what_numbers_depend_on_is_in_their_parameters() -> None:
    """Whatever changes a number must change the name that cached numbers have."""
    probe = ExtractionProbe()
    base = TeacherForcedScores(
        extraction=probe, tiny_margin=1.0, membership=("loss",), schemes=SCHEMES[:1]
    )
    fields = {
        "extraction": probe.adapt(prefix_tokens=9),
        "tiny_margin": 2.0,
        "schemes": SCHEMES[1:2],
        "cells": GridProbe().cells,
        "membership": ("min_k",),
        "decode": CHARACTERS.decode,
    }
    before = {name: getattr(base, name) for name in fields}
    seen = [base.parameters]
    for name, value in fields.items():
        changed = TeacherForcedScores(**{**before, name: value}).parameters
        assert changed not in seen, name
        seen.append(changed)
