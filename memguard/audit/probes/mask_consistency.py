"""Whether copies of a text with other formatting have the same mask; no model is measured."""

from typing import ClassVar, Literal

from pydantic import Field

from memguard.audit.probe import Inputs, Model, Rounds, View
from memguard.config.settings import PositiveInt, Settings


class MaskConsistencyProbe(Settings):
    """Whether copies of a text with other formatting have the same mask."""

    VERSION: ClassVar[int] = 1
    models: ClassVar[tuple[Model, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()

    name: Literal["mask_consistency"] = Field("mask_consistency", description="Which probe.")
    max_passages: PositiveInt = Field(200, description="Trained documents that are rewritten.")

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Measure nothing: masks are compared without a model, see `mask_consistency.py`."""
        yield []
        return None
