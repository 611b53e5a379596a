"""Extraction strength: the share of a continuation that need not be given, for `evaluate.load`."""

import datasets
import evaluate
import numpy as np

from memguard.audit.statistics import compute_mean
from memguard.audit.windows import compute_extraction_strength

_DESCRIPTION = """
1 - k/S for a continuation of S tokens, where k is the first index from which on every first choice
is the true token (Carlini et al. 2021, as in Wang et al. 2025): 1 if no token must be given, 0 if
the last token is wrong. Some implementations return 1/S in that case.
"""

_INPUTS = """
Args:
    predictions: list of lists of token ids, the first choice at each position GIVEN ALL TRUE TOKENS
        BEFORE IT (one teacher-forced pass), not freely generated text.
    references: list of lists of token ids, the true continuations; as long as the predictions.
Returns:
    extraction_strength: mean; extraction_strength_ci: its 95 % interval (jackknife), null below
    two documents or if all are equal; extraction_strengths: value of each document; num_documents.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class ExtractionStrength(evaluate.Metric):
    """Mean extraction strength, computed by `memguard.audit`."""

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
