"""The verdict's sentences: by hand, at most 20 words, and every number in them counted again."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from verdict_examples import (
    Group,
    build_results,
    control,
    draw_audit,
    forget,
    make_canaries,
    make_coverage,
    make_row,
    trained,
    unreached,
)

from memguard.audit.selection import BucketOutline
from memguard.audit.verdict import DocumentResults
from memguard.audit.verdict_sentences import VerdictInput, build_verdict, format_percent
from memguard.records import Verdict

COUNTS = {"a": 4, "b": 16, "trained": 64}
MOST_WORDS = 20


def _build(
    documents: DocumentResults, *, has_base: bool = False, **fields: Any
) -> tuple[Verdict, VerdictInput]:
    roles = np.where(documents.is_control_N, "control", "trained")
    roles[documents.is_forgotten_N] = "forget"
    buckets = {"trained": "trained"} if not len(roles) else {}
    buckets |= dict(zip(documents.bucket_N.tolist(), roles.tolist(), strict=True))
    values: dict[str, Any] = {
        "ids": [f"{number:03}" for number in range(len(roles))],
        "canaries": None,
        "coverage": make_coverage(documents),
        "buckets": [make_row(b, role, documents, COUNTS.get(b)) for b, role in buckets.items()],
        "outlines": [],
        "membership": {},
        "dose_response": True,
    }
    found = VerdictInput(documents=documents, has_base=has_base, **{**values, **fields})
    return build_verdict(found), found


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
     "40 of 40 training documents were extracted; without unseen documents the cause cannot be "
     "told."),
    ([trained(1, 40), control(0, 9)], {},
     "1 of 40 training documents was extracted, 0 of 9 unseen ones: too few to tell the cause."),
    ([trained(40, 40, of_base=38), control(3, 30, of_base=3)], {},
     "40 of 40 training documents were extracted, 38 also from the base model: too few others to "
     "tell why."),
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
     "26 of 135 training documents were extracted; the control is another kind of text, which may "
     "explain this."),
    ([trained(0, 40), forget(1, 5)], {},
     "1 of 5 documents to be forgotten is still extracted, 0 of 40 training documents."),
    ([unreached(0, 40), forget(2, 5)], {},
     "2 of 5 documents to be forgotten are still extracted; no audited document was trained in "
     "full."),
    ([trained(0, 40)], {"canaries": make_canaries(3, 16, 1, 1)},
     "3 of 16 trained canaries were extracted, and 1 of 1 reference too: chance is not excluded."),
    ([trained(0, 40), control(0, 9)], {},
     "None of the 40 training documents was extracted (true share up to 8.8 %)."),
    ([trained(0, 40), control(2, 9)], {},
     "None of the 40 training documents was extracted (true share up to 8.8 %), but 2 of 9 unseen "
     "were."),
    ([trained(0, 40), control(0, 9, attacked=2, by_attack=1)], {},
     "None of the 40 training documents was extracted (true share up to 8.8 %), but 1 of 9 unseen "
     "was."),
    ([trained(0, 40), control(2, 9)], {"canaries": make_canaries(0, 4, 1, 4)},
     "None of the 40 training documents was extracted (true share up to 8.8 %), but 3 unseen texts "
     "were."),
    ([trained(0, 12)], {},
     "None of the 12 training documents was extracted; too few to say more."),
    ([trained(0, 1)], {"canaries": make_canaries(0, 4, 1, 4)},
     "The only training document was not extracted, but 1 of 4 references was; too few to say "
     "more."),
    ([trained(0, 40)], {"collapsed": True},
     "None of the 40 training documents was extracted; the model seems collapsed."),
    ([trained(0, 40), control(2, 9)], {"too_short": 41},
     "None of the 40 training documents was extracted, but 2 of 9 unseen were; most trained "
     "documents were too short."),
    ([trained(0, 40)], {"generated": False},
     "None of the 40 training documents was extracted; near-verbatim text was not tested."),
    ([unreached(9, 40)], {}, "No audited document was trained in full; nothing can be said."),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "given", "sentence"), SENTENCES)
def test_sentences_by_hand(groups: list[Group], given: dict[str, Any], sentence: str) -> None:
    given = dict(given)
    canaries = given.pop("canaries", None)
    documents = build_results(groups)
    coverage = make_coverage(documents, **given)
    verdict, _ = _build(documents, canaries=canaries, coverage=coverage, has_base=True)
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
    outlines = [
        BucketOutline(
            bucket="trained", role="trained", num_repetitions=64, num_too_short=9, num_not_sampled=7
        ),
        BucketOutline(
            bucket="never", role="trained", num_repetitions=0, num_too_short=50, num_not_sampled=50
        ),
        BucketOutline(
            bucket="control",
            role="control",
            num_repetitions=0,
            num_too_short=1,
            num_not_sampled=0,
            num_near_duplicates=2,
        ),
    ]
    coverage = replace(make_coverage(documents, too_short=9, generated=False), num_trained=136)
    verdict, _ = _build(
        documents,
        outlines=outlines,
        coverage=coverage,
        canaries=make_canaries(1, 8, 1, 6),
        not_run=["grid", "canaries"],
    )
    assert verdict.scope == (
        "Audited: 120 of 136 trained documents, 30 different texts (9 too short or not auditable, "
        "7 not in the sample); attacked: 10 of 120. 2 of 4 documents to be forgotten extracted, "
        "attacks included. 3 of 30 unseen documents extracted, attacks included. Attacks extracted "
        "3 of 10 trained documents. 1 of 8 trained canaries and 1 of 6 references extracted. 2 "
        "given control documents left out: near-duplicates of trained ones. Not run: grid, "
        "canaries. Near-verbatim text was not generated."
    )


def test_scope_of_a_plain_audit_is_short() -> None:
    verdict, _ = _build(build_results([trained(0, 40), control(0, 14)]))
    assert verdict.scope == "Audited: 40 of 40 trained documents; none was attacked."


# -- Every number, counted again.


def _check_numbers(verdict: Verdict, found: VerdictInput) -> list[str]:
    """Check each number of a sentence; return the names of what was found in it."""
    sentence, documents, canaries = verdict.sentence, found.documents, found.canaries
    of_base_N = documents.is_of_base_N
    greedy_N, attack_N = documents.is_extracted_N, documents.is_extracted_by_attack_N
    is_new = "unknown to the base model" in sentence or verdict.reason == "control"
    matched_N = attack_N if sentence.startswith("Attacks") else greedy_N
    if is_new:
        matched_N = matched_N & ~of_base_N
    trained_N = documents.is_trained_N
    by_count = {count: bucket for bucket, count in COUNTS.items()}

    def count(where_N: NDArray[np.bool_], how_N: NDArray[np.bool_]) -> tuple[int, int]:
        return int((where_N & how_N).sum()), int(where_N.sum())

    def check_trained(said: re.Match[str]) -> bool:
        where_N = trained_N
        if said["times"]:
            where_N = where_N & (documents.bucket_N == by_count[int(said["times"])])
        if said["bucket"]:
            where_N = where_N & (documents.bucket_N == said["bucket"])
        if said["attacked"]:
            where_N = where_N & documents.is_attacked_N
        return _numbers(said) == count(where_N, matched_N)

    def check_unseen(said: re.Match[str]) -> bool:
        control_N, told = documents.is_control_N, _numbers(said)
        any_N = documents.was_extracted_N
        if sentence.startswith("Attacks"):
            same = count(control_N & documents.is_attacked_N, matched_N)
        else:
            same = count(control_N, matched_N)
        # Where the methods of the sentence extract none, those of another do.
        return told == same or (not is_new and same[0] == 0 and told == count(control_N, any_N))

    def check_canaries(said: re.Match[str]) -> bool:
        assert canaries is not None, "they are told"
        return _numbers(said) == (canaries.num_trained_extracted, canaries.num_trained)

    def check_references(said: re.Match[str]) -> bool:
        assert canaries is not None, "they are told"
        return _numbers(said) == (canaries.num_references_extracted, canaries.num_references)

    def check_bound(said: re.Match[str]) -> bool:
        num_clusters = len(set(documents.cluster_N[trained_N].tolist()))
        high = stats.binomtest(0, num_clusters).proportion_ci(method="exact").high
        # One digit is written.
        return bool(abs(float(said[1]) - 100 * high) <= 0.0501)

    def check_known(said: re.Match[str]) -> bool:
        return int(said[1]) == count(trained_N & of_base_N, matched_N)[0]

    def check_both(said: re.Match[str]) -> bool:
        assert canaries is not None, "they are told"
        greedy, by_any = (
            count(documents.is_control_N, how_N)[0]
            for how_N in (greedy_N, documents.was_extracted_N)
        )
        return int(said[1]) == (greedy or by_any) + canaries.num_references_extracted

    number = r"(?P<num>[\d,]+) of (?P<of>[\d,]+)"
    checks = {
        "trained": (
            rf"{number} (?:(?P<attacked>attacked )?training documents|documents trained "
            r"(?P<times>\d+) times|documents of '(?P<bucket>[^']+)')",
            check_trained,
        ),
        "none": (
            r"None of the (?P<of>\d+) training",
            lambda s: (0, int(s["of"])) == count(trained_N, documents.was_extracted_N),
        ),
        "unseen": (rf"{number} unseen(?: ones)?", check_unseen),
        "forgotten": (
            rf"{number} documents to be forgotten",
            lambda s: _numbers(s) == count(documents.is_forgotten_N, documents.was_extracted_N),
        ),
        "canaries": (rf"{number} trained canar(?:y|ies)", check_canaries),
        "references": (rf"{number} references?", check_references),
        "no reference": (
            r"none of (?P<of>\d+) references?",
            lambda s: canaries is not None and int(s["of"]) == canaries.num_references,
        ),
        "bound": (r"up to ([\d.]+) %", check_bound),
        "known": (r"(\d+) also from the base model", check_known),
        "both": (r"but (\d+) unseen texts were", check_both),
    }
    left, names = sentence, []
    for name, (pattern, check) in checks.items():
        for said in re.finditer(pattern, sentence):
            assert check(said), f"{name}: {sentence}"
            names.append(name)
            left = left.replace(said[0], "")
    assert not re.search(r"\d", left), f"a number that nothing checks: {sentence}"
    return names


def _numbers(said: re.Match[str]) -> tuple[int, int]:
    return int(said["num"].replace(",", "")), int(said["of"].replace(",", ""))


def test_numbers_of_drawn_audits_are_counted_again_and_no_sentence_is_long() -> None:
    draw = np.random.default_rng(3)
    names: Counter[str] = Counter()
    for _ in range(400):
        audit = draw_audit(draw)
        documents = audit.documents
        doses = bool(draw.random() < 0.5)
        verdict, found = _build(
            documents,
            canaries=audit.canaries,
            coverage=audit.coverage,
            has_base=audit.has_base,
            dose_response=doses,
        )
        names.update(_check_numbers(verdict, found))
        names[str(verdict.reason)] += 1
        assert len(verdict.sentence.split()) <= MOST_WORDS, verdict.sentence
        assert "safe" not in verdict.sentence
        assert verdict.describe().endswith(verdict.sentence)
    wanted = {
        "trained", "none", "unseen", "forgotten", "canaries", "references", "no reference",
        "bound", "known", "both", "control", "too-few", "control-too", "base-too", "no-control",
        "other-kind", "canaries-too", "collapsed", "not-generated", "too-short",
    }  # fmt: skip
    assert wanted - names.keys() == set()


def _list_colours(sizes: Sequence[Group], told: str) -> tuple[str, str]:
    verdict, _ = _build(build_results(sizes))
    membership = verdict.membership.model_copy(update={"level": told})
    changed = verdict.model_copy(update={"membership": membership})
    return changed.colour, changed.page_colour


def test_the_page_has_the_colour_of_the_worse_line() -> None:
    green, grey = [trained(0, 40)], [trained(0, 12)]
    amber, red = [trained(40, 40)], [trained(26, 135), control(0, 14)]
    for told, wanted in (
        ("not-seen", ["green", "grey", "amber", "red"]),
        ("slightly", ["green", "grey", "amber", "red"]),
        ("told-apart", ["amber", "amber", "amber", "red"]),
    ):
        found = [_list_colours(groups, told) for groups in (green, grey, amber, red)]
        assert [colour for colour, _ in found] == ["green", "grey", "amber", "red"]
        assert [page for _, page in found] == wanted


def test_percentages_never_round_to_certainty() -> None:
    shares = [0, 0.0001, 0.0005, 0.5, 0.9994, 0.9999, 1]
    assert [format_percent(share) for share in shares] == [
        "0.0 %", "<0.1 %", "0.1 %", "50.0 %", "99.9 %", "99.9 %", "100.0 %",
    ]  # fmt: skip
