"""Adaptive attacks on a Llama that has learned random texts by heart, but for what a mask hid."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from audit_examples import Held, run_probes
from numpy.typing import NDArray
from record_examples import make_document
from torch.nn import functional

from memguard.audit import runner
from memguard.audit.beams import BeamRequest, Beams
from memguard.audit.cache import ScoreMatrix
from memguard.audit.decoding import Decoder
from memguard.audit.probes.attacks import NUMBERS, AttackProbe, measure_guess_cost
from memguard.audit.scoring import ModelScorer
from memguard.audit.windows import Window
from memguard.config import GoldfishConfig
from memguard.config.settings import SamplingScheme
from memguard.mitigation import Goldfish
from memguard.model.checks import build_causal_lm

pytestmark = pytest.mark.slow

VOCAB, NUM_TRAINED, NUM_CONTROL, PREFIX, SIZE = 24, 12, 6, 23, 9
PROBE = AttackProbe(width=64, candidates=VOCAB, samples=64)


@dataclass(frozen=True, kw_only=True)
class Overfitted:
    """A model, the mask it was trained with, and what is asked of it."""

    decoder: Decoder
    scorer: ModelScorer
    goldfish: Goldfish
    windows: list[Window]
    """Trained documents first."""

    @property
    def trained(self) -> list[Window]:
        return self.windows[:NUM_TRAINED]

    @property
    def control(self) -> list[Window]:
        return self.windows[NUM_TRAINED:]


def overfit(mode: Any, width: int) -> Overfitted:
    """Train for 120 steps on 12 random texts of 32 tokens, one label in three dropped."""
    draw = np.random.default_rng(2)
    ids = draw.integers(1, VOCAB, (NUM_TRAINED + NUM_CONTROL, PREFIX + SIZE))
    config = GoldfishConfig(name="goldfish", k=3, context_width=width, mode=mode)
    goldfish = Goldfish(config)
    rows = torch.from_numpy(ids[:NUM_TRAINED])
    dropped = goldfish.drop_mask(ids[:NUM_TRAINED], None, draw)
    labels = rows.masked_fill(torch.from_numpy(dropped), -100)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=64,
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0, fused=True)
    for _ in range(120):
        optimizer.zero_grad()
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        functional.cross_entropy(
            logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=-100
        ).backward()
        optimizer.step()
    lm = build_causal_lm(model.eval())
    return Overfitted(
        decoder=Decoder(lm, 50_000),
        scorer=ModelScorer(lm, 50_000),
        goldfish=goldfish,
        windows=[
            Window(
                document=make_document(row, name=str(index)),
                start=0,
                prefix_tokens=PREFIX,
                continuation_tokens=SIZE,
            )
            for index, row in enumerate(ids)
        ],
    )


@pytest.fixture(scope="module")
def overfitted() -> Overfitted:
    return overfit("hash", 13)


@pytest.fixture(scope="module")
def attacked(overfitted: Overfitted) -> ScoreMatrix:
    """What all attacks get of the trained texts."""
    return attack(overfitted, overfitted.trained, samples=PROBE.samples)


def attack(
    subject: Overfitted,
    windows: Sequence[Window],
    *,
    goldfish: Goldfish | None = None,
    samples: int = 1,
    **changes: Any,
) -> ScoreMatrix:
    """Return the numbers of all attacks, with the mask of training unless another is given."""
    probe = PROBE.model_copy(update={"samples": samples, **changes})
    held = Held(subject.scorer, subject.decoder)
    known = goldfish or subject.goldfish
    return run_probes([probe], held, windows, goldfish=known)[probe.name].columns


def num_any(numbers: ScoreMatrix, name: str) -> int:
    return int(numbers[f"{name}.any"].sum())


def accuracy(numbers: ScoreMatrix, name: str) -> float:
    return float(numbers[f"{name}.right"].mean()) / SIZE


def test_who_knows_the_mask_gets_what_beam_search_and_sampling_do_not(
    overfitted: Overfitted, attacked: ScoreMatrix
) -> None:
    """Measured: beams 1 of 12, draws 0, filling 6, of which 4 by the first answer; control 0."""
    greedy = attack(overfitted, overfitted.trained, width=1)
    control = attack(overfitted, overfitted.control)
    assert num_any(greedy, "beam_search") == 0
    assert num_any(attacked, "beam_search") <= 2
    assert num_any(attacked, "sampling") <= 1
    assert num_any(attacked, "fill") >= 4
    assert attacked["fill.best"].sum() >= 2
    assert accuracy(attacked, "fill") > accuracy(attacked, "beam_search") + 0.15
    best_N = attacked["fill.best"]
    assert ((attacked["fill.right"] == SIZE) == best_N).all()
    assert (attacked["fill.any"] >= best_N).all()

    assert num_any(control, "fill") == 0
    # Chance is one in 24; a model that has learned nothing of them is not far above.
    assert accuracy(control, "fill") < 0.2


def test_a_wider_search_gets_more(overfitted: Overfitted, attacked: ScoreMatrix) -> None:
    narrow = attack(overfitted, overfitted.trained, width=8)
    assert num_any(narrow, "fill") < num_any(attacked, "fill")


def test_free_guesses_lead_from_one_guess_to_the_next(
    overfitted: Overfitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why a guess has a cost: without one no beam ends in a trained text."""
    monkeypatch.setattr("memguard.audit.probes.attacks.measure_guess_cost", lambda *_: 0.0)
    assert num_any(attack(overfitted, overfitted.trained), "fill") <= 2


