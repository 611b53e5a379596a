"""An audit asks no more of its models than it says before the first pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
from audit_examples import (
    CHARACTERS,
    EVERY_PROBE,
    Held,
    Scripted,
    audit,
    build_canaries,
    build_documents,
    build_suite,
    know,
    run_probes,
    say_by_context,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_examples import measure_sizes as sizes_of
from pydantic import Field
from record_examples import make_document

from memguard.audit import runner
from memguard.audit.beams import Beams
from memguard.audit.bounds import (
    AuditBounds,
    ProbeBound,
    WorkMeter,
    count_tokens,
    list_bounds,
    measure_sizes,
)
from memguard.audit.context import AuditContext
from memguard.audit.decoding import Continuation
from memguard.audit.extraction import AuditDocument, Window
from memguard.audit.membership_scores import Codec
from memguard.audit.passages import Passage, TokenResult
from memguard.audit.probe import ItemSizes, Probe, Work
from memguard.audit.probes.attacks import AttackProbe
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.generation import GenerationProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.mask_consistency import MaskConsistencyProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.requests import Generate, Inputs, Prompt
from memguard.audit.suite import PROBES
from memguard.config import GoldfishConfig
from memguard.mitigation import Goldfish

WORDS = Codec(
    decode=lambda ids: "".join("XÄİ"[int(id) % 3] * (9 + int(id) % 7) for id in ids),
    encode=lambda text: [0, *text.encode()],
)
"""Tokens of up to fifteen characters, of which every byte is a token in lower case."""
BUCKETS = (("x0", "control"), ("x4", "trained"), ("x64", "trained"))
MAIN = ExtractionProbe(continuation_tokens=5, generation_floor=0.0)
SETTINGS: tuple[Probe, ...] = (
    MAIN,
    ExtractionProbe(continuation_tokens=5, generation_floor=1.0, num_generated_below_floor=1),
    GridProbe(offsets=(0, 3), prefix_tokens=(2, 6), continuation_tokens=(4, 5)),
    GridProbe(offsets=(9,), prefix_tokens=(1,), continuation_tokens=(30,)),
    SamplingProbe(),
    MembershipProbe(scores=("loss",)),
    MembershipProbe(scores=("lowercase",)),
    MembershipProbe(scores=("reference",)),
    MembershipProbe(scores=("loss", "zlib", "lowercase", "recall", "reference")),
    MembershipProbe(scores=("recall",), recall_documents=1),
    CanaryProbe(),
    GenerationProbe(max_documents_per_bucket=1),
    GenerationProbe(nucleus=None, max_documents_per_bucket=None),
    AttackProbe(width=3, samples=5, max_documents_per_bucket=2),
    AttackProbe(width=1, samples=1, candidates=2, max_documents_per_bucket=None),
    MaskConsistencyProbe(),
)


@dataclass
class Counter:
    """A scorer and decoder without a model; counts what is asked of it."""

    truths: dict[str, Any] = field(default_factory=dict)
    """Tokens that greedy decoding repeats, by document id; others are never right."""
    work: Work = field(default_factory=Work)

    def score(self, passages: Sequence[Passage], *more: Any) -> list[TokenResult]:
        tokens = sum(len(passage.input_ids) for passage in passages)
        self.work += Work(passages=len(passages), tokens=tokens)
        return Scripted(say_by_context).score(passages, *more)

    def find_obstacle(self) -> str | None:
        return None

    def continue_greedily(
        self, prompts: Sequence[Prompt], *_: Any, **__: Any
    ) -> list[Continuation]:
        self.count([(len(p.input_ids), p.num_new) for p in prompts], 1)
        texts = [
            self.truths.get(p.document, np.full(99, 10**6))[len(p.input_ids) :][: p.num_new]
            for p in prompts
        ]
        return [
            Continuation(token_ids=np.asarray(text, dtype=np.int32), min_gap=1.0) for text in texts
        ]

    def sample(self, prompts: Sequence[Prompt], _: Any, samples: int, *__: Any) -> list[Any]:
        self.count([(len(p.input_ids), p.num_new) for p in prompts], samples)
        return [np.zeros((samples, p.num_new), dtype=np.int32) for p in prompts]

    def search(self, _: Any, requests: Sequence[Any], width: int, **__: Any) -> list[Beams]:
        self.count([(len(r.prompt_ids), r.num_new) for r in requests], width)
        return [
            Beams(ids_WS=np.zeros((width, r.num_new), np.int32), score_W=np.zeros(width))
            for r in requests
        ]

    def count(self, sizes: Sequence[tuple[int, int]], num_rows: int) -> None:
        self.work += Work(
            passages=len(sizes),
            tokens=sum(size for size, _ in sizes),
            decoded=num_rows * sum(new for _, new in sizes),
        )


@st.composite
def _inputs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw short and long documents of up to three buckets, and what else probes read."""
    random = np.random.default_rng(draw(st.integers(0, 99)))
    windows = []
    for number, (bucket, role) in enumerate(
        draw(st.lists(st.sampled_from(BUCKETS), max_size=7)), start=1
    ):
        size = draw(st.integers(10, 40))
        is_chat = draw(st.booleans())
        document = make_document(
            random.integers(1, 95, size),
            name=f"d{number}",
            bucket=bucket,
            role=role,
            format="messages" if is_chat else "text",
            supervised=np.arange(size) >= (7 if is_chat else 0),
        )
        window = MAIN.window(document)
        assert window is not None
        windows.append(window)
    return {
        "windows": windows,
        "canaries": build_canaries(draw(st.integers(0, 3))),
        "codec": draw(st.sampled_from([None, CHARACTERS, WORDS])),
        "goldfish": draw(st.sampled_from([None, "static", "random"]).map(_make_goldfish)),
        "has_reference": draw(st.booleans()),
    }


