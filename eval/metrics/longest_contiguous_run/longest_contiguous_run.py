"""Longest run of tokens that stands in a continuation and in the true one, for `evaluate.load`."""

import datasets
import evaluate
import numpy as np

from memguard.audit.overlap import compute_overlap
from memguard.audit.statistics import compute_mean

_DESCRIPTION = """
The longest run of token ids that was written and stands in the true continuation, wherever in
either (the longest common substring). Read it beside the type-token ratio: loops copy cheaply.
"""

_INPUTS = """
Args:
    predictions: list of lists of token ids, as the model wrote them.
    references: list of lists of token ids, the true continuations; the lengths may differ.
Returns:
    longest_run_tokens: mean; longest_run_tokens_ci: its 95 % interval (jackknife), null below two
    documents and where all are equal; max_run_tokens; runs_tokens: of each; mean_type_token_ratio
    of what was written, null where nothing was; num_documents.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class LongestContiguousRun(evaluate.Metric):
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
        for index, true in enumerate(references):
            if not true:
                raise ValueError(f"reference {index} has no token; a continuation has at least one")
        overlaps = [
            compute_overlap(np.array(true), np.array(wrote))
            for wrote, true in zip(predictions, references, strict=True)
        ]
        runs = [each.longest_run_tokens for each in overlaps]
        mean = compute_mean(runs, (0, max(map(len, references))))
        ratios = [o.type_token_ratio for o in overlaps if o.type_token_ratio is not None]
        return {
            "longest_run_tokens": mean.value,
            "longest_run_tokens_ci": mean.ci,
            "max_run_tokens": max(runs),
            "runs_tokens": runs,
            "mean_type_token_ratio": float(np.mean(ratios)) if ratios else None,
            "num_documents": len(runs),
        }
