"""Every number of one round against a plain loop over the windows, asked one by one."""

import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from audit_examples import CHARACTERS, Recorder, Said, Scripted, cut, say_by_context, score_together
from hypothesis import given, settings
from hypothesis import strategies as st
from record_examples import make_document

from memguard.audit.passages import ScoreSelection
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.probes.window_scores import IN_A_WINDOW, PASSAGE
from memguard.audit.requests import Inputs, Score, View
from memguard.audit.windows import Window
from memguard.config.settings import SamplingScheme

SCORES = ("loss", "min_k", "min_k_plus_plus", "zlib")
SCHEMES = (SamplingScheme(), SamplingScheme(top_k=3), SamplingScheme(temperature=0.5))


def _score_alone(probes: Sequence[Any], window: Window, **inputs: Any) -> dict[str, float]:
    """Return the numbers of one window by name."""
    scorer = inputs.pop("scorer", None) or Scripted(say_by_context)
    numbers = score_together(probes, scorer, [window], **{"tiny_margin": 1.0, **inputs})
    return dict(zip(numbers.names, numbers.rows[0].tolist(), strict=True))


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
def _cases(draw: st.DrawFn) -> tuple[int, ExtractionProbe, GridProbe, list[bool], str]:
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
    return size, probe, grid, supervised, draw(st.sampled_from(["text", "messages"]))


@settings(deadline=None, max_examples=150)
@given(_cases())
def test_numbers_equal_naive_loops(
    case: tuple[int, ExtractionProbe, GridProbe, list[bool], str],
) -> None:
    size, probe, grid, supervised, form = case
    document = make_document(np.arange(size) % 90, supervised=np.array(supervised), format=form)
    window = probe.window(document)
    if window is None:
        return
    scorer = Recorder(say_by_context)
    probes = [probe, grid, SamplingProbe(schemes=SCHEMES), MembershipProbe(scores=SCORES)]
    found = _score_alone(probes, window, scorer=scorer, codec=CHARACTERS)

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
    expected = {f"extraction.{name}": value for name, value in expected.items()}
    for index in range(len(SCHEMES)):
        expected[f"sampling.{index}"] = sum(each.sampled[index] for each in said)
    expected["sampling.log_bound"] = sum(-math.log(each.rank) for each in said)
    expected["sampling.max_rank"] = max(each.rank for each in said)
    for name, value in _score_members_naively(window).items():
        expected[f"membership.{name}"] = value
    num_fitting = 0
    for index, cell in enumerate(grid.cells):
        end = cell.offset + cell.prefix_tokens + cell.continuation_tokens
        numbers = dict.fromkeys(IN_A_WINDOW, math.nan)
        if form == "text" and end <= size:
            num_fitting += 1
            ids = document.input_ids[cell.offset :].tolist()
            numbers = _count_naively(_ask_alone(ids, cell.prefix_tokens, cell.continuation_tokens))
        expected |= {f"grid.{index}.{name}": value for name, value in numbers.items()}
    # Too short for a run of 50 tokens.
    expected |= {f"extraction.passage.{name}": math.nan for name in PASSAGE}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Means and quotients of numbers that are exact: the last bits of float64.
        assert found[name] == pytest.approx(value, rel=1e-12, nan_ok=True), name

    # One passage for each place where something starts, and none longer than it must be.
    fitting = [cell for cell in grid.cells if cell.window(document) is not None]
    starts = [window.start, *(cell.offset for cell in fitting)]
    assert len(fitting) == num_fitting
    assert len(scorer.passages) == len(set(starts))
    ends = {window.start: len(window.input_ids)}
    for cell in fitting:
        length = cell.prefix_tokens + cell.continuation_tokens
        ends[cell.offset] = max(ends.get(cell.offset, 0), length)
    lengths = [len(passage.input_ids) for passage in scorer.passages]
    assert sorted(lengths) == sorted(ends.values())


def test_a_cell_at_the_windows_start_shares_its_passage() -> None:
    probe = ExtractionProbe(continuation_tokens=10)
    grid = GridProbe(offsets=(0, 5, 30), prefix_tokens=(4, 8), continuation_tokens=(6,))
    (window,) = cut(probe, [make_document(np.arange(40))])
    scorer = Recorder(say_by_context)
    _score_alone([probe, grid], window, scorer=scorer)
    # Offset 30 leaves 10 tokens: 4 + 6 fit, 8 + 6 do not.
    assert [passage.input_ids[0] for passage in scorer.passages] == [0, 5, 30]
    assert [len(passage.input_ids) for passage in scorer.passages] == [40, 14, 10]
    assert [passage.first_choice for passage in scorer.passages] == [4, 4, 4]
    # Without membership nothing but choices is scored.
    assert [passage.first_label for passage in scorer.passages] == [4, 4, 4]


