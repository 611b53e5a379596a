"""Canaries: likelihood of trained secrets, compared with secrets that were never trained."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from memguard.audit.extraction import SECRET
from memguard.audit.probe import Inputs, Measured, Model, Rounds, View
from memguard.audit.probes.extraction import score_windows
from memguard.config.settings import Settings


class CanaryProbe(Settings):
    """Likelihood of trained secrets, compared with secrets that were never trained."""

    VERSION: ClassVar[int] = 3
    models: ClassVar[tuple[Model, ...]] = ("trained", "base")
    after: ClassVar[tuple[str, ...]] = ()

    name: Literal["canaries"] = Field("canaries", description="Which probe.")
    delta: Annotated[float, Field(ge=0, lt=1)] = Field(
        1e-5, description="Delta of the lower bound on epsilon."
    )

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Score each secret after its prompt."""
        if not inputs.canaries:
            return None
        windows = [SECRET.window(canary.document) for canary in inputs.canaries]
        secrets = [window for window in windows if window is not None]
        assert len(secrets) == len(windows), "a canary has a prompt and a secret"
        (numbers,) = yield [score_windows(secrets, inputs.tiny_margin)]
        return Measured(columns=numbers)
