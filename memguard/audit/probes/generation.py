"""Generation: overlap of generated continuations with the true text.

    greedy    the true tokens up to the first divergence d, then S - d greedily decoded tokens
    nucleus   S sampled tokens after the prefix

Verbatim documents need no decoding step. The numbers describe the whole continuation of S tokens;
for near-verbatim matches, generation of a text stops when it has too many edits.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from memguard.audit.extraction import Window
from memguard.audit.overlap import APPROXIMATE_BLEU, compute_overlap
from memguard.audit.probe import (
    Generate,
    Generated,
    Inputs,
    Measured,
    Model,
    Prompt,
    Rounds,
    View,
    join,
    key_of_window,
)
from memguard.audit.selection import choose_sample
from memguard.config.settings import PositiveInt, SamplingScheme, Settings

METRICS = (
    "rouge_l",
    "longest_copied_run",
    "edit_distance",
    "near_verbatim",
    "bleu_above_0.75",
    "type_token_ratio",
)


class GenerationProbe(Settings):
    """Generate text from the first wrong token on, and compare it with the true text."""

    VERSION: ClassVar[int] = 2
    models: ClassVar[tuple[Model, ...]] = ("trained", "base")
    after: ClassVar[tuple[str, ...]] = ("extraction",)

    name: Literal["generation"] = Field("generation", description="Which probe.")
    nucleus: SamplingScheme | None = Field(
        SamplingScheme(top_p=0.95),
        description="Sampling in addition to greedy decoding; null for none.",
    )
    max_documents_per_bucket: PositiveInt | None = Field(
        100, description="Size of the seeded sample of each bucket; null takes all."
    )

    @property
    def decodings(self) -> dict[str, str]:
        """The decoding methods and their labels."""
        nucleus = {} if self.nucleus is None else {"nucleus": self.nucleus.label}
        return {"greedy": "greedy", **nucleus}

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Generate a sample of each bucket; columns are ``greedy.rouge_l``, ..."""
        windows = inputs.windows
        chosen = choose_sample(
            windows, self.max_documents_per_bucket, seed=inputs.seed, purpose="written on"
        )
        kept_N = view.before["extraction"].columns["first_divergence"].astype(int)
        stage = "generating" if view.name == "model" else f"{view.name}: generating"

        def keep_true(index: int, text: NDArray[np.int32]) -> NDArray[np.int32]:
            return np.concatenate([windows[index].continuation_ids[: kept_N[index]], text])

        numbers = yield [
            self._generate(
                "greedy",
                {i: Prompt.of(windows[i], int(kept_N[i])) for i in chosen},
                inputs,
                f"{stage} greedily",
                lambda index, text: keep_true(index, text.samples[0]),
            ),
            *(
                []
                if self.nucleus is None
                else [
                    self._generate(
                        "nucleus",
                        {i: Prompt.of(windows[i]) for i in chosen},
                        inputs,
                        f"{stage} by sampling",
                        lambda _, text: text.samples[0],
                    )
                ]
            ),
        ]
        return Measured(
            columns=join({f"{name}.": m for name, m in zip(self.decodings, numbers, strict=True)})
        )

    def _generate(
        self,
        decoding: str,
        prompts: dict[int, Prompt],
        inputs: Inputs,
        stage: str,
        complete: Callable[[int, Generated], NDArray[np.int32]],
    ) -> Generate:
        """Return the request for the texts of one decoding method.

        Args:
            decoding: name of the method.
            prompts: by index of the window.
            inputs: of the audit.
            stage: name in progress lines.
            complete: returns the whole continuation of a window from what was generated.
        """
        windows, scheme = inputs.windows, None if decoding == "greedy" else self.nucleus

        def reduce(items: Sequence[int], texts: Sequence[Generated]) -> ArrayLike:
            return [
                _compare(
                    windows[index],
                    complete(index, text),
                    inputs.num_edits_allowed(windows[index].continuation_tokens),
                )
                for index, text in zip(items, texts, strict=True)
            ]

        return Generate(
            prompts=[prompts.get(index) for index in range(len(windows))],
            keys=[key_of_window(window) for window in windows],
            names=METRICS,
            reduce=reduce,
            parameters={
                "kind": f"generated, {decoding}",
                "version": self.VERSION,
                "max_edit_share": inputs.max_edit_share,
                "seed": None if scheme is None else inputs.seed,
                "scheme": None if scheme is None else scheme.model_dump(mode="json"),
            },
            scheme=scheme,
            stage=stage,
        )


def _compare(window: Window, written: NDArray[np.int32], num_allowed: int) -> list[float]:
    """Return the numbers of `METRICS`."""
    overlap = compute_overlap(window.continuation_ids, written)
    num_edits = round(overlap.edit_distance * window.continuation_tokens)
    ratio = overlap.type_token_ratio
    assert ratio is not None, "a continuation has tokens"
    return [
        overlap.rouge_l,
        float(overlap.longest_run_tokens),
        overlap.edit_distance,
        float(num_edits <= num_allowed),
        float(overlap.bleu > APPROXIMATE_BLEU),
        ratio,
    ]
