"""Records as a real study leaves them, made up: for tests of pages and cards."""

import math
from typing import Any

from scipy.stats import beta

from memguard import records as r
from memguard.compare.front import mark_dominated, recommend


def make_rate(matched: int, documents: int) -> r.Rate:
    if documents == 0:
        return r.Rate(num_documents=0, num_matched=0, rate=None, ci=None)
    low = 0.0 if matched == 0 else float(beta.ppf(0.025, matched, documents - matched + 1))
    high = 1.0 if matched == documents else float(beta.ppf(0.975, matched + 1, documents - matched))
    return r.Rate(
        num_documents=documents,
        num_matched=matched,
        rate=matched / documents,
        ci=(low, high) if documents > 1 else None,
    )


def make_interval(value: float, half: float, low: float = 0.0, high: float = 1.0) -> r.Interval:
    return r.Interval(value=value, ci=(max(low, value - half), min(high, value + half)))


def count_known(near: int, documents: int) -> int:
    """Return how many have 90 % of the tokens right teacher-forced: more than are generated."""
    return min(documents, near + 3) if near else 0


def make_scores(verbatim: int, near: int, documents: int, accuracy: float) -> r.ModelScores:
    return r.ModelScores(
        verbatim=make_rate(verbatim, documents),
        near_verbatim=make_rate(near, documents),
        teacher_forced_90=make_rate(count_known(near, documents), documents),
        mean_token_accuracy=make_interval(accuracy, 0.03),
        median_first_divergence=round(50 * accuracy**2, 1),
        mean_logprob=make_interval(math.log(max(accuracy, 0.02)) * 1.7, 0.11, -20, 0),
    )


def make_bucket(
    repetitions: int, verbatim: int, near: int, accuracy: float, documents: int = 40
) -> r.BucketScores:
    control = repetitions == 0
    model, base = make_scores(verbatim, near, documents, accuracy), make_scores(0, 0, 40, 0.137)
    return r.BucketScores(
        bucket="control" if control else f"r{repetitions}",
        role="control" if control else "trained",
        num_repetitions=repetitions,
        num_documents=documents,
        num_too_short=3 if control else 0,
        num_not_sampled=0,
        model=model,
        base=base,
        mean_extraction_strength=round(accuracy**3, 3),
        mean_type_token_ratio=0.713,
        mean_argmax_type_token_ratio=0.655,
        num_tiny_margin=1 if repetitions == 16 else 0,
        risks=list_risks(model),
        base_risks=list_risks(base),
        minus_control={}
        if control
        else {
            "verbatim": make_interval(verbatim / documents, 0.09, -1, 1),
            "near_verbatim": make_interval(near / documents, 0.091, -1, 1),
        },
    )


def list_risks(scores: r.ModelScores, **others: r.Rate) -> dict[str, r.Rate]:
    """Return the rates of extraction that an audit without attacks has, and ``others``."""
    greedy = {"verbatim": scores.verbatim, "near_verbatim": scores.near_verbatim}
    return {**{name: rate for name, rate in greedy.items() if rate is not None}, **others}


def make_generated(reason: str | None = None) -> r.GeneratedTexts:
    """Return what is told of 160 documents, 57 of which are verbatim, or of none."""
    known = reason is None
    return r.GeneratedTexts(
        reason_not_generated=reason,
        num_verbatim=57 * known,
        num_generated=44 * known,
        floor=0.5,
        num_below_floor=79 * known,
        num_checked=20 * known,
        num_matched_below_floor=0,
    )