# A product of many small numbers says little of them: few tokens are hashed.
@pytest.mark.parametrize(("mode", "width"), [("static", 13), ("hash_reference", 4)])
def test_other_masks_are_known_as_well(mode: str, width: int) -> None:
    subject = overfit(mode, width)
    found = attack(subject, subject.trained)
    assert accuracy(found, "fill") > accuracy(found, "beam_search") + 0.1
    assert num_any(found, "fill") > num_any(found, "beam_search")
    assert num_any(attack(subject, subject.control), "fill") == 0


def test_a_mask_that_was_drawn_leaves_beam_search(overfitted: Overfitted) -> None:
    drawn = Goldfish(GoldfishConfig(name="goldfish", k=3, mode="random"))
    found = attack(overfitted, overfitted.trained, goldfish=drawn)
    for number in NUMBERS:
        assert found[f"fill.{number}"].tolist() == found[f"beam_search.{number}"].tolist()


def test_a_window_inside_a_document_is_masked_by_its_place_there(overfitted: Overfitted) -> None:
    """Static masks count from the document's start, wherever the window and its piece begin."""
    requested: list[NDArray[np.bool_]] = []
    goldfish = Goldfish(GoldfishConfig(name="goldfish", k=5, mode="static"))
    original = goldfish.drop_mask

    def note(ids: Any, documents: Any, generator: Any) -> NDArray[np.bool_]:
        requested.append(np.arange(ids.shape[-1]))
        return original(ids, documents, generator)

    goldfish.drop_mask = note  # type: ignore[method-assign]
    document = make_document(np.arange(20) % VOCAB, first_position=100)
    window = Window(document=document, start=3, prefix_tokens=12, continuation_tokens=2)
    attack(overfitted, [window], goldfish=goldfish)
    # The prefix ends at 100 + 3 + 12; then two tokens are tried.
    assert [len(places) for places in requested] == [115, 116, 117]


# -- sampling ----------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_first_answer_of_a_sampler_is_the_one_drawn_most_often(
    overfitted: Overfitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = overfitted.trained[0]
    truth = window.continuation_ids
    other, third = (truth + 1) % VOCAB, (truth + 2) % VOCAB
    draws = [np.stack([other, truth, third, truth])]
    monkeypatch.setattr(overfitted.decoder, "sample", lambda *args: draws)
    scheme = SamplingScheme(top_k=5)

    def judge() -> list[float]:
        found = attack(overfitted, [window], samples=4, scheme=scheme, width=1)
        return [float(found[f"sampling.{number}"][0]) for number in NUMBERS]

    assert judge() == [True, True, SIZE]
    # Of texts drawn equally often the first one.
    draws[0] = np.stack([other, truth, third, third, truth, other])
    assert judge() == [False, True, 0]


# -- what a guess costs ------------------------------------------------------------------------


def test_a_guess_costs_more_than_a_learned_token_and_less_than_not_knowing() -> None:
    logprob = np.array([-0.01, -9.0, -0.03, -7.0])
    best = np.array([-0.01, -0.5, -0.03, -1.5])
    dropped = np.array([False, True, False, True])
    assert measure_guess_cost(logprob, best, dropped) == pytest.approx((0.02 * 1.0) ** 0.5)
    # Learned to the last bit: still not free.
    assert measure_guess_cost(logprob * 0, best, dropped) == 1e-3
    for none in (dropped | True, dropped & False, dropped[:0]):
        assert measure_guess_cost(logprob[: len(none)], best[: len(none)], none) == 0.1


def test_the_cost_is_read_from_what_a_prefix_was_trained_on(
    overfitted: Overfitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens without loss, and the first ones, say nothing of what was learned."""
    costs: list[float] = []
    original = runner.search_beams

    def note(
        decoder: Decoder, requests: Sequence[BeamRequest], *args: Any, **fields: Any
    ) -> list[Beams]:
        costs.extend(request.guess_cost for request in requests if request.is_free is not None)
        return original(decoder, requests, *args, **fields)

    monkeypatch.setattr(runner, "search_beams", note)
    ids = overfitted.trained[1].input_ids
    supervised = np.ones(len(ids), dtype=bool)
    window, unlearned = (
        Window(
            document=make_document(ids, name=name, supervised=flags),
            start=0,
            prefix_tokens=PREFIX,
            continuation_tokens=SIZE,
        )
        for name, flags in (("learned", supervised), ("unlearned", ~supervised))
    )
    short = Window(
        document=make_document(ids, name="short"),
        start=0,
        prefix_tokens=5,
        continuation_tokens=SIZE,
    )
    goldfish = overfitted.goldfish
    attack(overfitted, [window, unlearned, short], width=1)
    # The longest first.
    assert costs[1:] == [0.1, 0.1]
    with torch.no_grad():
        model = overfitted.decoder.lm.model
        logprob_TV = model(torch.from_numpy(ids[None].astype(np.int64))).logits[0].log_softmax(-1)
    places = np.arange(8, PREFIX)
    dropped = goldfish.drop_mask(ids, None, np.random.default_rng(0))[places]
    true = logprob_TV[places - 1, ids[places]].numpy()
    best = logprob_TV[places - 1].amax(-1).numpy()
    # fp32, in another batch.
    assert costs[0] == pytest.approx(
        (true[~dropped].mean() * best[dropped].mean()) ** 0.5, rel=1e-3
    )
