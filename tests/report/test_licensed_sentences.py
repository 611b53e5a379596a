"""Every sentence of verdict, banners and notices is licensed by the audit's numbers."""

import re
from collections import Counter

import numpy as np
import pytest
from licensed_audits import Audit, Document, draw_audit
from licensed_banners import BANNERS
from licensed_checks import Said, Sentence, check_sentences
from licensed_rule import decide
from licensed_verdict import MEMBERSHIP, SCOPE, VERDICT, judge

from memguard import records as r
from memguard.records import LEVEL_NAMES
from memguard.report.audit_page import digest_report

pytestmark = pytest.mark.slow


def gain(documents: list[Document]) -> float:
    """Return the mean of what the share of right tokens gained over the base model."""
    gains = [
        (one.model.num_correct - one.base.num_correct) / one.size
        for one in documents
        if one.base is not None
    ]
    return float(np.mean(gains))


def find_blind(audit: Audit) -> r.ResultRow | None:
    parameters = f"score={r.BLIND}"
    return audit.report.tables.find("membership", "auc", r.MEMBERS, parameters=parameters)


def find_gain(audit: Audit, bucket: str) -> r.ResultRow | None:
    """Return what training added, also beyond the control, as the record has it."""
    return audit.report.tables.find("extraction", "token_accuracy", bucket, against="base")


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
        row = find_gain(audit, one.bucket)
        ends = () if row is None else (row.ci, row.minus_control_ci)
        if ends and all(ci is not None and ci[0] > 0 for ci in ends):
            found.append(one.bucket)
    return found


def is_learned(audit: Audit, said: Said) -> bool:
    """Check the gains of each bucket, from the documents."""
    assert audit.control is not None, "nothing is learned without a control"
    number = r"([+-]?\d+(?:\.\d)?)"
    excess = rf"{number} pp more than in the control \({number} to {number}(, few documents)?\)"
    each = rf"(.+): {number} pp, {excess}"
    told = [re.fullmatch(each, part).groups() for part in said["list"].split("; ")]
    if [bucket for bucket, *_ in told] != list_learned(audit):
        return False
    floor = gain(audit.of(audit.control))
    for bucket, mine, more, low, high, few in told:
        mean = gain(audit.of(bucket))
        row = find_gain(audit, bucket)
        # No copies: control and bucket are counted by documents.
        smaller = min(len(audit.of(name)) for name in (bucket, audit.control))
        if bool(few) != (smaller < 25):
            return False
        wanted = (mean, mean - floor, *((row and row.minus_control_ci) or (0, 0)))
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
    assert auc.value is not None, "counted before"
    assert auc.ci is not None, "counted before"
    told = (float(said[name]) for name in ("auc", "low", "high"))
    # Half of the last of three digits.
    return all(abs(a - b) <= 0.000501 for a, b in zip(told, (auc.value, *auc.ci), strict=True))


PARTLY_LEARNED = (
    "No document of these buckets is extracted, yet training raised their teacher-forced token "
    r"accuracy: (?P<list>.+)\. The model partly learned these texts but did not reproduce them\."
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
        count=lambda a: int(bool(list_learned(a)) and decide(a)[0] == "none-found"),
        holds=is_learned,
    ),
)
MOST_WORDS = 20
COLOURS = {"memorized": "red", "extracted": "amber", "none-found": "green", "inconclusive": "grey"}
TAUGHT = re.compile(r"\b(?:learn\w*|taught|training raised|trained into)\b", re.IGNORECASE)


def plain(text: str) -> str:
    return text.replace("\u00a0", " ").replace("\u2212", "-")


def check_audit(audit: Audit) -> Counter[str]:
    """Hold every sentence of an audit against its numbers; return what was said."""
    report = audit.report
    verdict = report.verdict
    assert (verdict.level, verdict.reason) == decide(audit)
    assert len(verdict.sentence.split()) <= MOST_WORDS
    said = check_sentences([verdict.sentence], VERDICT, audit)
    said += check_sentences([verdict.membership.sentence], MEMBERSHIP, audit)
    said += check_sentences(re.split(r"(?<=[.]) (?=[A-Z\d])", verdict.scope), SCOPE, audit)
    said += check_sentences([one.text for one in report.banners], BANNERS, audit)
    page = digest_report(report)
    notices = [plain(one.text) for one in page.notices]
    said += check_sentences(notices, NOTICES, audit)
    assert plain(page.verdict.text) == verdict.sentence
    assert plain(page.membership.text) == verdict.membership.sentence
    assert plain(page.scope) == verdict.scope
    assert page.verdict.label == LEVEL_NAMES[verdict.level]
    colour = COLOURS[verdict.level]
    is_told = judge(audit) == "told-apart"
    assert page.colour == ("amber" if is_told and colour != "red" else colour)
    # The lead of the table says it of red pages too.
    lead = [plain(text) for text in page.summary_lead if re.fullmatch(PARTLY_LEARNED, plain(text))]
    assert len(lead) == bool(list_learned(audit))
    said += Counter(["learned in the lead"] * len(lead))
    if audit.base_is_model:
        for text in (verdict.sentence, verdict.scope, *notices, *page.summary_lead):
            assert not TAUGHT.search(text), text
        said["base model is the model"] += 1
    return said


def check_audits(num_audits: int) -> Counter[str]:
    """Hold the sentences of so many audits against their numbers; return what was said."""
    total: Counter[str] = Counter()
    for seed in range(num_audits):
        try:
            total.update(check_audit(draw_audit(seed)))
        except AssertionError as error:
            raise AssertionError(f"audit {seed}: {error}") from error
    return total


def list_unsaid(said: Counter[str]) -> set[str]:
    wanted = {one.name for one in (*VERDICT, *MEMBERSHIP, *SCOPE, *NOTICES)}
    wanted |= {"learned in the lead", "base model is the model"}
    return wanted - said.keys()


def test_every_sentence_is_licensed() -> None:
    """150 audits take 4 s."""
    # Of 75 sentences some are rare: all of them take more audits than these.
    assert len(list_unsaid(check_audits(150))) <= 15


@pytest.mark.long
def test_every_sentence_is_licensed_and_each_of_the_table_is_said() -> None:
    """600 audits take 16 s."""
    assert list_unsaid(check_audits(600)) == set(), "sentences that no audit led to"