def drop_near_verbatim(report: r.AuditReport) -> r.AuditReport:
    """Return the report of an audit that generated nothing."""

    def change(scores: r.ModelScores | None) -> r.ModelScores | None:
        return scores and scores.model_copy(update={"near_verbatim": None})

    def keep(values: dict[str, object]) -> dict[str, object]:
        return {name: value for name, value in values.items() if name != "near_verbatim"}

    buckets = [
        bucket.model_copy(
            update={
                "model": change(bucket.model),
                "base": change(bucket.base),
                "risks": keep(bucket.risks),
                "base_risks": keep(bucket.base_risks),
                "minus_control": keep(bucket.minus_control),
            }
        )
        for bucket in report.buckets
    ]
    generated = make_generated("the key-value cache of one document needs more memory than is free")
    return report.model_copy(
        update={
            "buckets": buckets,
            "generated": generated,
            "base_generated": generated,
            "measures": [one for one in report.measures if one.metric != "near_verbatim"],
            "trends": [one for one in report.trends if one.metric != "near_verbatim"],
            "verdict": report.verdict.model_copy(update={"metric": "verbatim"}),
        }
    )


def make_probe_run(name: str, documents: int | None, counted: Any = "documents") -> r.ProbeRun:
    """Return a probe that ran on so many documents; None: it did not."""
    reason = None if documents else "there was nothing to run it on"
    return r.ProbeRun(
        name=name, version=1, num_documents=documents, counted=counted, reason_not_run=reason
    )


def make_counts(matched: int, documents: int, copies: int = 0) -> r.VerdictCounts:
    """Return counts of documents; ``copies`` of them are copies of an extracted one."""
    rate = make_rate(matched - copies, documents - copies)
    return r.VerdictCounts(
        num_documents=documents,
        num_matched=matched,
        num_clusters=documents - copies,
        num_matched_clusters=matched - copies,
        rate=matched / documents if documents else None,
        ci=rate.ci,
    )


def make_verdict(**changes: Any) -> r.Verdict:
    """Return the verdict of 40 documents, all extracted, against 40 unseen ones."""
    trained, control = make_counts(40, 40), make_counts(0, 40)
    values: dict[str, Any] = {
        "level": "memorized",
        "reason": "control",
        "sentence": "40 of 40 documents trained 64 times were extracted, 0 of 40 unseen ones: the "
        "model memorized training text.",
        "scope": "Audited: 120 of 120 trained documents; none was attacked.",
        "membership": r.MembershipVerdict(
            level="told-apart",
            sentence="Whether a document was trained can be told: AUC 0.93 (95 % CI 0.89–0.98; 0.5 "
            "is chance).",
            score="loss_minus_base",
            auc=make_interval(0.934, 0.041),
            num_members=120,
            num_nonmembers=40,
        ),
        "trained": trained,
        "control": control,
        "base": make_counts(0, 40),
        "test": r.VerdictTest(
            documents="bucket",
            bucket="r64",
            trained=trained,
            control=control,
            p_value=1e-12,
            level=0.01 / 3,
        ),
        "bucket": "r64",
        "metric": "near_verbatim",
    }
    return r.Verdict(**{**values, **changes})


def make_green(**changes: Any) -> r.Verdict:
    """Return the verdict of 40 documents of which none was extracted, without membership."""
    values: dict[str, Any] = {
        "level": "none-found",
        "reason": None,
        "sentence": "None of the 40 training documents was extracted (true share up to 8.8 %).",
        "membership": r.MembershipVerdict(
            level="not-seen",
            sentence="The model gave no sign of whether a document was trained: AUC 0.51 (95 % CI "
            "0.42–0.60; 0.5 is chance).",
            score="loss",
            auc=make_interval(0.51, 0.09),
            num_members=40,
            num_nonmembers=40,
        ),
        "trained": make_counts(0, 40),
        "test": None,
        "bucket": "r4",
    }
    return make_verdict(**{**values, **changes})


def make_finding(number: int) -> r.Finding:
    right = 50 - number % 6
    return r.Finding(
        id=f"pydoc:topics/entry-{number:04d}",
        bucket="r64",
        num_repetitions=64,
        severity="high" if number < 9 else "medium" if number < 24 else "low",
        sentence="50 tokens (about 35 words) exactly"
        if right == 50
        else f"50 tokens (about 35 words) with {50 - right} edits",
        num_correct=right,
        continuation_tokens=50,
        first_divergence=50 if right == 50 else 31,
        base_num_correct=7,
        text_hmac=f"{number:04x}" + "9f3ac1d2" * 7 + "beef",
    )


