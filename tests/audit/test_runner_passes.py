"""One pass for all probes of a round: passages that are shared, numbers that are cached."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit_examples import (
    Held,
    Recorder,
    Scripted,
    build_canaries,
    cut,
    run_probes,
    say_by_context,
    score_together,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from record_examples import make_document

from memguard.audit import runner
from memguard.audit.cache import RecordCache
from memguard.audit.context import AuditContext
from memguard.audit.passages import EXTRAS, Passage, ScoreSelection, TokenResult
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.requests import Measured, join
from memguard.audit.runner import merge
from memguard.audit.windows import Window
from memguard.config.settings import SamplingScheme

SCHEMES = (SamplingScheme(), SamplingScheme(top_k=3), SamplingScheme(temperature=0.5))
MAIN = ExtractionProbe(continuation_tokens=6)
OTHER = GridProbe(offsets=(3,), prefix_tokens=(4,), continuation_tokens=(5,))


@st.composite
def _passages(draw: st.DrawFn) -> dict[int, Passage]:
    """Draw passages of two tokens, of which many begin others."""
    made = {}
    for number in range(draw(st.integers(1, 6))):
        ids = draw(st.lists(st.integers(0, 1), min_size=2, max_size=6))
        first_label = draw(st.integers(1, len(ids) - 1))
        made[number] = Passage(
            input_ids=np.array(ids, dtype=np.int32),
            first_label=first_label,
            first_choice=draw(st.integers(first_label, len(ids))),
        )
    return made


@settings(deadline=None, max_examples=200)
@given(passages=_passages(), data=st.data())
def test_results_cut_from_merged_passages_are_their_own(
    passages: dict[int, Passage], data: st.DataObject
) -> None:
    needs = st.frozensets(st.sampled_from(EXTRAS))
    subsets = st.lists(st.sampled_from(SCHEMES), unique=True).map(tuple)
    wanted = {
        number: ScoreSelection(needs=data.draw(needs), schemes=data.draw(subsets))
        for number in passages
    }
    measured = ScoreSelection(needs=frozenset(EXTRAS), schemes=SCHEMES[::-1])
    merged = list(merge(passages))
    texts = [tuple(passage.input_ids.tolist()) for passage in passages.values()]
    longest = {
        text for text in texts if not any(o != text and o[: len(text)] == text for o in texts)
    }
    assert {tuple(whole.input_ids.tolist()) for whole, _ in merged} == longest
    assert len(merged) == len(longest)
    assert sorted(n for _, numbers in merged for n in numbers) == sorted(passages)
    scorer = Scripted(say_by_context)
    for whole, numbers in merged:
        parts = [passages[number] for number in numbers]
        assert whole.first_label == min(part.first_label for part in parts)
        choices = [p.first_choice for p in parts if p.first_choice < len(p.input_ids)]
        assert whole.first_choice == min(choices, default=len(whole.input_ids))
        (result,) = scorer.score([whole], measured)
        for number, part in zip(numbers, parts, strict=True):
            (alone,) = scorer.score([part], measured)
            found = result.restrict(whole, part, wanted[number], measured)
            for each in fields(TokenResult):
                expected = getattr(alone, each.name)
                if each.name == "sampled":
                    places = [SCHEMES[::-1].index(scheme) for scheme in wanted[number].schemes]
                    expected = expected[places] if places else None
                elif each.name in measured.needs and each.name not in wanted[number].needs:
                    expected = None
                np.testing.assert_array_equal(getattr(found, each.name), expected)


def test_probes_share_the_passages_of_a_round(windows: list[Window]) -> None:
    def count(*probes: Any, **inputs: Any) -> list[int]:
        scorer = Scripted(say_by_context)
        run_probes(probes, scorer, windows, **inputs)
        return scorer.calls

    probes = [MAIN, SamplingProbe(), MembershipProbe(scores=("loss",))]
    assert count(MAIN) == count(*probes) == [6]
    start = GridProbe(offsets=(0,), prefix_tokens=(4, 8), continuation_tokens=(5,))
    assert count(*probes, start) == [6]
    # A window that starts elsewhere is a passage of its own, which its cells share.
    assert count(*probes, start, OTHER) == [12]
    assert count(*probes, GridProbe(**{**OTHER.model_dump(), "prefix_tokens": (4, 7)})) == [12]
    plain = MembershipProbe(scores=("loss", "reference"))
    assert count(MAIN, plain, has_reference=True) == [6]
    # Secrets are other items than the documents.
    assert count(*probes, CanaryProbe(), canaries=build_canaries(4)) == [6, 4]


def test_items_are_measured_longest_first_and_reported_shard_by_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_SHARD_ITEMS", 2)
    windows = cut(MAIN, [make_document(np.arange(size)) for size in (12, 20, 14, 18, 16)])
    steps: list[tuple[str, int, int]] = []
    context = AuditContext(on_progress=lambda *step: steps.append(step))
    scorer = Recorder(say_by_context)
    found = score_together([MAIN], scorer, windows, context=context)
    assert [len(passage.input_ids) for passage in scorer.passages] == [20, 18, 16, 14, 12]
    assert scorer.calls == [2, 2, 1]
    assert steps == [("model", 2, 5), ("model", 4, 5), ("model", 5, 5)]
    whole = score_together([MAIN], Scripted(say_by_context), windows[:1])
    np.testing.assert_array_equal(found.rows[0], whole.rows[0])


def _count_cached(
    folder: Path, windows: Sequence[Window], probes: Sequence[Any], **inputs: Any
) -> list[int]:
    """Return how many passages are measured, and check all numbers against a run without cache."""
    scorer = Scripted(say_by_context)
    held = Held(scorer, identity="m")
    context = AuditContext(cache=RecordCache(folder))
    found = join(_name_columns(run_probes(probes, held, windows, context=context, **inputs)))
    new = join(_name_columns(run_probes(probes, Scripted(say_by_context), windows, **inputs)))
    assert found.names == new.names
    np.testing.assert_array_equal(found.rows, new.rows)
    assert held.num_asked == len(scorer.calls)
    return scorer.calls


def _name_columns(measured: dict[str, Measured]) -> dict[str, Any]:
    return {f"{name}.": each.columns for name, each in measured.items()}


def test_a_probe_added_to_a_suite_leaves_the_numbers_of_the_others(
    windows: list[Window], tmp_path: Path
) -> None:
    membership = MembershipProbe(scores=("loss",))
    assert _count_cached(tmp_path, windows, [MAIN, membership]) == [6]
    assert _count_cached(tmp_path, windows, [MAIN, membership, OTHER]) == [6]
    assert _count_cached(tmp_path, windows, [OTHER, MAIN, membership]) == []
    assert _count_cached(tmp_path, windows, [MAIN]) == []
    # A second cell of the probe is a request of its own.
    grid = GridProbe(**{**OTHER.model_dump(), "offsets": (3, 5)})
    assert _count_cached(tmp_path, windows, [MAIN, grid]) == [6]
    assert _count_cached(tmp_path, windows, [MAIN, SamplingProbe(), grid]) == [6]
    assert _count_cached(tmp_path, windows, [MAIN, SamplingProbe(), membership, grid]) == []


def test_only_what_a_request_lacks_is_measured(windows: list[Window], tmp_path: Path) -> None:
    assert _count_cached(tmp_path, windows[:4], [MAIN]) == [4]
    assert _count_cached(tmp_path, windows[3:], [OTHER]) == [3]
    # 0 to 2 lack the cell, 4 and 5 the main window, 3 nothing.
    seen = Recorder(say_by_context)
    context = AuditContext(cache=RecordCache(tmp_path))
    run_probes([MAIN, OTHER], Held(seen, identity="m"), windows, context=context)
    found = sorted(tuple(passage.input_ids.tolist()) for passage in seen.passages)
    cells = [OTHER.cells[0].window(window.document) for window in windows[:3]]
    lacking = [*(cell for cell in cells if cell is not None), *windows[4:]]
    assert found == sorted(tuple(window.input_ids.tolist()) for window in lacking)
    assert _count_cached(tmp_path, windows, [MAIN, OTHER]) == []
