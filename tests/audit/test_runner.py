"""Rounds of probes: as many as each asks for, in the order of what they read; generated text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from audit_examples import WRONG_TOKEN, Held, Scripted, WrongDecoder, run_probes, say_by_context

from memguard.audit.context import AuditContext
from memguard.audit.decoding import Continuation
from memguard.audit.passages import Passage
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.requests import (
    CannotGenerate,
    Generate,
    Inputs,
    Measured,
    Model,
    Prompt,
    Rounds,
    Score,
    View,
    key_of_passage,
)
from memguard.audit.runner import Runner
from memguard.audit.windows import AuditDocument, Window

MakeDocument = Callable[..., AuditDocument]
MAIN = ExtractionProbe(continuation_tokens=6)


@dataclass(frozen=True, kw_only=True)
class Fake:
    """A probe that does what a generator does."""

    name: str
    script: Callable[[Inputs, View], Rounds]
    models: tuple[Model, ...] = ("trained",)
    after: tuple[str, ...] = ()
    VERSION: ClassVar[int] = 1

    def find_missing(self, inputs: Inputs, *, has_base: bool) -> str:
        return ""

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