def _make_goldfish(mode: Any) -> Goldfish | None:
    if mode is None:
        return None
    config = GoldfishConfig(name="goldfish", k=3, context_width=4, mode=mode)
    return Goldfish(config, special_ids=(0,))


@pytest.mark.parametrize("probe", SETTINGS, ids=lambda probe: probe.name)
@settings(deadline=None, max_examples=12)
@given(
    inputs=_inputs(),
    model=st.sampled_from(["trained", "base", "reference"]),
    max_tokens=st.sampled_from([None, 40, 60]),
    is_known=st.booleans(),
)
def test_no_probe_asks_for_more_than_its_bound(
    probe: Probe, inputs: dict[str, Any], model: Any, max_tokens: int | None, is_known: bool
) -> None:
    windows = inputs["windows"]
    truths = {w.document.id: w.document.input_ids for w in windows} if is_known else {}
    counter = Counter(truths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "search_beams", counter.search)
        probes = [MAIN, probe] if probe.after else [probe]
        held = Held(counter, counter, max_tokens=max_tokens)
        run_probes(probes, held, model=model, **inputs)
    known = Inputs(max_edit_share=0.1, seed=0, tiny_margin=0, **inputs)
    most = list_bounds(build_suite(*probes), known, [model]).sum()
    assert counter.work.passages <= most.passages
    assert counter.work.tokens <= most.tokens
    assert counter.work.decoded <= most.decoded
    if not windows and not inputs["canaries"]:
        assert most == Work()


def test_every_own_probe_is_tried() -> None:
    assert {probe.name for probe in SETTINGS} == set(PROBES)


def _make_inputs(documents: Sequence[AuditDocument], **fields: Any) -> Inputs:
    windows = [window for d in documents if (window := MAIN.window(d)) is not None]
    return Inputs(windows=windows, max_edit_share=0.1, seed=0, tiny_margin=0, **fields)


