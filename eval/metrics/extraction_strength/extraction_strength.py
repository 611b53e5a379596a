"""Extraction strength: how little of a continuation must be given away, for `evaluate.load`."""

import datasets
import evaluate
import numpy as np

from memguard.audit.extraction import compute_extraction_strength
from memguard.audit.statistics import compute_mean

_DESCRIPTION = """
1 - k/S for a continuation of S tokens, k the first place from which on every first choice is the
true token (Carlini et al. 2021 by way of Wang et al. 2025): 1 where nothing must be given, 0 where
not even the last token is right. Some implementations return 1/S there.
"""

_INPUTS = """
Args:
    predictions: list of lists of token ids, the first choice at each place GIVEN ALL TRUE TOKENS
        BEFORE IT (one teacher-forced pass); what a model writes freely is something else.
    references: list of lists of token ids, the true continuations; as long as the predictions.
Returns:
    extraction_strength: mean; extraction_strength_ci: its 95 % interval (jackknife), null below
    two documents and where all are equal; extraction_strengths: of each; num_documents.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class ExtractionStrength(evaluate.Metric):
    """Ten lines on `memguard.audit`."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict:
        strengths = []
        for index, (chosen, true) in enumerate(zip(predictions, references, strict=True)):
            if len(chosen) != len(true) or not true:
                raise ValueError(
                    f"prediction {index} has {len(chosen)} tokens, its reference {len(true)}; "
                    "both must have the same number, at least one"
                )
            correct = np.array(chosen) == np.array(true)
            strengths.append(float(compute_extraction_strength(correct)))
        mean = compute_mean(strengths, (0, 1))
        return {
            "extraction_strength": mean.value,
            "extraction_strength_ci": mean.ci,
            "extraction_strengths": strengths,
            "num_documents": len(strengths),
        }
