"""Attacks: several answers, and an attacker who knows the mask; see `audit/attacks.py`."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from memguard.audit.attacks import (
    SHORT_CONTEXT_TOKENS,
    USUAL_GUESS_COST,
    build_mask,
    judge_answers,
    read_guess_cost,
)
from memguard.audit.extraction import Window
from memguard.audit.passages import Passage, TokenResult
from memguard.audit.probe import (
    Generate,
    Generated,
    Inputs,
    Measured,
    Model,
    Prompt,
    Rounds,
    Score,
    View,
    join,
    key_of_window,
)
from memguard.audit.selection import choose_sample
from memguard.config.settings import PositiveInt, SamplingScheme, Settings

_Answers = Annotated[int, Field(ge=1, le=100_000)]
NUMBERS = ("best", "any", "right")
"""1 if the first answer, or any answer, is the true continuation; correct tokens of the first."""


class AttackProbe(Settings):
    """Attacks by an attacker who may submit several answers and knows the mask."""

    VERSION: ClassVar[int] = 1
    models: ClassVar[tuple[Model, ...]] = ("trained",)
    after: ClassVar[tuple[str, ...]] = ()

    name: Literal["attacks"] = Field("attacks", description="Which probe.")
    width: _Answers = Field(16, description="Beams, and answers per document.")
    candidates: _Answers = Field(64, description="Tokens tried for each dropped token.")
    samples: _Answers = Field(16, description="Samples of the sampling attack.")
    scheme: SamplingScheme = Field(SamplingScheme(), description="Sampling scheme of this attack.")
    max_documents_per_bucket: PositiveInt | None = Field(
        40, description="Size of the seeded sample of each bucket that is attacked; null takes all."
    )

    @property
    def num_answers(self) -> dict[str, int]:
        """Answers that each attack submits for a document."""
        return {"beam_search": self.width, "sampling": self.samples, "fill": self.width}

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Attack a sample of each bucket; columns are ``beam_search.best``, ..."""
        windows, goldfish = inputs.windows, inputs.goldfish
        chosen = choose_sample(
            windows, self.max_documents_per_bucket, seed=inputs.seed, purpose="attacked"
        )
        knows_mask = goldfish is not None and goldfish.config.mode != "random"
        first = [
            self._attack("beam_search", inputs, chosen, "beam search", beams=self.width),
            self._attack(
                "sampling",
                inputs,
                chosen,
                "sampling",
                scheme=self.scheme,
                samples=self.samples,
            ),
        ]
        costs = [self._score_costs(inputs, chosen)] if knows_mask else []
        beam, sampled, *cost = yield [*first, *costs]
        columns = {"beam_search.": beam, "sampling.": sampled}
        if goldfish is not None:
            masks = {}
            if knows_mask:
                cost_N = np.nan_to_num(cost[0]["cost"], nan=USUAL_GUESS_COST)
                masks = {
                    "candidates": self.candidates,
                    "is_free": lambda index: build_mask(goldfish, windows[index]),
                    "guess_costs": cost_N.tolist(),
                }
            (columns["fill."],) = yield [
                self._attack(
                    "fill", inputs, chosen, "filling dropped tokens", beams=self.width, **masks
                )
            ]
        return Measured(columns=join(columns))

    def _attack(
        self, attack: str, inputs: Inputs, chosen: Sequence[int], how: str, **decoding: Any
    ) -> Generate:
        windows, attacked = inputs.windows, set(chosen)

        def reduce(items: Sequence[int], texts: Sequence[Generated]) -> ArrayLike:
            return [
                judge_answers(windows[index], _order_answers(attack, text.samples))
                for index, text in zip(items, texts, strict=True)
            ]

        return Generate(
            prompts=[
                Prompt.of(window) if index in attacked else None
                for index, window in enumerate(windows)
            ],
            keys=_list_keys(windows),
            names=NUMBERS,
            reduce=reduce,
            parameters=self._describe(f"attack, {attack}", inputs),
            stage=f"attack by {how}",
            **decoding,
        )

    def _score_costs(self, inputs: Inputs, chosen: Sequence[int]) -> Score:
        """Return the request for the cost of a guess, from each prefix that is long enough."""
        windows, attacked, goldfish = inputs.windows, set(chosen), inputs.goldfish
        assert goldfish is not None, "the attacker knows a mask"

        def reduce(items: Sequence[int], results: Sequence[TokenResult]) -> list[float]:
            return [
                read_guess_cost(windows[index], result, goldfish)
                for index, result in zip(items, results, strict=True)
            ]

        return Score(
            items=windows,
            passages=[
                Passage(
                    input_ids=window.prefix_ids,
                    first_label=SHORT_CONTEXT_TOKENS,
                    first_choice=SHORT_CONTEXT_TOKENS,
                )
                if index in attacked and window.prefix_tokens > SHORT_CONTEXT_TOKENS
                else None
                for index, window in enumerate(windows)
            ],
            keys=_list_keys(windows),
            names=("cost",),
            reduce=reduce,
            parameters=self._describe("cost of a guess", inputs),
        )

    def _describe(self, kind: str, inputs: Inputs) -> dict[str, Any]:
        """Return what the numbers depend on, in addition to model and window."""
        goldfish = inputs.goldfish
        mask = None
        if goldfish is not None:
            mask = [goldfish.config.model_dump(mode="json"), goldfish.special_ids]
        settings = self.model_dump(mode="json", exclude={"max_documents_per_bucket"})
        return {
            "kind": kind,
            "seed": inputs.seed,
            "mask": mask,
            "probe": {"version": self.VERSION, **settings},
        }


def _list_keys(windows: Sequence[Window]) -> list[bytes]:
    # The mask depends on the planned repetitions of a document.
    return [key_of_window(window, window.document.dose) for window in windows]


def _order_answers(attack: str, samples: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the answers in the order of submission: samples by how often they were drawn."""
    if attack != "sampling":
        return samples
    # Counter keeps the order of the samples if several are equally frequent.
    return np.array([text for text, _ in Counter(map(tuple, samples.tolist())).most_common()])
