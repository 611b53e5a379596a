"""Results as data models. No torch.

    record.py      base class; files and folders that are written atomically
    sealed.py      hashes of files and records, checked when they are read
    manifest.py    one line per document: its planned and its actual training
    run_files.py   files of each stage of a run, and checks that they are intact
    scores.py      scores of the probes: per document, per bucket, per canary
    results.py     the results table: one row for each number, as parquet
    report_rows.py the rows of an audit's report
    audit.py       the audit report: findings, scores and all else; audits during training; variants
    audit_files.py files of an audit, and the hashes that are written last
    verdict.py     the verdict: level, sentences, counts and the test that decided
    comparison.py  the comparison: each setting's results, and paired tests

Every file that memguard writes for other programs is one of these models. A missing number is null
and is counted, never NaN or 0. A `schema` name changes when readers of the old form would be wrong.
"""

from memguard.records.audit import (
    VARIANT_LIBRARIES,
    AdapterIdentity,
    AuditReport,
    AuditResults,
    Banner,
    Budget,
    CutDocuments,
    DataIdentity,
    Finding,
    Method,
    ModelIdentity,
    ProbeRun,
    TrainingSummary,
    Variant,
    VariantBucket,
    VariantComparison,
    VariantName,
    WatchedBucket,
    WatchedStep,
)
from memguard.records.comparison import (
    Comparison,
    ComparisonCell,
    Cost,
    FrontPoint,
    MatchedShare,
    PairedCanaries,
    PairedCounts,
    PairedResult,
    Recommendation,
    SettingResult,
    Utility,
)
from memguard.records.manifest import (
    IGNORE_LABEL,
    ManifestEntry,
    Role,
    hash_plan,
    load_manifest,
    save_manifest,
)
from memguard.records.record import (
    PRIVATE_MODE,
    Record,
    atomic_folder,
    describe_unread,
    format_now,
    load_record,
    open_private,
    save_record,
    write_atomically,
)
from memguard.records.scores import (
    BLIND,
    MIN_FOR_MEANS,
    MIN_FOR_QUANTILES,
    NUM_RISK_QUERIES,
    RISK_NAMES,
    AttackCostBucket,
    AttackCostScores,
    AttackedBucket,
    BucketScores,
    CanaryScore,
    CanaryScores,
    DocumentScore,
    DoseTrend,
    ExtractedCopies,
    GeneratedTexts,
    Interval,
    MaskChange,
    Measure,
    MeasuredBucket,
    MembershipScores,
    ModelScores,
    Rate,
    RiskName,
    Texts,
)
from memguard.records.verdict import (
    LEVEL_NAMES,
    Level,
    MembershipVerdict,
    Reason,
    Verdict,
    VerdictCounts,
    VerdictTest,
)