def make_report(goldfish: bool = False) -> r.AuditReport:
    rows = (
        [(0, 0, 0, 0.192), (4, 0, 0, 0.31), (16, 0, 0, 0.552), (64, 0, 6, 0.823)]
        if goldfish
        else [(0, 0, 0, 0.203), (4, 0, 1, 0.394), (16, 17, 25, 0.861), (64, 40, 40, 1.0)]
    )
    near = rows[-1][2]
    return r.AuditReport(
        tool_version="0.1.0",
        created="2026-11-20T14:03:07Z",
        run="quickstart-k4" if goldfish else "quickstart-plain",
        model=r.ModelIdentity(
            name="quickstart-k4" if goldfish else "quickstart-plain",
            weights_sha256="4be1f7d09c35" + "a7" * 26,
            num_parameters=1_053_440,
            base="quickstart-base",
            base_weights_sha256="e39b77aa1204" + "c1" * 26,
        ),
        data=r.DataIdentity(
            sources=["docstrings:json,argparse,torch", "pydoc_data.topics"],
            documents_sha256="9d77c02b6e18" + "5f" * 26,
            num_documents=163,
            num_clusters=158,
            overlap_with_control=make_rate(1, 43),
            near_duplicate_words=13,
        ),
        training=r.TrainingSummary(
            num_steps=420,
            num_supervised_tokens=641_772 if goldfish else 853_440,
            dropped_fraction=0.248 if goldfish else 0.0,
            mitigations=[{"name": "goldfish", "k": 4, "context_width": 13, "mode": "hash"}]
            if goldfish
            else [],
            train_s=52.4,
            heldout_nll=4.581 if goldfish else 4.372,
            base_heldout_nll=5.012,
            heldout_bucket="heldout",
            heldout_num_documents=64,
            heldout_num_tokens=8192,
        ),
        method=r.Method(
            suite="extraction",
            suite_version=1,
            probes=[
                {"name": "extraction", "decoding": "greedy", "continuation_tokens": 50},
                {"name": "membership", "scores": ["mean_logprob", "min_k"]},
            ],
            continuation_tokens=50,
            prefix_tokens=None,
            max_edit_share=0.1,
            tiny_margin=0.001,
            dtype="fp32",
            batch_tokens=16384,
            seed=0,
            command="memguard audit runs/quickstart/k4 --suite extraction",
            wall_s=7.31,
        ),
        probe_runs=[make_probe_run("extraction", 160), make_probe_run("membership", 160)],
        verdict=make_verdict(
            sentence=f"{near} of 40 documents trained 64 times were extracted, 0 of 40 unseen "
            "ones: the model memorized training text.",
            trained=make_counts(near, 40),
        ),
        banners=[
            r.Banner(
                level="note",
                text="1 of 43 control documents shares a run of 13 words with a trained one.",
            )
        ],
        buckets=[make_bucket(*row) for row in rows],
        generated=make_generated(),
        base_generated=make_generated(),
        dose_response=True,
        membership=[
            r.MembershipScores(
                score="mean log-probability",
                num_members=120,
                num_nonmembers=40,
                auc=make_interval(0.934, 0.041),
            ),
            r.MembershipScores(
                score="min-k 20 %",
                num_members=120,
                num_nonmembers=40,
                auc=make_interval(0.957, 0.033),
            ),
        ],
        findings=[make_finding(number) for number in range(31)],
        num_findings=31,
        environment={
            "python": "3.11.2",
            "torch": "2.13.0",
            "transformers": "5.23.0",
            "platform": "Linux x86_64",
            "device": "cpu, 2 threads",
        },
    )


