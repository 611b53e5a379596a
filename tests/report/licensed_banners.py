"""The sentences that banners may hold, and the numbers that license each."""

import re

from licensed_audits import REASON, TINY_MARGIN, Audit
from licensed_checks import Said, Sentence
from licensed_rule import is_collapsed


def greedy(audit: Audit, bucket: str) -> tuple[tuple[int, int], str]:
    """Return the rate of greedy text, and what it is called."""
    risks = audit.risks(bucket)
    near = risks.get("near_verbatim")
    return (risks["verbatim"], "verbatim") if near is None else (near, "near-verbatim")


def count_control(audit: Audit) -> tuple[int, int] | None:
    return greedy(audit, audit.control)[0] if audit.control else None


def is_forgotten(audit: Audit, said: Said) -> bool:
    rate, how = greedy(audit, "forget")
    before = [one.base for one in audit.of("forget")]
    known = bool(before) and None not in before
    known &= how == "verbatim" or audit.base_generated
    base = [one is not None and (one.verbatim if how == "verbatim" else one.near) for one in before]
    return (
        (int(said["num"]), int(said["of"])) == rate
        and said["how"] == how
        and said["base"] == (str(sum(base)) if known else None)
    )


def list_few(audit: Audit) -> list[tuple[str, str]]:
    return [
        (one.bucket, str(len(audit.of(one.bucket))))
        for one in audit.outlines
        if one.role in ("trained", "control") and len(audit.of(one.bucket)) < 30
    ]


def count_short(audit: Audit) -> int:
    return sum(one.num_too_short for one in audit.outlines)


def count_left(audit: Audit) -> int:
    return sum(one.num_not_sampled for one in audit.outlines)


def count_hanging(audit: Audit) -> int:
    return sum(one.hangs for one in audit.documents)


def count_missed(audit: Audit) -> tuple[int, int]:
    counts = [one.count for one in audit.documents if one.role == "trained"]
    return counts.count(0), len(counts)


def count_texts(audit: Audit) -> tuple[int, int]:
    """Return the trained and the control documents, near-duplicates once where all are known."""
    compared = [one for one in audit.documents if one.is_trained or one.role == "control"]
    is_known = all(one.cluster is not None for one in compared)
    trained, control = (
        {one.cluster if is_known else id(one) for one in compared if one.is_trained == is_trained}
        for is_trained in (True, False)
    )
    return len(trained), len(control)


def is_compared(audit: Audit) -> bool:
    """Tell whether the report has membership scores."""
    return bool(audit.report.tables.select("membership", "auc"))


def says(number: int, said: Said, singular: str) -> bool:
    """Check a number and that its verb agrees."""
    return int(said["num"]) == number and (said["verb"] == singular) == (number == 1)


