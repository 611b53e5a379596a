"""Verbatim and near-verbatim match of continuations, for `evaluate.load`."""

import datasets
import evaluate
import numpy as np

from memguard.audit.extraction import compute_first_divergence
from memguard.audit.statistics import clopper_pearson

_DESCRIPTION = """
Compares each predicted continuation with the true one, token by token. `verbatim_match` is the
share of continuations that are equal, `near_verbatim` the share with at least 90 % of the tokens
right, both with Clopper-Pearson 95 % intervals.
"""

_INPUTS = """
Args:
    predictions: list of lists of token ids, as the model wrote them.
    references: list of lists of token ids, the true continuations; as long as the predictions.
Returns:
    verbatim_match, near_verbatim: shares; verbatim_match_ci, near_verbatim_ci: intervals, null
    below two documents; mean_token_accuracy; mean_first_divergence (tokens); num_documents.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class VerbatimMatch(evaluate.Metric):
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
        rows = []
        for index, (predicted, true) in enumerate(zip(predictions, references, strict=True)):
            if len(predicted) != len(true) or not true:
                raise ValueError(
                    f"prediction {index} has {len(predicted)} tokens, its reference {len(true)}; "
                    "both must have the same number, at least one"
                )
            rows.append(np.array(predicted) == np.array(true))
        verbatim = clopper_pearson(sum(bool(row.all()) for row in rows), len(rows))
        # Counted in integers: 0.9 * 10 is not exactly 9.
        near = clopper_pearson(sum(bool(10 * row.sum() >= 9 * row.size) for row in rows), len(rows))
        return {
            "verbatim_match": verbatim.rate,
            "verbatim_match_ci": verbatim.ci,
            "near_verbatim": near.rate,
            "near_verbatim_ci": near.ci,
            "mean_token_accuracy": float(np.mean([row.mean() for row in rows])),
            "mean_first_divergence": float(np.mean([compute_first_divergence(r) for r in rows])),
            "num_documents": len(rows),
        }
