"""Results as data. No torch.

    record.py      records, files and folders that appear only when they are complete
    sealed.py      hashes of files and records, compared when they are read again
    manifest.py    one line a document: planned and realised
    run_files.py   what each stage of a run has written, and whether it is still that
    scores.py      what each probe found: of a document, of a bucket, of a canary
    audit.py       the report: findings, verdict and their scores; audits during training
    audit_files.py what an audit leaves, and the hashes of it that are written last
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
    hash_plan,
    load_manifest,
    save_manifest,
)
from memguard.records.record import (
    Record,
    format_now,
    load_record,
    save_record,
    write_atomically,
    written_aside,
)
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
