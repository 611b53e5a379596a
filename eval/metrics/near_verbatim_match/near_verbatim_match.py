"""Near-verbatim match of continuations, token by token and by overlap, for `evaluate.load`."""

import datasets
import evaluate
import numpy as np

from memguard.audit.extraction import ExtractionProbe
from memguard.audit.overlap import APPROXIMATE_BLEU, APPROXIMATE_EDIT_DISTANCE, compute_overlap
from memguard.audit.statistics import clopper_pearson

_DESCRIPTION = """
Shares of continuations that come out nearly, each with a Clopper-Pearson 95 % interval:
`near_verbatim_match` has at least `threshold` of the true tokens in their places,
`edit_distance_match` is at most 10 % insertions, deletions and substitutions away (the reports on
Gemma and Gemini), `bleu_match` has a BLEU above 0.75 (Ippolito et al. 2022).
"""

_INPUTS = """
Args:
    predictions: list of lists of token ids, as the model wrote them.
    references: list of lists of token ids, the true continuations; the lengths may differ.
    threshold: share of the true tokens that must stand in their places, 0.9 by default.
Returns:
    near_verbatim_match, edit_distance_match, bleu_match: shares; ..._ci: intervals, null below two
    documents; mean_edit_distance, mean_bleu, mean_type_token_ratio (of what was written; low for
    loops, which overlap with much; null where nothing was); num_documents.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class NearVerbatimMatch(evaluate.Metric):
    """Ten lines on `memguard.audit`."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(
        self,
        predictions: list[list[int]],
        references: list[list[int]],
        threshold: float = 0.9,
    ) -> dict:
        probe = ExtractionProbe(near_verbatim_threshold=threshold)
        for index, true in enumerate(references):
            if not true:
                raise ValueError(f"reference {index} has no token; a continuation has at least one")
        pairs = list(zip(predictions, references, strict=True))
        # What was not written is wrong; what was written beyond the end is in the overlap alone.
        num_right = [sum(a == b for a, b in zip(*pair, strict=False)) for pair in pairs]
        overlaps = [compute_overlap(np.array(true), np.array(wrote)) for wrote, true in pairs]
        shares = {
            "near_verbatim_match": [
                right >= probe.num_needed(len(true))
                for right, true in zip(num_right, references, strict=True)
            ],
            "edit_distance_match": [
                each.edit_distance <= APPROXIMATE_EDIT_DISTANCE for each in overlaps
            ],
            "bleu_match": [each.bleu > APPROXIMATE_BLEU for each in overlaps],
        }
        result: dict = {}
        for name, matched in shares.items():
            rate = clopper_pearson(sum(matched), len(matched))
            result |= {name: rate.rate, f"{name}_ci": rate.ci}
        ratios = [o.type_token_ratio for o in overlaps if o.type_token_ratio is not None]
        return result | {
            "mean_edit_distance": float(np.mean([each.edit_distance for each in overlaps])),
            "mean_bleu": float(np.mean([each.bleu for each in overlaps])),
            "mean_type_token_ratio": float(np.mean(ratios)) if ratios else None,
            "num_documents": len(pairs),
        }
