"""Rounds of probes: passages that are shared, numbers that are cached, probes that wait."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from audit_examples import (
    WRONG_TOKEN,
    Held,
    Scripted,
    WrongDecoder,
    build_canaries,
    run_probes,
    say_by_context,
    score_together,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard.audit import runner
from memguard.audit.cache import RecordCache
from memguard.audit.context import AuditContext
from memguard.audit.decoding import Continuation
from memguard.audit.extraction import AuditDocument, Window
from memguard.audit.passages import Passage, ScoreSelection, TokenResult
from memguard.audit.probe import (
    CannotGenerate,
    Generate,
    Inputs,
    Measured,
    Model,
    Prompt,
    Rounds,
    Score,
    View,
    join,
    key_of_passage,
)
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.runner import Runner, merge
from memguard.config.settings import SamplingScheme

MakeDocument = Callable[..., AuditDocument]
SCHEMES = (SamplingScheme(), SamplingScheme(top_k=3), SamplingScheme(temperature=0.5))
MAIN = ExtractionProbe(continuation_tokens=6)
OTHER = GridProbe(offsets=(3,), prefix_tokens=(4,), continuation_tokens=(5,))


@pytest.fixture
def windows(make_document: MakeDocument) -> list[Window]:
    draw = np.random.default_rng(0)
    cut = [MAIN.window(make_document(draw.integers(0, 90, 20), name=f"d{n}")) for n in range(6)]
    return [window for window in cut if window is not None]


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
    needs = st.frozensets(st.sampled_from(["entropy", "variance_logprob"]))
    subsets = st.lists(st.sampled_from(SCHEMES), unique=True).map(tuple)
    wanted = {
        number: ScoreSelection(needs=data.draw(needs), schemes=data.draw(subsets))
        for number in passages
    }
    measured = ScoreSelection(
        needs=frozenset({"entropy", "variance_logprob"}), schemes=SCHEMES[::-1]
    )
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
    # Secrets are other items than the documents.
    assert count(*probes, CanaryProbe(), canaries=build_canaries(4)) == [6, 4]


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
    seen = _Recorder(say_by_context)
    context = AuditContext(cache=RecordCache(tmp_path))
    run_probes([MAIN, OTHER], Held(seen, identity="m"), windows, context=context)
    found = sorted(tuple(passage.input_ids.tolist()) for passage in seen.passages)
    cells = [OTHER.cells[0].window(window.document) for window in windows[:3]]
    lacking = [*(cell for cell in cells if cell is not None), *windows[4:]]
    assert found == sorted(tuple(window.input_ids.tolist()) for window in lacking)
    assert _count_cached(tmp_path, windows, [MAIN, OTHER]) == []


@dataclass
class _Recorder(Scripted):
    passages: list[Passage] = field(default_factory=list)

    def score(
        self, passages: Sequence[Passage], requested: Any = None, on_progress: Any = None
    ) -> list[TokenResult]:
        self.passages += passages
        return Scripted.score(self, passages, requested or ScoreSelection(), on_progress)


def test_a_model_of_unknown_identity_is_measured_each_time(
    windows: list[Window], tmp_path: Path
) -> None:
    context = AuditContext(cache=RecordCache(tmp_path))
    for _ in range(2):
        scorer = Scripted(say_by_context)
        run_probes([MAIN], Held(scorer), windows, context=context)
        assert scorer.calls == [6]
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True, kw_only=True)
class Fake:
    """A probe that does what a generator does."""

    name: str
    script: Callable[[Inputs, View], Rounds]
    models: tuple[Model, ...] = ("trained",)
    after: tuple[str, ...] = ()
    VERSION: ClassVar[int] = 1

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        return self.script(inputs, view)


def _sum(windows: Sequence[Window], passages: Sequence[Passage | None] | None = None) -> Score:
    """Ask for the sum of log-probabilities of each window, or of other passages."""
    asked = [window.passage() for window in windows] if passages is None else passages
    return Score(
        items=windows,
        passages=asked,
        keys=[b"" if passage is None else key_of_passage(passage) for passage in asked],
        names=("sum",),
        reduce=lambda _, results: [float(result.logprob.sum()) for result in results],
        parameters={"kind": "sum"},
        stage="sums",
    )


def test_missing_items_are_nan_and_equal_ones_are_measured_once(windows: list[Window]) -> None:
    passages = [windows[i].passage() if i is not None else None for i in (0, None, 1, 0, None, 1)]
    steps: list[tuple[str, int, int]] = []

    def script(inputs: Inputs, view: View) -> Rounds:
        (numbers,) = yield [_sum(inputs.windows, passages)]
        return Measured(columns=numbers)

    scorer = Scripted(say_by_context)
    context = AuditContext(on_progress=lambda *step: steps.append(step))
    found = run_probes([Fake(name="f", script=script)], scorer, windows, context=context)
    sums = [
        np.nan if p is None else sum(say_by_context(p.input_ids[:n]).logprob for n in range(15, 21))
        for p in passages
    ]
    np.testing.assert_array_equal(found["f"].columns["sum"], sums)
    assert scorer.calls == [2]
    # Those that equal another count as done, those without a passage not at all.
    assert steps == [("sums", 2, 4), ("sums", 4, 4)]


def test_items_are_measured_longest_first_and_reported_shard_by_shard(
    make_document: MakeDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_SHARD_ITEMS", 2)
    cut = [MAIN.window(make_document(np.arange(size))) for size in (12, 20, 14, 18, 16)]
    windows = [window for window in cut if window is not None]
    steps: list[tuple[str, int, int]] = []
    context = AuditContext(on_progress=lambda *step: steps.append(step))
    scorer = _Recorder(say_by_context)
    found = score_together([MAIN], scorer, windows, context=context)
    assert [len(passage.input_ids) for passage in scorer.passages] == [20, 18, 16, 14, 12]
    assert scorer.calls == [2, 2, 1]
    assert steps == [("model", 2, 5), ("model", 4, 5), ("model", 5, 5)]
    whole = score_together([MAIN], Scripted(say_by_context), windows[:1])
    np.testing.assert_array_equal(found.rows[0], whole.rows[0])


def test_every_probe_has_as_many_rounds_as_it_asks_for(windows: list[Window]) -> None:
    order: list[str] = []

    def take(name: str, count: int) -> Fake:
        def script(inputs: Inputs, view: View) -> Rounds:
            columns = {}
            for number in range(count):
                order.append(f"{name}{number}")
                (columns[f"{number}."],) = yield [_sum(inputs.windows[number:])]
            order.append(f"{name} ends")
            return Measured(columns=columns["0."], detail=list(columns)) if columns else None

        return Fake(name=name, script=script)

    scorer = Scripted(say_by_context)
    found = run_probes([take("a", 1), take("b", 3), take("c", 0)], scorer, windows)
    # c has nothing to ask for, and no results.
    assert order == ["a0", "b0", "c ends", "a ends", "b1", "b2", "b ends"]
    assert {name: each.detail for name, each in found.items()} == {
        "a": ["0."],
        "b": ["0.", "1.", "2."],
    }
    # Slices are lists of their own, so that nothing is shared.
    assert scorer.calls == [6, 6, 5, 4]


def test_a_probe_waits_for_those_whose_results_it_reads(windows: list[Window]) -> None:
    seen: dict[str, list[str]] = {}

    def take(name: str, *after: str, count: int = 1, models: Any = ("trained",)) -> Fake:
        def script(inputs: Inputs, view: View) -> Rounds:
            seen[name] = sorted(view.before)
            numbers = None
            for _ in range(count):
                (numbers,) = yield [_sum(inputs.windows)]
            return None if numbers is None else Measured(columns=numbers)

        return Fake(name=name, script=script, after=after, models=models)

    probes = [
        take("last", "middle", "empty"),
        take("middle", "first"),
        take("first", count=2),
        take("empty", count=0),
        take("other", models=("base",)),
        # What it waits for does not measure this model.
        take("alone", "other"),
    ]
    found = run_probes(probes, Scripted(say_by_context), windows)
    assert sorted(found) == ["alone", "first", "last", "middle"]
    assert seen["last"] == ["alone", "first", "middle"]
    assert seen["middle"] == ["alone", "first"]
    assert seen["first"] == seen["empty"] == seen["alone"] == []
    assert sorted(run_probes(probes, Scripted(say_by_context), windows, model="base")) == ["other"]


def _greedy(windows: Sequence[Window], is_done: Any) -> Generate:
    """Ask for the lengths of greedy texts of every other window."""
    return Generate(
        prompts=[Prompt.of(w, n) if n % 2 else None for n, w in enumerate(windows)],
        keys=[bytes([n]) * 16 for n in range(len(windows))],
        names=("size",),
        reduce=lambda _, texts: [len(text.samples[0]) for text in texts],
        parameters={"kind": "size"},
        is_done=is_done,
    )


def test_a_text_ends_where_its_own_item_says_so(windows: list[Window]) -> None:
    asked: list[tuple[int, int, int]] = []

    def script(inputs: Inputs, view: View) -> Rounds:
        def is_done(item: int, step: int, token: int) -> bool:
            asked.append((item, step, token))
            return item == 1 and step == 1

        (sizes,) = yield [_greedy(inputs.windows, is_done)]
        return Measured(columns=sizes)

    found = run_probes([Fake(name="f", script=script)], Scripted(say_by_context), windows)
    np.testing.assert_array_equal(found["f"].columns["size"], [np.nan, 2, np.nan, 3, np.nan, 1])
    assert {item for item, _, _ in asked} == {1, 3, 5}
    assert {token for _, _, token in asked} == {WRONG_TOKEN}


class _Refusing(WrongDecoder):
    def find_obstacle(self) -> str | None:
        return "the weights are offloaded"

    def continue_greedily(self, *_: Any, **__: Any) -> list[Continuation]:
        raise AssertionError("nothing is generated")


def test_a_probe_is_told_why_nothing_is_generated(windows: list[Window]) -> None:
    """It may go on without, and other probes of the round do."""

    def generate(inputs: Inputs, view: View) -> Rounds:
        try:
            yield [_greedy(inputs.windows, lambda *_: False)]
        except CannotGenerate as reason:
            (sums,) = yield [_sum(inputs.windows)]
            return Measured(columns=sums, detail=str(reason))
        return None

    def score(inputs: Inputs, view: View) -> Rounds:
        (sums,) = yield [_sum(inputs.windows)]
        return Measured(columns=sums)

    probes = [Fake(name="generate", script=generate), Fake(name="score", script=score)]
    held = Held(Scripted(say_by_context), writer=_Refusing())
    found = run_probes(probes, held, windows)
    assert found["generate"].detail == "the weights are offloaded"
    np.testing.assert_array_equal(found["generate"].columns.rows, found["score"].columns.rows)


def test_a_model_is_freed_whatever_happens(windows: list[Window]) -> None:
    def fail(inputs: Inputs, view: View) -> Iterator[Any]:
        yield [_sum(inputs.windows)]
        raise ValueError("no such number")

    held = Held(Scripted(say_by_context))
    inputs = Inputs(windows=windows, max_edit_share=0.1, seed=0, tiny_margin=1e-3)
    context = AuditContext()
    with (
        pytest.raises(ValueError, match="no such number"),
        Runner(audited=held, model="trained", name="model", context=context, seed=0) as running,
    ):
        running.measure([Fake(name="f", script=fail)], inputs)
    assert held.num_freed == 1
