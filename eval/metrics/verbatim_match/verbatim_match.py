"""Verbatim and near-verbatim match of continuations, for `evaluate.load`."""

import datasets
import evaluate
import numpy as np

from memguard.audit.extraction import ExtractionProbe, compute_first_divergence
from memguard.audit.overlap import compute_overlap
from memguard.audit.statistics import clopper_pearson

_DESCRIPTION = """
Compares each predicted continuation with the true one, token by token. `verbatim_match` is the
share of continuations that are equal, `near_verbatim` the share at most floor(S / 10) insertions,
deletions and substitutions away from the true S tokens, both with Clopper-Pearson 95 % intervals.
"""

_INPUTS = """
Args:
    predictions: list of lists of token ids, as greedy decoding wrote them; of first choices given
        the true text before each, `verbatim_match` is the same and `near_verbatim` means nothing.
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
        rows, num_near, probe = [], 0, ExtractionProbe()
        for index, (predicted, true) in enumerate(zip(predictions, references, strict=True)):
            if len(predicted) != len(true) or not true:
                raise ValueError(
                    f"prediction {index} has {len(predicted)} tokens, its reference {len(true)}; "
                    "both must have the same number, at least one"
                )
            rows.append(np.array(predicted) == np.array(true))
            distance = compute_overlap(np.array(true), np.array(predicted)).edit_distance
            num_near += round(distance * len(true)) <= probe.num_edits_allowed(len(true))
        verbatim = clopper_pearson(sum(bool(row.all()) for row in rows), len(rows))
        near = clopper_pearson(num_near, len(rows))
        return {
            "verbatim_match": verbatim.rate,
            "verbatim_match_ci": verbatim.ci,
            "near_verbatim": near.rate,
            "near_verbatim_ci": near.ci,
            "mean_token_accuracy": float(np.mean([row.mean() for row in rows])),
            "mean_first_divergence": float(np.mean([compute_first_divergence(r) for r in rows])),
            "num_documents": len(rows),
        }
