"""The one reader of records.parquet: columns, answers, findings, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from diff_examples import NOT_ASKED, make_row, save_audit
from pyarrow import parquet

from memguard.errors import RecordError
from memguard.records.audit_files import save_audit_files
from memguard.records.documents import DocumentTable

DOCUMENTS = [
    make_row(1, near=1, cluster=7),
    make_row(2, near=NOT_ASKED, verbatim=1, attacks={"fill": 1}),
    make_row(3, near=1, role="control", bucket="control"),
]


def test_columns_have_numbers_texts_and_gaps(tmp_path: Path) -> None:
    table = DocumentTable.read(save_audit(tmp_path / "audit", DOCUMENTS))
    assert len(table) == 3
    assert table.texts("id").tolist() == ["data.jsonl:1", "data.jsonl:2", "data.jsonl:3"]
    assert repr(table.numbers("extraction.near_verbatim").tolist()) == "[1.0, nan, 1.0]"
    assert repr(table.numbers("attacks.fill.any").tolist()) == "[nan, 1.0, nan]"
    assert table.list_flags("attacks.") == [
        "attacks.beam_search.any",
        "attacks.fill.any",
        "attacks.extracted",
    ]
    assert table.cluster_N.tolist() == [7, -2, -3]


def test_findings_are_trained_documents_that_a_probe_extracts(tmp_path: Path) -> None:
    folder = save_audit(tmp_path / "audit", [*DOCUMENTS, make_row(1, near=1)])
    # Both of equal texts count; the control does not.
    assert DocumentTable.read(folder).came_out_N.tolist() == [True, True, False, True]


def test_a_file_without_a_needed_column_is_refused(tmp_path: Path) -> None:
    folder = save_audit(tmp_path / "audit", DOCUMENTS)
    with pytest.raises(RecordError, match=r"document scores \(no column 'extraction\.rouge'\)"):
        DocumentTable.read(folder, ("id", "extraction.rouge"))
    parquet.write_table(pyarrow.table({"id": ["a"]}), folder / "records.parquet")
    with pytest.raises(RecordError, match=r"records\.parquet' is damaged: it has"):
        DocumentTable.read(folder)
    save_audit_files(folder, has_card=False)
    with pytest.raises(RecordError, match="no column 'text_hmac'"):
        DocumentTable.read(folder)


def test_pandas_and_torch_are_not_imported(tmp_path: Path) -> None:
    # The gate has two seconds.
    folder = save_audit(tmp_path / "audit", DOCUMENTS)
    script = (
        "import sys; from pathlib import Path; from memguard.records.documents import DocumentTable"
        f"; t = DocumentTable.read(Path({str(folder)!r})); t.came_out_N; t.cluster_N; t.id_N"
        "; print({'pandas', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