def make_share(matched: int, documents: int) -> r.MatchedShare:
    rate = make_rate(matched, documents)
    return r.MatchedShare(num_matched=matched, rate=rate.rate, ci=rate.ci)


def make_cell(verbatim: int, near: int, accuracy: float, documents: int = 40) -> r.ComparisonCell:
    rate = make_rate(verbatim, documents)
    return r.ComparisonCell(
        num_documents=documents,
        num_matched=verbatim,
        rate=rate.rate,
        ci=rate.ci,
        near_verbatim=make_share(near, documents),
        teacher_forced_90=make_share(count_known(near, documents), documents),
        mean_token_accuracy=accuracy,
    )


def make_setting(
    name: str, k: int | None, nll: float, rows: list[tuple[int, int, int, float]], seed: int = 0
) -> r.SettingResult:
    return r.SettingResult(
        name=name,
        seed=seed,
        run=f"{name}-seed{seed}",
        verdict=make_verdict() if max(near for *_, near, _ in rows) > 8 else make_green(),
        mitigations=[{"name": "goldfish", "k": k, "context_width": 13, "mode": "hash"}]
        if k
        else [],
        overrides={},
        utility=r.Utility(
            heldout_nll=nll, base_heldout_nll=5.012, num_documents=64, num_tokens=8192
        ),
        extraction={
            str(repetitions): make_cell(verbatim, near, accuracy)
            for repetitions, verbatim, near, accuracy in rows
        },
        cost=r.Cost(
            train_s=52.4 + (k or 0),
            num_steps=420,
            num_supervised_tokens=round(853_440 * (1 - 1 / k)) if k else 853_440,
            dropped_fraction=1 / k - 0.0017 if k else 0.0,
        ),
    )


def make_pair(setting: r.SettingResult, first: r.SettingResult, repetitions: int) -> r.PairedResult:
    mine, other = (one.extraction[str(repetitions)] for one in (setting, first))
    lost = (other.mean_token_accuracy or 0) - (mine.mean_token_accuracy or 0)

    def count(matched: int, against: int) -> r.PairedCounts:
        p_value = min(1.0, 2 * 0.5 ** (against - matched))
        return r.PairedCounts(
            num_only_against=against - matched,
            num_only_setting=0,
            p_value=p_value,
            p_holm=min(1.0, 12 * p_value),
        )

    return r.PairedResult(
        setting=setting.name,
        against=first.name,
        seed=setting.seed,
        num_repetitions=repetitions,
        num_documents=40,
        verbatim=count(mine.num_matched, other.num_matched),
        near_verbatim=None
        if mine.near_verbatim is None or other.near_verbatim is None
        else count(mine.near_verbatim.num_matched, other.near_verbatim.num_matched),
        token_accuracy_difference=make_interval(-lost, 0.021, -1, 1),
    )


def make_front(settings: list[r.SettingResult]) -> list[r.FrontPoint]:
    """Return what `memguard compare` makes of runs, with rough intervals over seeds."""
    points = []
    reference = math.fsum(s.utility.heldout_nll for s in settings if s.name == settings[0].name)
    for name in dict.fromkeys(setting.name for setting in settings):
        runs = [setting for setting in settings if setting.name == name]
        cells = [run.extraction[max(run.extraction, key=int)] for run in runs]
        documents = sum(cell.num_documents for cell in cells)
        verbatim = make_rate(sum(cell.num_matched for cell in cells), documents)
        found = [cell.near_verbatim for cell in cells if cell.near_verbatim]
        generated = len(found) == len(cells)
        near = make_rate(sum(one.num_matched for one in found), documents) if generated else None
        shares = {"verbatim": verbatim, "near_verbatim": near}
        risks = {
            risk: r.Interval(value=rate.rate, ci=rate.ci)
            for risk, rate in shares.items()
            if rate is not None and rate.rate is not None
        }
        worst = max(risks, key=lambda risk: risks[risk].value)
        utility = math.fsum(run.utility.heldout_nll for run in runs) / len(runs)
        points.append(
            r.FrontPoint(
                name=name,
                num_seeds=len(runs),
                num_documents=documents,
                levels={"memorized" if risks[worst].value > 0.2 else "none-found": len(runs)},
                num_told_apart=0,
                risk=risks[worst].value,
                risk_ci=risks[worst].ci,
                risk_by=worst,
                risks=risks,
                utility=utility,
                utility_ci=(utility - 0.03, utility + 0.03) if len(runs) > 1 else None,
                utility_by_seed={run.seed: run.utility.heldout_nll for run in runs},
                utility_change=make_interval(utility * len(runs) / reference - 1, 0.006, -1)
                if points and len(runs) > 1
                else None,
            )
        )
    return mark_dominated(points)


