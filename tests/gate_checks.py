"""A second implementation of the gate on rates: SciPy's beta, from results.parquet and clusters."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
from scipy.stats import beta

from memguard.gate.gaps import load_audited
from memguard.gate.judge import judge_audit
from memguard.gate.policy import read_policy

LIMITS = (0.01, 0.1, 0.15, 0.5)
CODES = {"fail": 10, "cannot-be-judged": 12, "inconclusive": 11, "pass": 0}
_MOST = 20_000


def expect(
    matched: int, documents: int, limit: float, effective: float | None = None
) -> tuple[int, int | None]:
    """Return the exit code and the number of documents that would decide.

    Args:
        matched: documents of a rate.
        documents: all of them.
        limit: largest rate that passes.
        effective: effective number of documents; None: all.
    """
    share = 1.0 if effective is None else effective / documents

    def compute_high(counted: np.ndarray, number: np.ndarray) -> np.ndarray:
        ends = beta.ppf(0.975, counted * share + 1, (number - counted) * share)
        return np.where(counted == number, 1.0, ends)

    def compute_low(counted: np.ndarray, number: np.ndarray) -> np.ndarray:
        ends = beta.ppf(0.025, counted * share, (number - counted) * share + 1)
        return np.where(counted == 0, 0.0, ends)

    now = np.array([matched]), np.array([documents])
    if compute_high(*now)[0] <= limit:
        return 0, None
    if compute_low(*now)[0] > limit:
        return 10, None
    if math.isclose(matched, limit * documents):
        return 11, None
    number_M = np.arange(documents, _MOST)
    if matched < limit * documents:
        decided_M = compute_high(-(-matched * number_M // documents), number_M) <= limit
    else:
        decided_M = compute_low(matched * number_M // documents, number_M) > limit
    found = number_M[decided_M]
    return 11, int(found[0]) if len(found) else None


def check_rates(run: Path, metrics: Sequence[str] = ("verbatim", "near_verbatim")) -> list[int]:
    """Judge the extraction rates of a real run at several limits, and return the exit codes.

    Asserts that each code and number is what SciPy says from the counts.
    """
    audited = load_audited(run / "audit")
    assert audited.gaps == ()
    rows = pandas.read_parquet(run / "audit" / "results.parquet")
    records = pandas.read_parquet(run / "audit" / "records.parquet")
    trained = [row.bucket for row in audited.report.tables.buckets if row.role == "trained"]
    codes = []
    for metric in metrics:
        rates = rows[
            (rows.probe == "extraction")
            & (rows.metric == metric)
            & (rows.statistic == "rate")
            & (rows.model == "trained")
            & (rows.parameters == "")
            & rows.step.isna()
        ].set_index("bucket")
        for limit in LIMITS:
            rule = {"metric": metric, "probe": "extraction", "parameters": "", "at_most": limit}
            result = judge_audit(audited, read_policy({"gate": [rule]}))
            expected = []
            for bucket in trained:
                size_C = records[records.bucket == bucket].groupby("cluster").size().to_numpy()
                matched, documents = rates.loc[bucket, ["num_matched", "num_documents"]]
                effective = float(size_C.sum() ** 2 / np.square(size_C).sum())
                expected.append(expect(int(matched), int(documents), limit, effective))
            assert [
                (CODES[judgement.outcome], judgement.num_documents_needed)
                for judgement in result.judgements
            ] == expected
            of_all = {code for code, _ in expected}
            codes.append(next(code for code in (10, 12, 11, 0) if code in of_all))
            assert result.exit_code == codes[-1]
    return codes
