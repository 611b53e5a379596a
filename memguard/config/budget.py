"""The risk budget: how much may be learnt by heart before training reacts."""

from typing import Literal

from pydantic import Field

from memguard.config.settings import Fraction, Settings


class BudgetConfig(Settings):
    """How much of each trained bucket may come back, and what happens before more does.

    Judged by the audits during training. Documents that came back before training do not count:
    this run has not taught them.
    """

    metric: Literal["near_verbatim", "verbatim"] = Field(
        "near_verbatim", description="What counts as coming back."
    )
    limit: Fraction = Field(0.1, description="Share of a bucket's audited documents that may.")
    action: Literal["tighten", "stop"] = Field(
        "tighten",
        description="tighten: documents halfway to being recited are trained with goldfish loss of "
        "a lower k, in the end without loss; stop: training ends with the weights of the last "
        "audit within the limit.",
    )
