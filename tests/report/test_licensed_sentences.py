"""Every sentence of verdict, banners and notices is licensed by the audit's numbers."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from licensed_audits import Audit, Document, draw_audits
from licensed_banners import BANNERS
from licensed_checks import Said, Sentence, check_sentences
from licensed_verdict import HOW, VERDICT, list_exceeding

from memguard import records as r
from memguard.report.audit_page import VERDICT_LABELS, digest_report


def gain(documents: list[Document]) -> float:
    """Return the mean of what the share of right tokens gained over the base model."""
    gains = [
        (one.model.num_correct - one.base.num_correct) / one.size
        for one in documents
        if one.base is not None
    ]
    return float(np.mean(gains))


def find_blind(audit: Audit) -> r.Interval | None:
    found = [one.auc for one in audit.report.membership if one.score == "blind"]
    return found[0] if found else None


def find_gains(audit: Audit, bucket: str) -> tuple[r.Interval | None, r.Interval | None]:
    """Return what training added, and that beyond the control's, as the record has it."""
    rows = [
        row
        for one in audit.report.measures
        if (one.probe, one.metric) == ("extraction", "token_accuracy")
        for row in one.buckets
        if row.bucket == bucket
    ]
    return rows[0].change_from_base, rows[0].change_from_base_minus_control


def list_learned(audit: Audit) -> list[str]:
    """Return the trained buckets that nothing extracts and training taught beyond the control."""
    blind = find_blind(audit)
    if not audit.has_base or audit.control is None or blind is None or blind.ci is None:
        return []
    if not blind.ci[0] <= 0.5 <= blind.ci[1]:
        return []
    found = []
    for one in audit.outline("trained"):
        if any(matched for matched, _ in audit.risks(one.bucket).values()):
            continue
        gains = find_gains(audit, one.bucket)
        if all(each is not None and each.ci is not None and each.ci[0] > 0 for each in gains):
            found.append(one.bucket)
    return found


def is_learned(audit: Audit, said: Said) -> bool:
    """Check the gains of each bucket, from the documents."""
    assert audit.control is not None, "nothing is learned without a control"
    number = r"([+-]?\d+(?:\.\d)?)"
    each = rf"(.+): {number} pp, {number} pp more than in the control \({number} to {number}\)"
    told = [re.fullmatch(each, part).groups() for part in said["list"].split("; ")]
    if [bucket for bucket, *_ in told] != list_learned(audit):
        return False
    floor = gain(audit.of(audit.control))
    for bucket, mine, more, low, high in told:
        mean = gain(audit.of(bucket))
        _, excess = find_gains(audit, bucket)
        wanted = (mean, mean - floor, *((excess and excess.ci) or (0, 0)))
        # Half of the last digit.
        for text, value in zip((mine, more, low, high), wanted, strict=True):
            if abs(float(text) - 100 * value) > 0.0501:
                return False
        if float(low) < 0 or mean <= max(floor, 0):
            return False
    return True


def is_blind(audit: Audit, said: Said) -> bool:
    auc = find_blind(audit)
    assert auc is not None, "counted before"
    assert auc.ci is not None, "counted before"
    told = (float(said[name]) for name in ("auc", "low", "high"))
    # Half of the last of three digits.
    return all(abs(a - b) <= 0.000501 for a, b in zip(told, (auc.value, *auc.ci), strict=True))


PARTLY_LEARNED = (
    "No document of these buckets is extracted, yet training raised their teacher-forced token "
    r"accuracy: (?P<list>.+)\. This is token-level knowledge, not extraction\."
)
NOTICES: tuple[Sentence[Audit], ...] = (
    *BANNERS,
    Sentence(
        name="blind baseline",
        pattern="A bag-of-words classifier without access to the model separates trained from "
        r"control documents \(AUC (?P<auc>[\d.]+), 95 % CI (?P<low>[\d.]+)–(?P<high>[\d.]+)\): the "
        "texts themselves differ, so no membership score shows what the model remembers.",
        count=lambda a: int(
            (auc := find_blind(a)) is not None and auc.ci is not None and auc.ci[0] > 0.5
        ),
        holds=is_blind,
    ),
    Sentence(
        name="partly learned",
        pattern=PARTLY_LEARNED,
        count=lambda a: int(
            bool(list_learned(a)) and a.report.verdict.level == "not-above-control"
        ),
        holds=is_learned,
    ),
)
LEVEL_NAMES = {
    "exceeds": "recites",
    "not significant": "not-above-control",
    "below": "not-above-control",
    "no control": "no-control",
    "one document": "inconclusive",
    "collapsed": "inconclusive",
    "few controls": "inconclusive",
}
TAUGHT = re.compile(r"\b(?:learn\w*|taught|training raised|trained into)\b", re.IGNORECASE)


def plain(text: str) -> str:
    return text.replace("\u00a0", " ").replace("\u2212", "-")


def check_audit(audit: Audit) -> Counter[str]:
    """Hold every sentence of an audit against its numbers; return what was said."""
    report = audit.report
    parts = re.split(r"(?<=[.]) (?=[A-Z])", report.verdict.sentence)
    said = check_sentences(parts, VERDICT, audit)
    (level,) = [name for name in LEVEL_NAMES if said[name]]
    assert report.verdict.level == LEVEL_NAMES[level]
    said += check_sentences([one.text for one in report.banners], BANNERS, audit)
    page = digest_report(report)
    notices = [plain(one.text) for one in page.notices]
    said += check_sentences(notices, NOTICES, audit)
    assert page.verdict.text == report.verdict.sentence
    assert page.verdict.label == VERDICT_LABELS[report.verdict.level]
    # "Memorization detected": in some bucket, in some way.
    assert (report.verdict.level == "recites") == bool(list_exceeding(audit))
    # The lead of the table says it of red pages too.
    lead = [plain(text) for text in page.summary_lead if re.fullmatch(PARTLY_LEARNED, plain(text))]
    assert len(lead) == bool(list_learned(audit))
    said += Counter([f"verdict by {report.verdict.metric}", *["learned in the lead"] * len(lead)])
    if audit.base_is_model:
        for text in (report.verdict.sentence, *notices, *page.summary_lead):
            assert not TAUGHT.search(text), text
        said["base model is the model"] += 1
    return said


def check_audits(num_audits: int) -> Counter[str]:
    """Hold the sentences of so many audits against their numbers; return what was said."""
    total: Counter[str] = Counter()

    # The same audits each time: that every sentence is met must not be a matter of luck.
    @settings(
        max_examples=num_audits,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(draw_audits())
    def check(audit: Audit) -> None:
        total.update(check_audit(audit))

    check()
    return total


def list_unsaid(said: Counter[str]) -> set[str]:
    wanted = {one.name for one in (*VERDICT, *NOTICES)}
    wanted |= {f"verdict by {metric}" for metric in HOW.values()}
    wanted |= {"learned in the lead", "base model is the model"}
    return wanted - said.keys()


def test_every_sentence_is_licensed() -> None:
    # Of 36 sentences some are rare: all of them take more audits than these.
    assert len(list_unsaid(check_audits(80))) <= 6


@pytest.mark.slow
def test_every_sentence_is_licensed_and_each_of_the_table_is_said() -> None:
    assert list_unsaid(check_audits(300)) == set(), "sentences that no audit led to"