FLOOR = r"(?P<num>\d+) (?P<verb>document|documents) looked unlikely to be extractable"
DOCUMENTS = r"(?P<num>\d+) (?P<verb>document is|documents are)"
BANNERS: tuple[Sentence[Audit], ...] = (
    Sentence(
        name="model collapsed",
        pattern="The model predicts the same few tokens for every input: it seems collapsed. Low "
        r"rates then do not show what it has memorized\.",
        count=lambda a: int(is_collapsed(a)),
    ),
    Sentence(
        name="there is no control",
        pattern="There is no control: without documents that were never trained, memorization "
        "cannot be distinguished from text that the model could generate anyway, and there are no "
        "membership scores.",
        count=lambda a: int(a.control is None),
        holds=lambda a, _: not is_compared(a),
    ),
    Sentence(
        name="no control document",
        pattern="No control document is long enough to audit: the rates have no baseline.",
        count=lambda a: int(count_control(a) == (0, 0)),
        holds=lambda a, _: all(one.num_too_short for one in a.outline("control")),
    ),
    Sentence(
        name="control is extracted",
        pattern=r"(?P<num>\d+) of (?P<of>\d+) control documents are extracted "
        r"(?P<how>near-verbatim|verbatim) although they were never trained\. They may be "
        "near-duplicates of trained documents, text that the base model knew, or templates; the "
        r"difference from control then understates memorization\.",
        count=lambda a: int((count_control(a) or (0, 0))[0] > 0),
        holds=lambda a, said: (
            ((int(said["num"]), int(said["of"])), said["how"]) == greedy(a, a.control or "")
        ),
    ),
    Sentence(
        name="tally missing",
        pattern="The number of repetitions of each document is not known: no dose-response is "
        "shown.",
        count=lambda a: int(a.tally == "missing"),
        holds=lambda a, _: not a.report.dose_response,
    ),
    Sentence(
        name="tally contradicting",
        pattern="The counts of repetitions contradict the number of training steps: no "
        "dose-response is shown, and documents that count as trained may not have been trained.",
        count=lambda a: int(a.tally == "contradicting"),
        holds=lambda a, _: not a.report.dose_response,
    ),
    Sentence(
        name="never reached",
        pattern=r"(?P<num>\d+) of (?P<of>\d+) documents that should have been trained were "
        "never reached; they lower the rates of their bucket.",
        count=lambda a: int(count_missed(a)[0] > 0),
        holds=lambda a, said: (int(said["num"]), int(said["of"])) == count_missed(a),
    ),
    Sentence(
        name="not generated",
        pattern=rf"Near-verbatim extraction was not measured: {REASON}\. The verdict can then not "
        r"say that none was found\.",
        count=lambda a: int(not a.generated),
        holds=lambda a, _: a.report.verdict.level != "none-found",
    ),
    Sentence(
        name="forgotten",
        pattern=r"'forget' was to be forgotten: (?P<num>\d+) of (?P<of>\d+) of its documents are "
        r"still extracted (?P<how>near-verbatim|verbatim)(?:; (?P<base>\d+) from the model before "
        r"training)?\.",
        count=lambda a: len(a.outline("forget")),
        holds=is_forgotten,
    ),
    Sentence(
        name="floor: a sample",
        pattern=rf"{FLOOR}; we tested (?P<checked>\d+), none was\.",
        count=lambda a: int(a.below_floor[1] < a.below_floor[0]),
        holds=lambda a, said: (
            says(a.below_floor[0], said, "document")
            and a.below_floor[1:] == (int(said["checked"]), 0)
        ),
    ),
    Sentence(
        name="floor: all, some match",
        pattern=rf"{FLOOR}; a sample matched, so all were tested: (?P<matched>\d+) "
        r"(?:match|matches)\.",
        count=lambda a: int(a.below_floor[2] > 0),
        holds=lambda a, said: (
            says(a.below_floor[0], said, "document")
            and a.below_floor == (a.below_floor[1], a.below_floor[1], int(said["matched"]))
        ),
    ),
    Sentence(
        name="floor: all, none matches",
        pattern=rf"{FLOOR}; (?:all were tested, none was|it was tested and was not)\.",
        count=lambda a: int(0 < a.below_floor[0] == a.below_floor[1] and not a.below_floor[2]),
        holds=lambda a, said: says(a.below_floor[0], said, "document"),
    ),
    Sentence(
        name="few documents",
        pattern=r"Fewer than 30 documents in (?P<list>.+): the intervals are wide\.",
        count=lambda a: int(bool(list_few(a))),
        holds=lambda a, said: re.findall(r"'([^']+)' \((\d+)\)", said["list"]) == list_few(a),
    ),
    Sentence(
        name="too short",
        pattern=rf"{DOCUMENTS} too short to audit: trained or held out as planned, but not "
        r"included in the rates\.",
        count=lambda a: int(count_short(a) > 0),
        holds=lambda a, said: says(count_short(a), said, "document is"),
    ),
    Sentence(
        name="not sampled",
        pattern=rf"{DOCUMENTS} not in the sample that was scored\.",
        count=lambda a: int(count_left(a) > 0),
        holds=lambda a, said: says(count_left(a), said, "document is"),
    ),
    Sentence(
        name="tiny margins",
        pattern=r"(?P<num>\d+) (?P<verb>result depends|results depend) on a near-tie "
        rf"\(<{TINY_MARGIN} logits\) in the greedy text: another device or batch size could change "
        r"(?:it|them)\.",
        count=lambda a: int(count_hanging(a) > 0),
        holds=lambda a, said: says(count_hanging(a), said, "result depends"),
    ),
    Sentence(
        name="texts not compared",
        pattern="The bag-of-words classifier without access to the model was not run: it needs 5 "
        r"of either kind, near-duplicates counted once, and there are (?P<trained>\d+) trained and "
        r"(?P<control>\d+) control documents\. Whether the kind of text alone causes the "
        r"membership scores and the differences from the control is not known\.",
        count=lambda a: int(
            bool(a.report.tables.select("membership", "auc")) and min(count_texts(a)) < 5
        ),
        holds=lambda a, said: (int(said["trained"]), int(said["control"])) == count_texts(a),
    ),
    Sentence(
        name="no base model",
        pattern="The model before training was not scored: text that it already knew counts as if "
        "it had been learned in this training.",
        count=lambda a: int(not a.has_base),
    ),
)
