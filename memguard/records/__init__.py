"""Results as data. No torch.

    writing.py     files and folders that appear only when they are complete
    record.py      what every record is, and how it is written and read back
    manifest.py    one line a document: planned and realised
    scores.py      what each probe found: of a document, of a bucket, of a canary
    audit.py       the report: findings, verdict and their scores; audits during training
    comparison.py  settings side by side, and paired

Everything memguard writes for others to read is one of these models; a missing number is null and
counted, never NaN and never 0. `schema` names change when a reader of the old form would be wrong.
"""

from memguard.records.audit import (
    AuditReport,
    Banner,
    Budget,
    CutDocuments,
    DataIdentity,
    Finding,
    Method,
    ModelIdentity,
    ProbeRun,
    TrainingSummary,
    Verdict,
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
    load_manifest,
    save_manifest,
)
from memguard.records.record import Record, load_record, save_record
from memguard.records.scores import (
    BLIND,
    NUM_RISK_QUERIES,
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
)
from memguard.records.writing import write_atomically, written_aside

__all__ = [
    "BLIND",
    "IGNORE_LABEL",
    "NUM_RISK_QUERIES",
    "AttackCostBucket",
    "AttackCostScores",
    "AttackedBucket",
    "AuditReport",
    "Banner",
    "BucketScores",
    "Budget",
    "CanaryScore",
    "CanaryScores",
    "Comparison",
    "ComparisonCell",
    "Cost",
    "CutDocuments",
    "DataIdentity",
    "DocumentScore",
    "DoseTrend",
    "ExtractedCopies",
    "Finding",
    "FrontPoint",
    "GeneratedTexts",
    "Interval",
    "ManifestEntry",
    "MaskChange",
    "MatchedShare",
    "Measure",
    "MeasuredBucket",
    "MembershipScores",
    "Method",
    "ModelIdentity",
    "ModelScores",
    "PairedCanaries",
    "PairedCounts",
    "PairedResult",
    "ProbeRun",
    "Rate",
    "Recommendation",
    "Record",
    "RiskName",
    "Role",
    "SettingResult",
    "TrainingSummary",
    "Utility",
    "Verdict",
    "WatchedBucket",
    "WatchedStep",
    "load_manifest",
    "load_record",
    "save_manifest",
    "save_record",
    "write_atomically",
    "written_aside",
]
