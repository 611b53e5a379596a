"""The risk budget: how much may become extractable before training reacts."""

from typing import Literal

from pydantic import Field

from memguard.config.settings import Fraction, Settings


class BudgetConfig(Settings):
    """How much of each trained bucket may be extracted, and what happens before more is.

    Judged by the audits during training, on text that greedy decoding generates. Documents that
    were extracted before training do not count.
    """

    metric: Literal["near_verbatim", "verbatim"] = Field(
        "near_verbatim", description="What counts as extracted."
    )
    limit: Fraction = Field(0.1, description="Share of a bucket's audited documents that may.")
    action: Literal["tighten", "stop"] = Field(
        "tighten",
        description="tighten: documents whose teacher-forced accuracy is halfway to 90 % are "
        "trained with goldfish loss of a lower k, in the end without loss; stop: training ends "
        "with the weights of the last audit within the limit.",
    )
