"""Generated text stands beside that of the control and of the base model."""

import evidence_examples as evidence
import report_examples as examples
from result_examples import change_rows

from memguard.audit.probes.generation import GenerationProbe


def test_what_was_written_stands_beside_the_control_and_the_base_model() -> None:
    (table,) = GenerationProbe.section(evidence.make_full_report()).tables
    assert [column.detail for column in table.columns] == [
        "decoding",
        "mean",
        "tokens, mean",
        "share of the length, mean",
        "documents",
        "documents",
        "generated, mean",
    ]
    heads = [(row.head.text, row.head.detail) for row in table.rows]
    assert heads[:4] == [
        ("control", "greedy"),
        ("Base model", "greedy"),
        ("control", "sampled, T=1, top-p 0.95"),
        ("Base model", "sampled, T=1, top-p 0.95"),
    ]
    assert heads[-4] == ("r64", "greedy")
    texts = [cell.text.replace("\u00a0", " ") for cell in table.rows[-4].cells]
    assert texts == ["0.790", "31.5", "24.0 %", "11 of 40", "13 of 40", "0.710"]


def test_a_report_without_generated_text_or_without_a_base_model() -> None:
    assert GenerationProbe.section(examples.make_report()) is None
    report = change_rows(
        evidence.make_full_report(), lambda row: None if row.model == "base" else row
    )
    (table,) = GenerationProbe.section(report).tables
    assert not any(row.tone == "base" for row in table.rows)
