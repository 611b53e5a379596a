"""ROUGE-L of continuations on token ids, for `evaluate.load`."""

import datasets
import evaluate
import numpy as np

from memguard.audit.overlap import compute_overlap
from memguard.audit.statistics import compute_mean

_DESCRIPTION = """
F1 of the longest common subsequence of what was written and the true continuation, on token ids:
no measure depends on how a tokenizer writes its tokens as text, and published figures on words
differ. Read it beside the type-token ratio: text that repeats itself overlaps with much.
"""

_INPUTS = """
Args:
    predictions: list of lists of token ids, as the model wrote them.
    references: list of lists of token ids, the true continuations; the lengths may differ.
Returns:
    rouge_l: mean; rouge_l_ci: its 95 % interval (jackknife), null below two documents and where
    all are equal; rouge_ls: of each; mean_type_token_ratio of what was written, null where nothing
    was; num_documents.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class RougeL(evaluate.Metric):
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
        mean = compute_mean([each.rouge_l for each in overlaps], (0, 1))
        ratios = [o.type_token_ratio for o in overlaps if o.type_token_ratio is not None]
        return {
            "rouge_l": mean.value,
            "rouge_l_ci": mean.ci,
            "rouge_ls": [each.rouge_l for each in overlaps],
            "mean_type_token_ratio": float(np.mean(ratios)) if ratios else None,
            "num_documents": len(overlaps),
        }
