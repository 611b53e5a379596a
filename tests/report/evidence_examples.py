"""Reports and comparisons with everything a full suite finds, made up: for tests of pages."""

import math

import report_examples as examples
from measure_examples import make_all_measures

from memguard import records as r

COSTS = {"control": None, "r4": 31.4, "r16": 5.13, "r64": 1.6}
"""log10 of the median document's queries; the control's median is never drawn."""
FOUND = {
    "sampling": {"r16": (1, 3), "r64": (4, 9)},
    "beam": {"r16": (2, 6), "r64": (6, 14)},
    "fill": {"r4": (0, 1), "r16": (11, 19), "r64": (24, 38)},
}
"""Documents by attack and bucket: of which the first answer was right, of which any."""
NOTES = {"fill": "Knows which tokens the mitigation drops, not what they are."}


def make_cost(median: float | None, documents: int = 40) -> r.AttackCostScores:
    never = 0 if median is not None else 25
    within = {
        bound: examples.make_rate(
            0 if median is None else max(0, min(40, round(20 + 9 * (math.log10(bound) - median)))),
            documents,
        )
        for bound in (1, 10, 1_000, 1_000_000)
    }
    return r.AttackCostScores(
        num_documents=documents,
        num_never=never,
        quantile_10=52 if median is None else max(1, math.ceil(median - 1.7)),
        median=None if median is None else math.ceil(median),
        quantile_90=None if median is None else math.ceil(median + 3.3),
        within=within,
    )


def make_attacked(bucket: str, attack: str) -> r.AttackedBucket:
    first, any_answer = FOUND[attack].get(bucket, (0, 0))
    return r.AttackedBucket(
        bucket=bucket,
        attack=attack,
        num_queries=16,
        best_verbatim=examples.make_rate(first, 40),
        any_verbatim=examples.make_rate(any_answer, 40),
        mean_token_accuracy=examples.make_interval(0.3 + first / 60, 0.05),
        note=NOTES.get(attack, ""),
    )


def make_membership() -> list[r.MembershipScores]:
    def make(score: str, auc: float, definition: str, missing: int = 0) -> r.MembershipScores:
        return r.MembershipScores(
            score=score,
            num_members=120 - missing,
            num_nonmembers=40,
            auc=examples.make_interval(auc, 0.05),
            definition=definition,
            tpr_at_fpr={
                "0.001": None,
                "0.01": None,
                "0.1": examples.make_rate(round(100 * auc) - missing, 120 - missing),
            },
            num_missing=missing,
        )

    unasked = r.MembershipScores(
        score="reference", num_members=0, num_nonmembers=0, auc=None, num_missing=160
    )
    return [
        make("loss", 0.884, "Mean log-probability of a token (Yeom et al. 2018)."),
        make("min_k_plus_plus", 0.921, "Min-K% standardised (Zhang et al. 2024)."),
        make("loss_minus_base", 0.957, "Loss, minus that of the model before training."),
        make("recall", 0.791, "Log-likelihood after an untrained text / without it.", 4),
        unasked,
        make("blind", 0.53, "Bag of words, cross-fitted: never asks the model."),
    ]


def make_canary(number: int, trained: bool) -> r.CanaryScore:
    rank = number // 2 + 1
    bits = math.log2(15) - math.log2(min(rank, 15))
    return r.CanaryScore(
        id=f"canary-{number:04d}",
        was_trained=trained,
        nll=4.25 + number if trained else 27.0 + number / 10,
        base_nll=28.0 + number / 10,
        num_secret_tokens=12,
        num_repetitions=64 if trained else 0,
        num_loss_tokens=9 if trained else 0,
        exposure_bits=bits if trained else None,
        exposure_extrapolated_bits=2.5 * bits if trained else None,
        verbatim=trained and number < 3,
    )


def make_canaries(epsilon: float | None = 1.496) -> r.CanaryScores:
    canaries = [make_canary(number, number < 17) for number in range(32)]
    bits = sorted(one.exposure_bits for one in canaries if one.exposure_bits is not None)
    return r.CanaryScores(
        num_trained=17,
        num_references=15,
        num_ranked=32,
        num_ranked_references=15,
        num_repetitions=64,
        verbatim=examples.make_rate(3, 17),
        reference_verbatim=examples.make_rate(0, 15),
        loss_coverage=0.75,
        num_without_loss=0,
        median_exposure_bits=bits[8],
        max_exposure_bits=bits[-1],
        median_exposure_extrapolated_bits=2.5 * bits[8],
        max_exposure_extrapolated_bits=2.5 * bits[-1],
        num_guesses=24,
        num_right=23,
        epsilon_lower_bound=epsilon,
        epsilon_ceiling=None if epsilon is None else 2.017,
        delta=1e-5,
        assumptions=[
            "Each canary was trained or left out by its own fair coin.",
            "One training run was audited; another may leak more or less.",
        ],
        canaries=canaries,
    )


