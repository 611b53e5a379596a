"""The verdict's sentences by hand, at most 20 words each.

Their numbers in drawn audits: tests/report/test_licensed_sentences.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from record_examples import make_outline
from result_examples import make_tables
from verdict_examples import (
    Group,
    build_results,
    control,
    forget,
    make_canaries,
    make_coverage,
    make_row,
    trained,
    unreached,
)

from memguard.audit.verdict import DocumentResults
from memguard.audit.verdict_sentences import VerdictInput, build_verdict
from memguard.records import BucketRow, Interval, Verdict

COUNTS = {"a": 4, "b": 16, "trained": 64}
MOST_WORDS = 20


def _build(
    documents: DocumentResults, *, outlines: Sequence[BucketRow] = (), **fields: Any
) -> Verdict:
    roles = np.where(documents.is_control_N, "control", "trained")
    roles[documents.is_forgotten_N] = "forget"
    buckets = {"trained": "trained"} if not len(roles) else {}
    buckets |= dict(zip(documents.bucket_N.tolist(), roles.tolist(), strict=True))
    values: dict[str, Any] = {
        "ids": [f"{number:03}" for number in range(len(roles))],
        "canaries": None,
        "coverage": make_coverage(documents),
        "tables": make_tables(
            [make_row(bucket, documents) for bucket in buckets],
            outlines
            or [
                BucketRow(bucket=bucket, role=role, num_repetitions=COUNTS.get(bucket))
                for bucket, role in buckets.items()
            ],
        ),
        "membership": {},
        "dose_response": True,
    }
    return build_verdict(VerdictInput(documents=documents, **{**values, **fields}))


SENTENCES: list[tuple[list[Group], dict[str, Any], str]] = [
    ([trained(26, 135), control(0, 14)], {},
     "26 of 135 training documents were extracted, 0 of 14 unseen ones: the model memorized "
     "training text."),
    ([trained(8, 8, "a"), trained(0, 500, "b"), control(0, 10)], {},
     "8 of 8 documents trained 4 times were extracted, 0 of 10 unseen ones: the model memorized "
     "training text."),
    ([trained(8, 8, "a b c d"), trained(0, 500, "b"), control(0, 10)], {},
     "8 of 8 documents of one bucket were extracted, 0 of 10 unseen ones: the model memorized "
     "training text."),
    ([trained(20, 30, of_base=4), control(2, 10, of_base=2)], {},
     "16 of 30 training documents, unknown to the base model, were extracted; 0 of 10 unseen "
     "ones."),
    ([trained(0, 4, attacked=4, by_attack=4), control(0, 4, attacked=4)], {},
     "Attacks extracted 4 of 4 attacked training documents, 0 of 4 unseen ones: the model "
     "memorized training text."),
    ([trained(0, 12, of_base=1, attacked=12, by_attack=9), control(0, 8, attacked=8)], {},
     "Attacks extracted 8 of 12 attacked training documents, unknown to the base model; 0 of 8 "
     "unseen ones."),
    ([trained(0, 40)], {"canaries": make_canaries(1, 16, 0, 12)},
     "1 of 16 trained canaries was extracted, none of 12 references: the model memorized random "
     "secrets."),
    ([trained(40, 40)], {},
     "40 of 40 training documents were extracted; without unseen documents the cause is open."),
    ([trained(1, 40), control(0, 9)], {},
     "1 of 40 training documents was extracted, 0 of 9 unseen ones: one is too few to "
     "blame training."),
    ([trained(40, 40, of_base=38), control(3, 30, of_base=3)], {},
     "40 of 40 training documents were extracted, 38 also from the base model: too few others to "
     "blame training."),
    ([trained(3, 10), control(1, 10)], {},
     "3 of 10 training documents were extracted, and 1 of 10 unseen ones too: chance is not "
     "excluded."),
    ([trained(2, 40), control(0, 10, attacked=4, by_attack=2)], {},
     "2 of 40 training documents were extracted, and 2 of 10 unseen ones too: chance is not "
     "excluded."),
    ([trained(0, 40, attacked=9, by_attack=1), control(3, 10, attacked=4)], {},
     "Attacks extracted 1 of 9 attacked training documents; 3 of 10 unseen ones were extracted: "
     "chance is not excluded."),
    ([trained(3, 10, of_base=5), control(0, 10)], {},
     "3 of 10 training documents were extracted; the base model produces them too."),
    ([trained(1, 10, of_base=5), control(0, 10)], {},
     "1 of 10 training documents was extracted; the base model produces it too."),
    ([trained(26, 135), control(0, 14)], {"other_kind": True},
     "26 of 135 training documents were extracted; the control is another kind of text, without a "
     "base."),
    ([trained(0, 40), forget(1, 5)], {},
     "1 of 5 documents to be forgotten is still extracted, 0 of 40 training documents."),
    ([unreached(0, 40), forget(2, 5)], {},
     "2 of 5 documents to be forgotten are still extracted; no audited document was trained in "
     "full."),
    ([trained(0, 40)], {"canaries": make_canaries(3, 16, 1, 1)},
     "3 of 16 trained canaries were extracted, and 1 of 1 reference too: chance is not excluded."),
    ([trained(0, 40), control(0, 9)], {},
     "0 of 40 training documents were extracted (at most 9 in 100 could be)."),
    ([trained(0, 40), control(2, 9)], {},
     "0 of 40 training documents were extracted (at most 9 in 100 could be), but 2 of 9 unseen "
     "were."),
    ([trained(0, 40), control(0, 9, attacked=2, by_attack=1)], {},
     "0 of 40 training documents were extracted (at most 9 in 100 could be), but 1 of 9 unseen "
     "was."),
    ([trained(0, 40), control(2, 9)], {"canaries": make_canaries(0, 4, 1, 4)},
     "0 of 40 training documents were extracted (at most 9 in 100 could be), but 3 unseen texts "
     "were."),
    ([trained(0, 12)], {},
     "0 of 12 training documents were extracted; too few to say more."),
    ([trained(0, 1)], {"canaries": make_canaries(0, 4, 1, 4)},
     "The only training document was not extracted, but 1 of 4 references was; too few to say "
     "more."),
    ([trained(0, 40)], {"collapsed": True},
     "0 of 40 training documents were extracted; the model seems collapsed."),
    ([trained(0, 40), control(2, 9)], {"unaudited": 41},
     "0 of 40 audited documents were extracted; 41 of 81 were not audited: too few to say "
     "more."),
    ([trained(0, 36)], {"unaudited": 30},
     "0 of 36 audited documents were extracted; 30 of 66 were not audited: too few to say "
     "more."),
    ([], {"unaudited": 60},
     "60 of 60 training documents could not be audited; nothing can be said."),
    ([trained(0, 40)], {"weakened": ("5 tokens of prefix", "continuations of 100 tokens")},
     "0 of 40 training documents were extracted with 5 tokens of prefix and continuations of "
     "100 tokens."),
    ([trained(0, 40)], {"generated": False},
     "0 of 40 training documents were extracted; near-verbatim text was not tested."),
    ([unreached(9, 40)], {}, "No audited document was trained in full; nothing can be said."),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "given", "sentence"), SENTENCES)
def test_sentences_by_hand(groups: list[Group], given: dict[str, Any], sentence: str) -> None:
    given = dict(given)
    canaries = given.pop("canaries", None)
    documents = build_results(groups)
    coverage = make_coverage(documents, **given)
    verdict = _build(documents, canaries=canaries, coverage=coverage)
    assert verdict.sentence == sentence
    assert len(sentence.split()) <= MOST_WORDS


def test_scope_says_what_was_audited_what_else_came_out_and_what_was_not_run() -> None:
    documents = build_results(
        [
            trained(26, 120, copies=4, attacked=10, by_attack=3),
            control(2, 30, attacked=5, by_attack=1),
            forget(1, 4, attacked=2, by_attack=1),
        ]
    )
    buckets = [
        make_outline("trained", "trained", 64, num_too_short=9, num_not_sampled=7),
        make_outline("never", "trained", 0, num_too_short=50, num_not_sampled=50),
        make_outline("control", "control", 0, num_too_short=1, num_near_duplicates=2),
    ]
    coverage = replace(make_coverage(documents, unaudited=9, generated=False), num_trained=136)
    verdict = _build(
        documents,
        outlines=buckets,
        coverage=coverage,
        canaries=make_canaries(1, 8, 1, 6),
        not_run={"grid": "too slow", "canaries": "not needed: none were given"},
    )
    assert verdict.scope == (
        "Audited: 120 of 136 trained documents, 30 different texts (9 too short or not "
        "auditable, 7 not in the sample); attacked: 10 of 120. 29 of 120 trained documents "
        "extracted, by any method. 2 of 4 documents to be forgotten extracted, by any method. 3"
        " of 30 unseen documents extracted, by any method. 3 of 10 trained documents extracted "
        "by attacks. 1 of 8 trained canaries and 1 of 6 references extracted. 2 given control "
        "documents left out: near-duplicates of trained ones. Not run: grid, canaries (not "
        "needed: none were given). Near-verbatim text was not generated."
    )


def test_scope_of_a_plain_audit_is_short() -> None:
    verdict = _build(build_results([trained(0, 40), control(0, 14)]))
    assert verdict.scope == "Audited: 40 of 40 trained documents; none was attacked."


def test_each_badge_has_its_own_colour_and_what_was_not_tested_is_grey() -> None:
    sizes = {
        "green": [trained(0, 40), control(0, 14)],
        "grey": [trained(0, 12), control(0, 14)],
        "amber": [trained(40, 40)],
        "red": [trained(26, 135), control(0, 14)],
    }
    for colour, groups in sizes.items():
        verdict = _build(build_results(groups))
        for level, lack, wanted in (
            ("told-apart", None, "violet"),
            ("slightly", None, "violet"),
            ("not-seen", None, "green"),
            ("cannot-be-judged", "unseen-texts", "grey"),
            ("not-measured", "no-unseen", "grey"),
        ):
            auc = None if lack else Interval(value=0.7, ci=(0.6, 0.8))
            membership = verdict.membership.model_copy(
                update={"level": level, "lack": lack, "auc": auc}
            )
            changed = verdict.model_copy(update={"membership": membership})
            assert [badge.colour for badge in changed.badges] == [colour, wanted]


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([trained(26, 135), control(0, 14)], "Text: Memorized (26 of 135 documents)"),
        ([trained(0, 40), control(0, 14)], "Text: None found (0 of 40 documents)"),
        ([trained(0, 12), control(0, 14)], "Text: Inconclusive (12 of 30 trained texts)"),
    ],
)
def test_a_badge_has_the_count_that_it_rests_on(sizes: Sequence[Group], wanted: str) -> None:
    text, membership = _build(build_results(sizes)).badges
    assert text.describe() == wanted
    assert membership.describe() == "Membership: not judged (the suite has no membership score)"
