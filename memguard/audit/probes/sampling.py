"""Sampling: how many queries generate the continuation, from one teacher-forced pass."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from memguard.audit.passages import ScoreSelection, TokenResult
from memguard.audit.probe import Inputs, Measured, Model, Rounds, Score, View, key_of_window
from memguard.config.settings import SamplingScheme, Settings


class SamplingProbe(Settings):
    """Number of queries until sampling gives the continuation, from one teacher-forced pass."""

    VERSION: ClassVar[int] = 1
    models: ClassVar[tuple[Model, ...]] = ("trained", "base", "variant")
    after: ClassVar[tuple[str, ...]] = ()

    name: Literal["sampling"] = Field("sampling", description="Which probe.")
    schemes: Annotated[tuple[SamplingScheme, ...], Field(min_length=1)] = Field(
        (SamplingScheme(), SamplingScheme(top_k=40)),
        description="Sampling schemes; the cheapest counts.",
    )

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Sum the log-probabilities of the continuation under each scheme."""

        def reduce(_: Sequence[int], results: Sequence[TokenResult]) -> NDArray[np.float64]:
            sums = []
            for result in results:
                assert result.sampled is not None, "schemes were requested"
                sums.append(result.sampled.sum(1, dtype=np.float64))
            return np.array(sums)

        (numbers,) = yield [
            Score(
                items=inputs.windows,
                passages=[window.passage() for window in inputs.windows],
                keys=[key_of_window(w, w.continuation_tokens) for w in inputs.windows],
                names=tuple(str(index) for index in range(len(self.schemes))),
                reduce=reduce,
                parameters={
                    "kind": "sampling",
                    "version": 3,
                    "schemes": [scheme.model_dump(mode="json") for scheme in self.schemes],
                },
                selection=ScoreSelection(schemes=self.schemes),
            )
        ]
        return Measured(columns=numbers)
