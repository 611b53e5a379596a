"""Which documents an audit found extracted, by probe: yes, no, or not asked. No torch.

    text_hmac, id, has_own_id, bucket, role, cluster    columns of records.parquet
    PROBE.extracted                                     whether a risk of the probe extracts it

A finding is a document that the model was trained on and that one probe extracts; its id is
``text_hmac:probe``. Equal texts have one id.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.errors import RecordError
from memguard.records.audit import name_finding
from memguard.records.audit_files import SCORES, check_audit_file

EXTRACTED = ".extracted"
"""End of the name of a column that has a probe's answers."""
_TRAINED_ROLES = ("trained", "forget")


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """The documents of an audit: N documents as columns."""

    text_hmac_N: NDArray[Any]
    """Keyed hash of the text; None where the audit had no key."""
    id_N: NDArray[Any]
    has_own_id_N: NDArray[np.bool_]
    """Whether the user's data gave the id; else it is made of file name and row number."""
    bucket_N: NDArray[Any]
    role_N: NDArray[Any]
    cluster_N: NDArray[np.int64]
    extracted: Mapping[str, NDArray[np.float64]]
    """By probe: ``[N]`` 1 yes, 0 no, NaN not asked."""

    def __len__(self) -> int:
        return len(self.id_N)

    @cached_property
    def is_trained_N(self) -> NDArray[np.bool_]:
        """Documents that the model was trained on."""
        return np.isin(self.role_N, _TRAINED_ROLES)

    def list_findings(self, probe: str | None = None) -> list[str]:
        """Return the ids of the findings, each once, sorted.

        Documents without a keyed hash are left out: their findings have no id.

        Args:
            probe: only of this one; None: of all.
        """
        findings = set()
        for name, extracted_N in self.extracted.items():
            if probe in (None, name):
                for index in np.flatnonzero((extracted_N == 1) & self.is_trained_N).tolist():
                    if self.text_hmac_N[index] is not None:
                        findings.add(name_finding(self.text_hmac_N[index], name))
        return sorted(findings)


def load_answers(folder: Path) -> Answers:
    """Read the answers from the records of an audit folder, after checking their hash.

    Raises:
        UnreadableError: only another user can read them.
        RecordError: the audit is incomplete or damaged.
    """
    import pyarrow.parquet

    check_audit_file(folder, SCORES)
    # Not read_table, which imports pandas: the gate has two seconds.
    with pyarrow.parquet.ParquetFile(folder / SCORES) as file:
        table = file.read()
    missing = {"text_hmac", "has_own_id"} - set(table.column_names)
    if missing:
        raise RecordError(
            f"'{folder / SCORES}' has no column {', '.join(sorted(missing))}: another version of "
            "memguard wrote it. Run 'memguard audit' again"
        )

    def read(name: str, kind: Any) -> NDArray[Any]:
        return np.array(table.column(name).to_pylist(), dtype=kind)

    clusters = table.column("cluster").to_pylist()
    return Answers(
        text_hmac_N=read("text_hmac", object),
        id_N=read("id", object),
        has_own_id_N=read("has_own_id", bool),
        bucket_N=read("bucket", object),
        role_N=read("role", object),
        # A document without a cluster is one of its own.
        cluster_N=np.array([-1 - i if c is None else c for i, c in enumerate(clusters)], np.int64),
        extracted={
            name.removesuffix(EXTRACTED): read(name, np.float64)
            for name in table.column_names
            if name.endswith(EXTRACTED) and not name.startswith(("base.", "reference."))
        },
    )