def test_sizes_are_those_of_windows_canaries_and_lower_case() -> None:
    lower = build_suite(MAIN, MembershipProbe(scores=("lowercase",)))
    documents = build_documents(2, vocab_size=95, size=20)
    supervised = np.arange(20) >= 15
    documents[0] = replace(documents[0], format="messages", supervised=supervised)
    inputs = _make_inputs(documents, canaries=build_canaries(4), codec=WORDS)
    sizes = measure_sizes(lower, inputs)
    assert (sizes.num_tokens, sizes.num_canaries, sizes.canary_tokens) == (120, 4, 120)
    texts = [WORDS.decode(w.input_ids).lower().encode() for w in inputs.windows[1:]]
    assert sizes.lowercase_tokens == sum(1 + len(text) for text in texts) > 4 * 100
    assert measure_sizes(build_suite(MAIN), inputs).lowercase_tokens == 0
    assert measure_sizes(lower, replace(inputs, codec=None)).lowercase_tokens == 0


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from("ab"))),
    size=st.none() | st.integers(1, 4),
)
def test_the_chosen_documents_are_the_longest_sample(
    lengths: list[tuple[int, int, str]], size: int | None
) -> None:
    prefix, continuation, buckets = ([one[i] for one in lengths] for i in range(3))
    sizes = ItemSizes(
        prefix_N=np.array(prefix, dtype=np.int64),
        continuation_N=np.array(continuation, dtype=np.int64),
        bucket_N=np.array(buckets, dtype=object),
    )
    chosen_N = sizes.choose(size)
    whole = [p + c for p, c, _ in lengths]
    for bucket in "ab":
        here = [n for n, (_, _, name) in enumerate(lengths) if name == bucket]
        longest = sorted((whole[n] for n in here), reverse=True)[:size]
        assert sum(whole[n] for n in here if chosen_N[n]) == sum(longest)
        assert sum(chosen_N[here]) == len(longest)


class Foreign(Probe):
    """A probe of another package, with the bound that a test gives."""

    name: Literal["foreign"] = Field("foreign", description="Which probe.")
    result: Any = Field(None, description="Of the bound.")

    def bound(self, sizes: ItemSizes) -> Work:
        return self.result  # type: ignore[no-any-return]


@pytest.mark.parametrize("result", [None, 3, Work(passages=-1), Work(tokens=0.5)])  # type: ignore[arg-type]
def test_a_bound_of_another_package_that_fails_is_a_reason(result: Any) -> None:
    suite = build_suite(MAIN, Foreign(result=result)).model_copy(
        update={"packages": {"foreign": "mine 1.2"}}
    )
    bounds = list_bounds(suite, _make_inputs(build_documents(2)), ["trained", "base"])
    assert [(bound.probe, bound.model) for bound in bounds.bounds] == [
        ("extraction", "trained"),
        ("extraction", "base"),
    ]
    assert list(bounds.unknown) == ["foreign"]
    assert bounds.unknown["foreign"].startswith("the probe of package mine 1.2 failed (")
    assert "; not counted: foreign: the probe of package mine 1.2" in bounds.describe()
    own = build_suite(MAIN, Foreign(result=result))
    with pytest.raises((AttributeError, TypeError, ValueError)):
        list_bounds(own, _make_inputs(build_documents(2)), ["trained"])


def test_bounds_are_of_the_models_that_a_probe_measures() -> None:
    suite = build_suite(MAIN, CanaryProbe(), AttackProbe(), MembershipProbe())
    models: tuple[Any, ...] = ("trained", "base", "reference")
    bounds = list_bounds(suite, _make_inputs(build_documents(1, size=20)), models)
    found = [(bound.probe, bound.model) for bound in bounds.bounds]
    assert found == [
        ("extraction", "trained"),
        ("extraction", "base"),
        ("attacks", "trained"),
        *(("membership", model) for model in models),
    ], "without canaries nothing is asked about them"
    assert bounds.bounds[0] == ProbeBound(
        probe="extraction", model="trained", passages=6, tokens=120, decoded=15
    )
    assert bounds.sum("extraction") == Work(passages=12, tokens=240, decoded=30)
    each = [bounds.sum(name) for name in ("extraction", "attacks", "membership")]
    assert bounds.sum() == sum(each, Work())
    alone = list_bounds(build_suite(MAIN), _make_inputs(build_documents(1, size=20)), ["trained"])
    assert alone.describe() == ("at most 6 passages, 120 tokens and 15 generated tokens on 1 model")


