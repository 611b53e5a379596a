"""Results as data models. No torch.

    record.py      base class; files and folders that are written atomically
    sealed.py      hashes of files and records, checked when they are read
    run_files.py   the manifest and the records of each stage of a run
    audit_files.py files of an audit, and the hashes that are written last
    folders.py     the sealed files of each stage, and which of them are damaged
    row_files.py   rows of a dataclass as a parquet file, such as the scores of canaries
    results.py     the results table: one row for each number, as parquet; estimates and intervals
    tables.py      the five tables of a report: results, metrics, buckets, tests, details
    audit.py       the audit report: header and tables; audits during training
    documents.py   the documents of an audit: their columns, answers and findings
    utility.py     benchmark tasks: their values, and the scores of their items for the owner
    verdict.py     the verdict: level, sentences, counts and the test that decided
    gate.py        the result of a policy: what it asked, what was answered, by which counts
    comparison.py  the comparison: its runs, the recommendation, and tables
    texts.py       percentages in sentences, and paths, which are shortened

Every file that memguard writes for other programs is one of these models. A missing number is null
and is counted, never NaN or 0. A `schema` name changes when readers of the old form would be wrong.
"""

from memguard.records.audit import (
    QUANTISING_LIBRARIES,
    AdapterIdentity,
    AuditReport,
    AuditResults,
    Banner,
    Budget,
    CutDocuments,
    DataIdentity,
    Finding,
    KeptBy,
    LoadAs,
    LossCurve,
    LossPoint,
    Method,
    ModelIdentity,
    ProbeRun,
    StartLine,
    TrainingSummary,
    WatchedLine,
)
from memguard.records.comparison import (
    ComparedRun,
    ComparedTask,
    Comparison,
    Cost,
    FrontPoint,
    Recommendation,
    Utility,
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
from memguard.records.results import (
    BLIND,
    MEMBERS,
    MIN_FOR_MEANS,
    MIN_FOR_QUANTILES,
    MOST_TRAINED,
    NO_DOCUMENTS,
    ONE_TEXT,
    REFERENCE_SECRETS,
    RISK_NAMES,
    SECRETS,
    TRAINED,
    WITHIN_LIMIT,
    Interval,
    Rate,
    ResultRow,
    RiskName,
    RocCurve,
    Texts,
    fill_count,
    fill_row,
    write_parameters,
)
from memguard.records.row_files import CanaryScore, load_canaries, save_canaries
from memguard.records.run_files import (
    IGNORE_LABEL,
    ManifestEntry,
    Role,
    hash_plan,
    load_manifest,
    save_manifest,
)
from memguard.records.tables import (
    RISK_PLACES,
    BucketRow,
    DetailRow,
    MetricRow,
    Tables,
    TestRow,
    merge_tables,
)
from memguard.records.verdict import (
    LEVEL_NAMES,
    Badge,
    Level,
    MembershipVerdict,
    Reason,
    Verdict,
    VerdictCounts,
    VerdictTest,
)
