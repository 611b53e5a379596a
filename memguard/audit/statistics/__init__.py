"""Statistics over documents, with their limitations. No torch.

    intervals.py    rates and means with their intervals, by exact methods and a jackknife
    tests.py        tests against the control, paired, trend and multiple tests
    ranking.py      members above nonmembers: AUC, and TPR at a fixed FPR
    skew_normal.py  a fitted distribution with a finite log-probability in the far left tail

Every interval is a 95 % interval. There is none below two documents, and an estimate at the edge of
its range (0 of n, AUC 1, all values equal) never has an interval of zero width. Quantities that
cannot be estimated are None.
"""

from memguard.audit.statistics.intervals import (
    clopper_pearson,
    compute_difference,
    compute_mean,
    compute_mean_difference,
    num_needed_to_see,
)
from memguard.audit.statistics.ranking import compute_auc, compute_tpr_at_fpr
from memguard.audit.statistics.skew_normal import (
    SkewNormal,
    compute_skew_normal_logcdf,
    fit_skew_normal,
)
from memguard.audit.statistics.tests import (
    compute_mcnemar,
    compute_p_above_control,
    compute_paired_difference,
    compute_trend,
    correct_holm,
    fit_dose_response,
)