def make_mask_changes() -> list[r.MaskChange]:
    rows = [
        ("leading_space", 40, 3, 0.011),
        ("lower_case", 39, 39, 0.518),
        ("curly_quotes", 0, 0, None),
        ("near-duplicates", 5, 2, 0.072),
    ]
    return [
        r.MaskChange(
            rewriting=name, num_passages=passages, num_changed=changed, mean_leaked_share=share
        )
        for name, passages, changed, share in rows
    ]


def make_full_report(goldfish: bool = True) -> r.AuditReport:
    """Return a report with every kind of evidence."""
    report = examples.make_report(goldfish)
    names = [bucket.bucket for bucket in report.buckets]
    doses = [bucket.num_repetitions or 0 for bucket in report.buckets]
    probes = [
        {"name": "extraction", "version": 1, "continuation_tokens": 50, "prefix_tokens": None},
        {"name": "grid", "version": 1, "offsets": [0, 64]},
        {
            "name": "sampling",
            "version": 1,
            "schemes": [{"temperature": 1.0, "top_k": None}, {"temperature": 1.0, "top_k": 40}],
        },
        {"name": "membership", "version": 2},
        {"name": "canaries", "version": 1, "delta": 1e-05},
        {"name": "generation", "version": 1},
        {"name": "attacks", "version": 1, "width": 16},
        {"name": "mask_consistency", "version": 1},
    ]
    return report.model_copy(
        update={
            "method": report.method.model_copy(update={"suite": "full", "probes": probes}),
            "probe_runs": [
                *(examples.make_probe_run(n, 160) for n in ("extraction", "grid", "sampling")),
                examples.make_probe_run("membership", 160),
                examples.make_probe_run("canaries", 32, "canaries"),
                *(examples.make_probe_run(n, 80) for n in ("generation", "attacks")),
                examples.make_probe_run("mask_consistency", 40, "texts"),
            ],
            "membership": make_membership(),
            "measures": make_all_measures(names),
            "attack_cost": [
                r.AttackCostBucket(bucket=n, model=make_cost(COSTS[n]), base=make_cost(None))
                for n in names
            ],
            "attacks": [make_attacked(name, attack) for name in names for attack in FOUND],
            "extracted_copies": [
                r.ExtractedCopies(k=k, num_documents=n, num_extracted=m)
                for k, n, m in ((1, 104, 3), (2, 112, 5), (5, 120, 7), (10, 120, 7))
            ],
            "canaries": make_canaries(),
            "mask_changes": make_mask_changes(),
            "trends": [
                r.DoseTrend(metric="verbatim", doses=doses, fitted=[0.0] * 4, z=None, p_value=None),
                r.DoseTrend(
                    metric="near_verbatim",
                    doses=doses,
                    fitted=[0.0, 0.0, 0.0, 0.15],
                    z=3.912,
                    p_value=0.00009,
                ),
            ],
        }
    )


def make_full_comparison(num_seeds: int = 1) -> r.Comparison:
    """Return a comparison whose runs were attacked."""
    comparison = examples.make_comparison(num_seeds)
    harder = {"plain": 0.0, "goldfish-k4": 3.2, "goldfish-k2": 9.7}

    def change(setting: r.SettingResult) -> r.SettingResult:
        more = harder[setting.name] + setting.seed / 10
        cells = {
            dose: cell.model_copy(
                update={
                    "attack_cost": make_cost(None if dose == "0" else 40 / int(dose) + more),
                    "attacks": [
                        make_attacked("control" if dose == "0" else f"r{dose}", attack)
                        for attack in FOUND
                    ],
                }
            )
            for dose, cell in setting.extraction.items()
        }
        return setting.model_copy(update={"extraction": cells, "membership": make_membership()})

    base = {
        dose: cell.model_copy(update={"attack_cost": make_cost(None)})
        for dose, cell in comparison.base_extraction.items()
    }
    return comparison.model_copy(
        update={
            "settings": [change(setting) for setting in comparison.settings],
            "base_extraction": base,
        }
    )
