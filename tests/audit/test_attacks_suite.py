"""Numbers of attacks on documents, and the rows that stand for a bucket."""

from collections.abc import Callable

import numpy as np
import pytest

from memguard.audit import attacks
from memguard.audit.attacks import TIGHTENED_MASK, UNKNOWN_MASK, AttackResult
from memguard.audit.cache import ScoreMatrix
from memguard.audit.extraction import AuditDocument, ExtractionProbe, Window
from memguard.audit.selection import BucketOutline
from memguard.audit.suite import AttackProbe
from memguard.config import GoldfishConfig
from memguard.mitigation import Goldfish

PROBE = AttackProbe(width=3, samples=5)
GOLDFISH = Goldfish(GoldfishConfig(name="goldfish", k=4))


@pytest.fixture
def windows(make_document: Callable[..., AuditDocument]) -> list[Window]:
    probe = ExtractionProbe(continuation_tokens=10)
    documents = [make_document(np.arange(30), name=str(n), bucket=b) for n, b in enumerate("aabbb")]
    found = [probe.window(document) for document in documents]
    return [window for window in found if window is not None]


def _result(number: int) -> AttackResult:
    return AttackResult(
        best_verbatim=number == 1,
        any_verbatim=number >= 1,
        num_correct=10 * (number == 1) or number,
    )


@pytest.mark.parametrize("goldfish", [None, GOLDFISH])
def test_numbers_of_a_document_stand_in_the_order_of_their_names(
    windows: list[Window], goldfish: Goldfish | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("attack_by_beam_search", "attack_by_sampling", "attack_by_filling"):
        answer = [_result(number) for number in range(2)]
        monkeypatch.setattr(attacks, name, lambda *_, answer=answer, **__: answer)
    told: list[str] = []
    rows = attacks.attack(
        PROBE,
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        windows[:2],
        goldfish,
        seed=0,
        progress=told.append,  # type: ignore[arg-type]
    )
    kinds = ["beam_search", "sampling", *(["fill"] if goldfish else [])]
    assert attacks.name_numbers(goldfish) == tuple(
        f"{kind}.{each}" for kind in kinds for each in ("best", "any", "right")
    )
    assert rows == [[0, 0, 0] * len(kinds), [1, 1, 10] * len(kinds)]
    assert told == ["beam search", "sampling", "filling dropped tokens"][: len(kinds)]


def test_a_row_for_each_attack_and_bucket_that_was_attacked(windows: list[Window]) -> None:
    names = attacks.name_numbers(GOLDFISH)
    rows = np.full((5, len(names)), np.nan)
    # One of bucket a, two of b; the others were not drawn.
    rows[0] = [1, 1, 10, 0, 1, 4, 0, 0, 0]
    rows[2] = [0, 0, 5, 0, 0, 5, 0, 1, 5]
    rows[4] = [0, 1, 9, 0, 0, 1, 0, 1, 7]
    outlines = [
        BucketOutline(
            bucket=name, role="trained", num_repetitions=1, num_too_short=0, num_not_sampled=0
        )
        for name in ("b", "a", "nobody")
    ]
    numbers = ScoreMatrix(names=names, rows=rows)
    table = attacks.tabulate(PROBE, windows, numbers, outlines, GOLDFISH)
    assert [(row.attack, row.bucket, row.num_queries) for row in table] == [
        ("beam_search", "b", 3),
        ("beam_search", "a", 3),
        ("sampling", "b", 5),
        ("sampling", "a", 5),
        ("fill", "b", 3),
        ("fill", "a", 3),
    ]
    beams = table[0]
    assert (beams.best_verbatim.num_matched, beams.best_verbatim.num_documents) == (0, 2)
    assert beams.any_verbatim.rate == 0.5
    assert beams.mean_token_accuracy is not None
    assert beams.mean_token_accuracy.value == pytest.approx(0.7)
    assert {row.note for row in table} == {""}


def test_a_mask_nobody_knows_is_told_beside_the_attack(windows: list[Window]) -> None:
    drawn = Goldfish(GoldfishConfig(name="goldfish", k=4, mode="random"))
    names = attacks.name_numbers(drawn)
    numbers = ScoreMatrix(names=names, rows=np.zeros((5, len(names))))
    outlines = [
        BucketOutline(
            bucket="a", role="trained", num_repetitions=1, num_too_short=0, num_not_sampled=0
        )
    ]
    table = attacks.tabulate(PROBE, windows, numbers, outlines, drawn)
    assert [row.note for row in table] == ["", "", UNKNOWN_MASK]
    table = attacks.tabulate(PROBE, windows, numbers, outlines, GOLDFISH, num_tightened=1)
    assert [row.note for row in table] == ["", "", TIGHTENED_MASK]