def test_requests_are_as_large_as_what_they_generate() -> None:
    (window,) = _make_inputs([make_document(np.arange(20))]).windows
    fields: dict[str, Any] = {"keys": [b""] * 2, "names": ("n",), "reduce": None, "parameters": {}}
    prompts = [Prompt.of(window), None]
    for name, rows in (("samples", 1), ("samples", 4), ("beams", 3)):
        more: dict[str, Any] = {name: rows}
        assert count_tokens(Generate(prompts=prompts, **fields, **more)) == 15 + 5 * rows


def test_the_share_grows_to_the_whole() -> None:
    documents = build_documents(4, vocab_size=90, size=60)
    seen: list[AuditBounds] = []
    shares: list[float | None] = []
    meter = WorkMeter(on_bounds=seen.append)
    context = AuditContext(
        codec=CHARACTERS, meter=meter, on_progress=lambda *_: shares.append(meter.share)
    )
    model, base = Held(Scripted(say_by_context)), Held(know(documents, "none"))
    audit(documents, model, base, suite=EVERY_PROBE, canaries=build_canaries(), context=context)
    assert [bounds.models for bounds in seen] == [("trained", "base")]
    known = [share for share in shares if share is not None]
    assert len(known) == len(shares) >= 4
    assert known == sorted(known)
    assert 0 < known[0] < known[-1] <= 1
    assert meter.share == 1


def test_a_pass_counts_with_its_tokens() -> None:
    """Of 6 documents of 20 tokens, a pass and a prompt of each and 30 tokens are the bound."""
    shares: list[float | None] = []
    meter = WorkMeter()
    context = AuditContext(meter=meter, on_progress=lambda *_: shares.append(meter.share))
    documents = build_documents(2, size=20)
    model = Held(know(documents, "x64"))
    audit(documents, model, suite=build_suite(MAIN), context=context, min_documents=1)
    # The pass; nothing is generated by a decoder that reports.
    assert shares == [120 / 270]
    assert meter.share == 1


def test_the_share_is_that_of_ended_probes_and_finished_requests() -> None:
    windows = _make_inputs([make_document(np.arange(20))]).windows
    request = _score(windows)
    meter = WorkMeter()
    assert meter.share is None
    bounds = [
        ProbeBound(probe=name, model=model, passages=1, tokens=40, decoded=10)
        for model in ("trained", "base")
        for name in ("one", "two")
    ]
    meter.expect(AuditBounds(bounds=bounds))
    assert meter.share == 0
    meter.start_round("trained", {"one": [request]}, waiting=["two"])
    meter.begin([request])
    meter.advance(0.5)
    assert meter.share == 10 / 200
    # More than its bound counts as the bound; the second probe has ended.
    again = [_score(windows) for _ in range(3)]
    meter.start_round("trained", {"one": again}, waiting=())
    assert meter.share == (20 + 50) / 200
    for request in again:
        meter.begin([request])
    assert meter.share == (50 + 50) / 200
    meter.end("trained")
    meter.start_round("base", {}, waiting=["one", "two"])
    assert meter.share == 0.5
    meter.end("base")
    assert meter.share == 1


def _score(windows: Sequence[Window]) -> Any:
    view: Any = None
    (numbers,) = next(SamplingProbe().measure(_make_inputs([w.document for w in windows]), view))
    assert count_tokens(numbers) == sum(len(w.input_ids) for w in windows)
    return numbers


def test_helpers_agree() -> None:
    inputs = _make_inputs(build_documents(2, size=20))
    by_hand, built = sizes_of(inputs.windows), measure_sizes(build_suite(MAIN), inputs)
    for name in ("prefix_N", "continuation_N", "bucket_N"):
        np.testing.assert_array_equal(getattr(by_hand, name), getattr(built, name))
