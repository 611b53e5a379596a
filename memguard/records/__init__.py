"""Results as data models. No torch.

    record.py      base class; files and folders that are written atomically
    sealed.py      hashes of files and records, checked when they are read
    manifest.py    one line per document: its planned and its actual training
    compile_choice.py  whether a run's blocks are compiled, and why
    run_files.py   files of each stage of a run, and checks that they are intact
    scores.py      estimates with their intervals; names of the extraction risks
    row_files.py   rows of a dataclass as a parquet file
    results.py     the results table: one row for each number, as parquet
    tables.py      the five tables of a report: results, metrics, buckets, tests, details
    audit.py       the audit report: header and tables; audits during training
    canaries.py    scores of canaries, which only the owner of an audit can read
    utility.py     benchmark tasks: their values, and the scores of their items for the owner
    audit_files.py files of an audit, and the hashes that are written last
    documents.py   the documents of an audit: their columns, answers and findings
    gate.py        the result of a policy: what it asked, what was answered, by which counts
    diff.py        what became of each finding between two audits
    local_paths.py absolute paths, shortened because records are handed on
    percent.py     shares as percentages, in sentences
    verdict.py     the verdict: level, sentences, counts and the test that decided
    comparison.py  the comparison: its runs, the recommendation, and tables

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
    LoadAs,
    Method,
    ModelIdentity,
    ProbeRun,
    TrainingSummary,
    WatchedLine,
    WatchedStep,
)
from memguard.records.canaries import CanaryScore, load_canaries, save_canaries
from memguard.records.comparison import (
    ComparedRun,
    ComparedTask,
    Comparison,
    Cost,
    FrontPoint,
    Recommendation,
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
from memguard.records.results import (
    MEMBERS,
    MOST_TRAINED,
    NO_DOCUMENTS,
    ONE_TEXT,
    REFERENCE_SECRETS,
    SECRETS,
    TRAINED,
    ResultRow,
    fill_count,
    fill_row,
    write_parameters,
)
from memguard.records.scores import (
    BLIND,
    MIN_FOR_MEANS,
    MIN_FOR_QUANTILES,
    NUM_RISK_QUERIES,
    RISK_NAMES,
    Interval,
    Rate,
    RiskName,
    RocCurve,
    Texts,
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
    Level,
    MembershipVerdict,
    Reason,
    Verdict,
    VerdictCounts,
    VerdictTest,
)
