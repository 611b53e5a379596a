"""Numbers from documents, each with what they cannot show. No torch.

    rates.py        shares of documents, their difference, and how many documents show a rate
    means.py        means over documents and their difference, by a jackknife over clusters
    ranking.py      members above nonmembers: AUC, and TPR at a fixed FPR
    paired.py       two settings on the same documents
    trend.py        rates against the dose: trend test, non-decreasing fit
    multiple.py     many tests on one page
    skew_normal.py  a fitted distribution whose left tail stays finite

Every interval is a 95 % one. None claims what a handful of documents cannot show: below two there
is none, and an estimate at the edge of its range (0 of n, AUC 1, all values equal) never gets one
of zero width. What cannot be estimated is None.
"""

from memguard.audit.statistics.means import compute_mean, compute_mean_difference
from memguard.audit.statistics.multiple import correct_holm
from memguard.audit.statistics.paired import compute_mcnemar, compute_paired_difference
from memguard.audit.statistics.ranking import compute_auc, compute_tpr_at_fpr
from memguard.audit.statistics.rates import (
    clopper_pearson,
    compute_difference,
    num_needed_to_see,
)
from memguard.audit.statistics.skew_normal import (
    SkewNormal,
    compute_skew_normal_logcdf,
    fit_skew_normal,
)
from memguard.audit.statistics.trend import Trend, compute_trend, fit_dose_response

__all__ = [
    "SkewNormal",
    "Trend",
    "clopper_pearson",
    "compute_auc",
    "compute_difference",
    "compute_mcnemar",
    "compute_mean",
    "compute_mean_difference",
    "compute_paired_difference",
    "compute_skew_normal_logcdf",
    "compute_tpr_at_fpr",
    "compute_trend",
    "correct_holm",
    "fit_dose_response",
    "fit_skew_normal",
    "num_needed_to_see",
]