def test_documents_of_all_sizes_are_measured_together() -> None:
    """What is said of one does not depend on what it is measured beside."""
    draw = np.random.default_rng(0)
    probe = ExtractionProbe(continuation_tokens=6)
    probes = [
        probe,
        GridProbe(offsets=(0, 9), prefix_tokens=(4, 8), continuation_tokens=(5,)),
        SamplingProbe(schemes=SCHEMES),
        MembershipProbe(scores=SCORES),
    ]
    windows = []
    for size in (30, 12, 30, 25, 17, 12):
        form = "messages" if size == 25 else "text"
        supervised = draw.random(size) < 0.6
        # Two runs that end a conversation, of which the second is long enough.
        supervised[-9:] = True
        document = make_document(
            draw.integers(0, 90, size), supervised=supervised, format=form, name=f"{size}"
        )
        windows += cut(probe, [document])
    scorer = Scripted(say_by_context)
    together = score_together(probes, scorer, windows, tiny_margin=1.0, codec=CHARACTERS)
    assert len(scorer.calls) == 1
    for row, window in zip(together.rows, windows, strict=True):
        alone = _score_alone(probes, window, codec=CHARACTERS)
        assert tuple(alone) == together.names
        # float64 sums of the same numbers.
        np.testing.assert_allclose(row, list(alone.values()), rtol=1e-12)


def test_only_what_is_asked_for_is_asked_of_the_model() -> None:
    probe = ExtractionProbe(continuation_tokens=4)
    (window,) = cut(probe, [make_document(np.arange(12))])

    def ask(scores: tuple[str, ...], *more: Any) -> ScoreSelection | None:
        scorer = Recorder(say_by_context)
        _score_alone([probe, MembershipProbe(scores=scores), *more], window, scorer=scorer)
        return scorer.selection

    best = frozenset({"is_best"})
    assert ask(("loss", "min_k", "zlib")) == ScoreSelection(needs=best)
    everything = frozenset({"entropy", "is_best", "variance_logprob"})
    assert ask(("min_k_plus_plus",)) == ScoreSelection(needs=everything)
    schemes = SamplingProbe(schemes=SCHEMES[:2])
    ranked = best | {"rank"}
    assert ask(("loss",), schemes) == ScoreSelection(needs=ranked, schemes=SCHEMES[:2])


def test_scores_of_text_are_missing_without_a_tokenizer() -> None:
    probe = ExtractionProbe(continuation_tokens=4)
    (window,) = cut(probe, [make_document(np.arange(12))])
    found = _score_alone([probe, MembershipProbe(scores=("loss", "zlib"))], window)
    assert math.isfinite(found["membership.loss"])
    assert math.isnan(found["membership.zlib"])


def test_only_tokens_with_loss_count_for_membership() -> None:
    """A conversation: the question is given, not scored; its first answer counts as well."""
    supervised = np.zeros(30, dtype=bool)
    supervised[8:12] = supervised[20:28] = True
    document = make_document(np.arange(30), supervised=supervised, format="messages")
    probe = ExtractionProbe()
    (window,) = cut(probe, [document])
    scorer = Recorder(say_by_context)
    found = _score_alone([probe, MembershipProbe(scores=("loss",))], window, scorer=scorer)
    (passage,) = scorer.passages
    assert (passage.first_label, passage.first_choice, len(passage.input_ids)) == (1, 20, 28)
    places = [*range(8, 12), *range(20, 28)]
    said = [say_by_context(document.input_ids[: place + 1]).logprob for place in places]
    assert found["membership.loss"] == pytest.approx(sum(said) / 12)


def _name_requests(probes: Sequence[Any], windows: Sequence[Window], **inputs: Any) -> set[str]:
    """Return what the numbers of each request of the first round are cached by."""
    values: dict[str, Any] = {"max_edit_share": 0.1, "seed": 0, "tiny_margin": 1.0, **inputs}
    view = View(model="trained", name="model", max_tokens=None, before={})
    named = set()
    for probe in probes:
        for request in next(probe.measure(Inputs(windows=windows, **values), view)):
            assert isinstance(request, Score)
            keys = [key.hex() for key in request.keys]
            named.add(json.dumps([dict(request.parameters), request.names, keys]))
    return named


def test_what_numbers_depend_on_is_in_their_parameters() -> None:
    """Whatever changes a number must change the name that cached numbers have, and no other's."""
    document = make_document(np.arange(40))
    probe = ExtractionProbe(continuation_tokens=10)
    grid = GridProbe(prefix_tokens=(8,), continuation_tokens=(6,))
    sampling, membership = SamplingProbe(schemes=SCHEMES[:1]), MembershipProbe(scores=("loss",))
    shorter = GridProbe(prefix_tokens=(7,), continuation_tokens=(6,))
    more_edits = ExtractionProbe(continuation_tokens=10, max_edit_share=0.2)

    def name(settings: ExtractionProbe, *others: Any, **inputs: Any) -> set[str]:
        return _name_requests([settings, *others], cut(settings, [document]), **inputs)

    before = name(probe, grid, sampling, membership)
    assert len(before) == 5
    changes = {
        # Another window: all but the cell, which is where it was.
        "window": (name(probe.adapt(prefix_tokens=9), grid, sampling, membership), 4),
        "tiny margin": (name(probe, grid, sampling, membership, tiny_margin=2.0), 1),
        "schemes": (name(probe, grid, SamplingProbe(schemes=SCHEMES[1:2]), membership), 1),
        "cells": (name(probe, shorter, sampling, membership), 1),
        "membership": (name(probe, grid, sampling, MembershipProbe(scores=("min_k",))), 1),
        "text": (name(probe, grid, sampling, membership, codec=CHARACTERS), 1),
        "near-verbatim": (name(more_edits, grid, sampling, membership), 0),
    }
    seen: list[set[str]] = []
    for change, (after, count) in changes.items():
        assert len(after - before) == count, change
        assert after - before not in seen, change
        seen.append(after - before)
    assert name(probe) < before