def make_sweep(num_settings: int = 12, num_seeds: int = 3) -> r.Comparison:
    """Return a sweep as large as they come: every goldfish, some of them beaten by others."""
    comparison = make_comparison()
    settings = []
    for number in range(num_settings):
        near = max(0, 40 - 9 * number) if number % 4 else min(40, 44 - 3 * number)
        nll = 4.372 + 0.031 * number + (0.11 if number % 3 == 2 else 0.0)
        name = "plain" if number == 0 else f"goldfish-k{34 - number}-h13-lr{number % 3}"
        for seed in range(num_seeds):
            found = max(0, near - seed)
            accuracy = 0.35 + 0.65 * found / 40
            rows = [(0, 0, 0, 0.19), (4, 0, 0, 0.3), (16, found // 3, found // 2, 0.5)]
            rows.append((64, 2 * found // 3 if number else found, found, accuracy))
            settings.append(make_setting(name, 34 - number, nll + seed / 70, rows, seed))
    front = make_front(settings)
    paired = [make_pair(s, settings[s.seed], 64) for s in settings if s.name != "plain"]
    update = {"settings": settings, "front": front, "paired": paired}
    return comparison.model_copy(update={**update, "recommendation": recommend(front)})


def make_comparison(num_seeds: int = 1) -> r.Comparison:
    plain = [(0, 0, 0, 0.203), (4, 0, 1, 0.394), (16, 17, 25, 0.861), (64, 40, 40, 1.0)]
    four = [(0, 0, 0, 0.192), (4, 0, 0, 0.31), (16, 0, 0, 0.552), (64, 0, 6, 0.823)]
    two = [(0, 0, 0, 0.181), (4, 0, 0, 0.262), (16, 0, 0, 0.443), (64, 0, 0, 0.621)]
    settings = [
        setting
        for seed in range(num_seeds)
        for setting in (
            make_setting("plain", None, 4.372 + seed / 100, plain, seed),
            make_setting("goldfish-k4", 4, 4.581 + seed / 90, four, seed),
            make_setting("goldfish-k2", 2, 4.853 + seed / 80, two, seed),
        )
    ]
    paired = [
        make_pair(setting, next(s for s in settings if s.seed == setting.seed), repetitions)
        for setting in settings
        if setting.name != "plain"
        for repetitions in (4, 16, 64)
    ]
    front = make_front(settings)
    base = [(0, 0, 0, 0.139), (4, 0, 0, 0.142), (16, 0, 0, 0.135), (64, 0, 0, 0.147)]
    return r.Comparison(
        name="quickstart",
        tool_version="0.1.0",
        command="memguard compare configs/quickstart.yaml",
        documents_sha256="9d77c02b6e18" + "5f" * 26,
        continuation_tokens=50,
        settings=settings,
        base_extraction={
            str(repetitions): make_cell(verbatim, near, accuracy)
            for repetitions, verbatim, near, accuracy in base
        },
        paired=paired,
        front=front,
        recommendation=recommend(front),
        environment={"python": "3.11.2", "torch": "2.13.0", "device": "cpu, 2 threads"},
    )
