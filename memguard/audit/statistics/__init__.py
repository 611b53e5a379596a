"""Statistics over documents, with their limitations. No torch.

    rates.py        shares of documents, their differences, with intervals; effective numbers
    means.py        means over documents, and their differences, with intervals
    tests.py        tests against the control, paired, trend and multiple tests
    blind.py        members told from nonmembers by their words alone
    ranking.py      members above nonmembers: AUC, TPR at a fixed FPR, ROC

Every interval is a 95 % interval that contains its estimate and does not leave its range. There is
none below two texts, and an estimate at the edge of its range (0 of n, AUC 1, all values equal)
never has an interval of zero width. Near-duplicates are less evidence than different texts.
Quantities that cannot be estimated are None. `scripts/check_intervals.py` measures coverage.
"""

from memguard.audit.statistics.means import (
    compute_mean,
    compute_mean_difference,
    compute_paired_difference,
    find_difference_bounds,
)
from memguard.audit.statistics.ranking import compute_auc, compute_tpr_at_fpr, trace_roc
from memguard.audit.statistics.rates import (
    clopper_pearson,
    compute_difference,
    compute_exact_interval,
    compute_paired_interval,
    compute_paired_rates,
    compute_rate,
    num_needed_to_see,
    subtract,
)
from memguard.audit.statistics.tests import (
    compute_mcnemar,
    compute_p_above_control,
    compute_trend,
    correct_holm,
    fit_dose_response,
)
