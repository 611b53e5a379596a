"""Runs probes on one model, in rounds: merges their requests, and reads and fills the cache.

Scores of a round are measured in one pass: passages of the same item that begin with the same
tokens are merged into the longest of them, because a token's results depend only on the tokens
before it. Each request is cached by itself, so that another probe in the suite leaves the numbers
of the others in the cache; where only some requests lack an item, only their passages run.

All ranks run the same rounds: the main rank decides what is missing and shares all numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from memguard.audit.beams import BeamRequest, Beams, search_beams
from memguard.audit.cache import ScoreMatrix, StoredNumbers, compute_fingerprint
from memguard.audit.context import AuditContext, AuditedModel
from memguard.audit.decoding import Decoder
from memguard.audit.following import Follower
from memguard.audit.passages import Passage, ScoreSelection
from memguard.audit.plugins import Guard
from memguard.audit.probe import Probe
from memguard.audit.requests import (
    CannotGenerate,
    Continues,
    Generate,
    Generated,
    Inputs,
    LimitReached,
    Measured,
    Model,
    NotAllGenerated,
    Prompt,
    Request,
    Rounds,
    Score,
    View,
)
from memguard.audit.token_loop import Continuation

_SHARD_ITEMS = 2048
"""Items scored at a time: this limits the token results in memory, and their numbers are stored
before the next ones start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Runs probes on one model and frees it when the `with` block ends."""

    audited: AuditedModel
    model: Model
    name: str
    """Of the model in progress lines."""
    context: AuditContext
    seed: int
    """Of sampled texts."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Packages of the probes that are not memguard's, by name of the probe."""
    known: dict[str, dict[bytes, NDArray[np.float64]]] = field(default_factory=dict)
    """Numbers of texts that were generated while their documents were scored, by parameters."""
    stopped: set[tuple[Model, str]] = field(default_factory=set)
    """Models and probes whose text was not all generated, because the limit of time was reached."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.audited.free()

    def measure(
        self,
        probes: Sequence[Probe],
        inputs: Inputs,
        *,
        has_base: bool = False,
        failed: dict[str, str] | None = None,
    ) -> dict[str, Measured]:
        """Return the results of the probes that measure this kind of model, by name.

        Probes that miss an input do not run, and neither do those of other packages in ``failed``,
        which have ended with an error; new ones are added.

        Raises:
            ModelError: see `Batching.run`.
        """
        failed = {} if failed is None else failed
        guard = Guard(
            packages=self.packages,
            peers=self.context.peers,
            max_tokens=self.audited.max_tokens if self.packages else None,
            failed=failed,
        )
        done: dict[str, Measured] = {}
        waiting = [
            probe
            for probe in probes
            if self.model in probe.models
            and probe.name not in failed
            and not probe.find_missing(inputs, has_base=has_base)
        ]
        running: dict[str, tuple[Rounds, Sequence[Request]]] = {}
        while waiting or running:
            for probe in list(waiting):
                unfinished = {other.name for other in waiting} | running.keys()
                if not unfinished.intersection(probe.after):
                    waiting.remove(probe)
                    view = View(
                        model=self.model,
                        name=self.name,
                        max_tokens=self.audited.max_tokens,
                        before=dict(done),
                    )
                    started = partial(_start, probe, inputs, view, running)
                    _advance(probe.name, started, running, done, guard)
            self._run_round(running, done, guard)
        return done

    def _run_round(
        self,
        running: dict[str, tuple[Rounds, Sequence[Request]]],
        done: dict[str, Measured],
        guard: Guard,
    ) -> None:
        """Execute the requests of all running probes, and give each its numbers."""
        current = list(running.items())
        scores = [r for _, (_, requests) in current for r in requests if isinstance(r, Score)]
        scored = dict(zip(map(id, scores), self._score(scores, guard), strict=True))
        for name, (rounds, requests) in current:
            try:
                answers = [
                    scored[id(request)]
                    if isinstance(request, Score)
                    else self._generate(request, guard)
                    for request in requests
                ]
            except CannotGenerate as reason:
                if isinstance(reason, LimitReached):
                    self.stopped.add((self.model, name))
                answer = partial(rounds.throw, reason)
            else:
                answer = partial(rounds.send, answers)
            _advance(name, answer, running, done, guard)

    # -- scores ------------------------------------------------------------------------------------

    def _score(self, requests: Sequence[Score], guard: Guard) -> list[ScoreMatrix]:
        groups: dict[int, list[Score]] = {}
        for request in requests:
            groups.setdefault(id(request.items), []).append(request)
        answers: dict[int, ScoreMatrix] = {}
        for group in groups.values():
            answers |= zip(map(id, group), self._score_group(group, guard), strict=True)
        return [answers[id(request)] for request in requests]

    def _score_group(self, group: Sequence[Score], guard: Guard) -> list[ScoreMatrix]:
        """Measure requests about the same items in one pass over what is missing."""
        stores = [self._open(request, request.passages) for request in group]
        passages_of_items = zip(*(request.passages for request in group), strict=True)
        sizes = [max(len(p.input_ids) if p else 0 for p in of) for of in passages_of_items]
        # By index where sizes are equal: sets have no order.
        unmeasured = {index for store in stores for index in store.missing}
        missing = sorted(unmeasured, key=lambda index: (-sizes[index], index))
        wanted = ScoreSelection(
            needs=frozenset().union(*(request.selection.needs for request in group)),
            schemes=tuple(dict.fromkeys(s for r in group for s in r.selection.schemes)),
        )
        num_items = sum(size > 0 for size in sizes)
        report = self._report(next((r.stage for r in group if r.stage), ""))
        num_cached = num_items - len(missing)
        if report is not None and num_cached:
            report(num_cached, num_items)
        follower = self._follow(group, sizes[missing[0]] - 1) if missing else None
        for start in range(0, len(missing), _SHARD_ITEMS):
            shard = missing[start : start + _SHARD_ITEMS]
            self._score_shard(group, stores, shard, wanted, guard, follower)
            if follower is not None:
                follower.store_numbers()
            if report is not None:
                report(num_cached + start + len(shard), num_items)
        return [store.finish() for store in stores]

    def _score_shard(
        self,
        group: Sequence[Score],
        stores: Sequence[StoredNumbers],
        shard: Sequence[int],
        wanted: ScoreSelection,
        guard: Guard,
        follower: Follower | None,
    ) -> None:
        merged: list[Passage] = []
        places: list[list[tuple[int, int]]] = [[] for _ in group]
        """For each request, its items of the shard and the passages that contain theirs."""
        for item in shard:
            needed = {
                number: passage
                for number, (request, store) in enumerate(zip(group, stores, strict=True))
                if item in store.missing and (passage := request.passages[item]) is not None
            }
            for passage, numbers in merge(needed):
                for number in numbers:
                    places[number].append((item, len(merged)))
                merged.append(passage)
        if follower is not None:
            own_places = places[group.index(follower.request)]
            follower.items = {place: (item, merged[place]) for item, place in own_places}
            follower.computed = wanted
        results = self.audited.scorer().score(merged, wanted, follower=follower)
        for request, store, where in zip(group, stores, places, strict=True):
            if not where:
                continue
            items = [item for item, _ in where]
            parts = []
            for item, place in where:
                own = request.passages[item]
                assert own is not None, "only items with a passage are missing"
                parts.append(results[place].restrict(merged[place], own, request.selection, wanted))
            rows = guard.reduce(request, items, parts)
            if rows is not None:
                store.add(items, rows)

    def _follow(self, group: Sequence[Score], longest: int) -> Follower | None:
        """Return what continues documents while they are scored, the longest first, if possible."""
        found = [(one, one.continues) for one in group if one.continues is not None]
        if not found:
            return None
        (request, continues), decoder = found[0], self.audited.decoder()
        # A stand-in has no model.
        if not getattr(decoder, "fits", False) or decoder.find_obstacle() is not None:
            return None
        store = self._open(continues, continues.keys)
        return Follower(decoder, request, continues, store, longest)

    # -- generated text ----------------------------------------------------------------------------

    def _generate(self, request: Generate, guard: Guard) -> ScoreMatrix:
        store = self._open(request, request.prompts)
        items = sorted(store.missing, key=lambda item: (-_size(request.prompts[item]), item))
        decoder = self.audited.decoder() if items else None
        if decoder is not None:
            if request.beams is None and request.scheme is None and request.is_done is not None:
                # Without a substitute a probe runs all the same, however slow it is.
                obstacle = decoder.find_obstacle()
                if obstacle is not None:
                    raise CannotGenerate(obstacle)
            for start in range(0, len(items), _SHARD_ITEMS):
                shard = items[start : start + _SHARD_ITEMS]
                prompts = [p for item in shard if (p := request.prompts[item]) is not None]
                try:
                    texts = self._decode(request, decoder, shard, prompts, (start, len(items)))
                except LimitReached as reason:
                    found = {shard[n]: _to_generated(t) for n, t in reason.finished.items()}
                    # Cached, so that another audit goes on from here.
                    self._keep(store, request, list(found), list(found.values()), guard)
                    num_left = len(items) - start - len(found)
                    text = f"{num_left:,} of {len(items):,} texts were not generated: {reason}"
                    raise NotAllGenerated(text, store.finish()) from None
                self._keep(store, request, shard, texts, guard)
        return store.finish()

    def _keep(
        self,
        store: StoredNumbers,
        request: Generate,
        items: Sequence[int],
        texts: Sequence[Generated],
        guard: Guard,
    ) -> None:
        """Reduce the texts of some items to numbers, and store these."""
        rows = guard.reduce(request, items, texts) if items else None
        if rows is not None:
            store.add(items, rows)

    def _decode(
        self,
        request: Generate,
        decoder: Decoder,
        items: Sequence[int],
        prompts: Sequence[Prompt],
        place: tuple[int, int],
    ) -> list[Generated]:
        show, (start, total) = self._report(request.stage), place
        report = None if show is None else lambda done, _: show(start + done, total)
        if request.beams is not None:
            free, costs = request.is_free, request.guess_costs
            searched = search_beams(
                decoder,
                [
                    BeamRequest(
                        prompt_ids=prompt.input_ids,
                        num_new=prompt.num_new,
                        is_free=None if free is None else free(item),
                        guess_cost=costs[item] if costs else 0.0,
                    )
                    for item, prompt in zip(items, prompts, strict=True)
                ],
                request.beams,
                candidates=request.candidates,
                on_progress=report,
            )
            return [Generated(samples=beams.ids_WS) for beams in searched]
        if request.scheme is not None:
            drawn = decoder.sample(prompts, request.scheme, request.samples, self.seed, report)
            return [Generated(samples=samples) for samples in drawn]
        is_done = None
        if (ends := request.is_done) is not None:
            is_done = lambda index, step, token: ends(items[index], step, token)  # noqa: E731
        continued = decoder.continue_greedily(prompts, report, is_done=is_done)
        return [Generated(samples=one.token_ids[None], min_gap=one.min_gap) for one in continued]

    # -- cache and progress ------------------------------------------------------------------------

    def _open(
        self, request: Request | Continues, present: Sequence[object | None]
    ) -> StoredNumbers:
        name = compute_fingerprint({"names": request.names, **request.parameters})
        if isinstance(request, Continues):
            self.known.setdefault(name, {})
        identity, cache, fingerprint = self.audited.identity, self.context.cache, None
        if identity is not None:
            fingerprint = compute_fingerprint({"model": identity, **request.parameters})
        pairs = zip(request.keys, present, strict=True)
        keys = [None if one is None else key for key, one in pairs]
        known, peers = self.known.get(name), self.context.peers
        return StoredNumbers(
            request.names, keys, cache=cache, fingerprint=fingerprint, peers=peers, known=known
        )

    def _report(self, stage: str) -> Callable[[int, int], None] | None:
        """Return a function that shows the progress of a stage; None if none is shown."""
        show = self.context.on_progress
        return partial(show, stage) if show is not None and stage else None


def _start(
    probe: Probe, inputs: Inputs, view: View, running: dict[str, tuple[Rounds, Sequence[Request]]]
) -> Sequence[Request]:
    """Return the first requests of a probe."""
    rounds = probe.measure(inputs, view)
    running[probe.name] = (rounds, ())
    return next(rounds)


def _advance(
    name: str,
    step: Callable[[], Sequence[Request]],
    running: dict[str, tuple[Rounds, Sequence[Request]]],
    done: dict[str, Measured],
    guard: Guard,
) -> None:
    """Take the next requests of a probe, or its results if it has ended."""
    try:
        requests = guard.advance(name, step)
    except CannotGenerate as reason:
        # It has no substitute for generated text; all ranks have the same reason.
        running.pop(name, None)
        guard.failed[name] = str(reason)
        return
    except StopIteration as end:
        running.pop(name, None)
        if end.value is not None:
            done[name] = end.value
        return
    if requests is None:
        running.pop(name, None)
    else:
        running[name] = (running[name][0], requests)


def merge(passages: Mapping[int, Passage]) -> Iterator[tuple[Passage, list[int]]]:
    """Yield passages that contain those of an item, each with the numbers of what it contains."""
    longest_first = sorted(passages.items(), key=lambda pair: -len(pair[1].input_ids))
    groups: list[tuple[Passage, list[int]]] = []
    for number, passage in longest_first:
        for place, (whole, numbers) in enumerate(groups):
            if np.array_equal(whole.input_ids[: len(passage.input_ids)], passage.input_ids):
                groups[place] = (_cover(whole, passage), [*numbers, number])
                break
        else:
            groups.append((passage, [number]))
    yield from groups


def _cover(whole: Passage, part: Passage) -> Passage:
    """Return the longer passage with the labels and choices of both."""
    # A part without choices has its first one behind its end, which may be inside the whole.
    has_choices = part.first_choice < len(part.input_ids)
    first_choice = min(whole.first_choice, part.first_choice) if has_choices else whole.first_choice
    return Passage(
        input_ids=whole.input_ids,
        first_label=min(whole.first_label, part.first_label),
        first_choice=first_choice,
    )


def _to_generated(found: Beams | Sequence[Continuation]) -> Generated:
    """Return beams, or the continuations of one prompt, as a probe receives them."""
    if isinstance(found, Beams):
        return Generated(samples=found.ids_WS)
    return Generated(samples=np.stack([t.token_ids for t in found]), min_gap=found[0].min_gap)


def _size(prompt: Prompt | None) -> int:
    return 0 if prompt is None else len(prompt.input_ids) + prompt.num_new
