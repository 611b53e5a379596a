"""How the next token is drawn: one description for suites, audits and the model."""

from typing import Annotated

from pydantic import Field

from memguard.config.settings import Positive, PositiveInt, Settings


class SamplingScheme(Settings):
    """How tokens are drawn: temperature, then top-k, then top-p, in the order of transformers."""

    temperature: Positive = Field(1.0, description="Divides the logits.")
    top_k: PositiveInt | None = Field(
        None, description="Draw from this many most likely tokens; null draws from all."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Draw from the fewest most likely tokens that reach this probability; null "
        "draws from all.",
    )

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn with the model's own probabilities."""
        return self.temperature == 1 and self.top_k is None and self.top_p in (None, 1)

    @property
    def label(self) -> str:
        """Short name, e.g. ``T=1, top-k 40``; different schemes have different ones."""
        parts = [f"T={_write(self.temperature)}"]
        if self.top_k is not None:
            parts.append(f"top-k {self.top_k}")
        if self.top_p is not None:
            parts.append(f"top-p {_write(self.top_p)}")
        return ", ".join(parts)


def _write(number: float) -> str:
    return repr(number).removesuffix(".0")
