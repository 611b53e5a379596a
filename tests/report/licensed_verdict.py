"""The sentences that a verdict may hold, and the numbers that license each."""

import math
import re
from collections import Counter
from collections.abc import Callable

from licensed_audits import Audit, Document
from licensed_checks import PERCENT, Said, Sentence, is_share
from licensed_rule import (
    Compared,
    count,
    count_clusters,
    count_not_sampled,
    count_secrets,
    count_too_short,
    decide,
    is_by_attack,
    is_extracted,
    is_new,
    is_of_base,
    is_out,
    list_attacked,
    list_role,
    list_significant,
    list_trained,
)
from scipy import stats

# -- What a sentence counts.


def is_by_attacks(audit: Audit) -> bool:
    """Tell whether attacks alone extract trained documents, where no test decided."""
    trained = list_trained(audit)
    return not any(is_extracted(audit, one) for one in trained) and any(map(is_by_attack, trained))


def count_unseen(audit: Audit, *, by_attacks: bool = False) -> tuple[int, int]:
    """Return the control documents that came out as the trained ones did, or else in any way."""
    control = list_role(audit, "control")
    same = count(control, lambda one: is_extracted(audit, one))
    if by_attacks:
        same = count(list_attacked(control), is_by_attack)
    by_any = count(control, lambda one: is_out(audit, one))
    return same if same[0] or not by_any[0] else by_any


def list_named(audit: Audit, said: Said) -> list[Document]:
    """Return the trained documents that a sentence names."""
    trained = list_trained(audit)
    if said["times"]:
        number = 1 if said["times"] == "once" else int(said["times"].removesuffix(" times"))
        (bucket,) = [o.bucket for o in audit.outline("trained") if o.num_repetitions == number]
        trained = [one for one in trained if one.bucket == bucket]
    if said["bucket"]:
        trained = [one for one in trained if one.bucket == said["bucket"]]
    return trained


def read(said: Said, prefix: str = "") -> tuple[int, int]:
    """Return the two numbers of "1 of 2"."""
    return int(said[f"{prefix}num"]), int(said[f"{prefix}of"])


def find_test(audit: Audit, said: Said, *, by_attack: bool = False) -> Compared | None:
    """Return the significant test of the documents that a sentence names; it has the top rate."""
    mine = list_attacked(list_trained(audit)) if by_attack else list_named(audit, said)
    significant = list_significant(audit)
    rates = {}
    for number, one in enumerate(significant):
        k, n = count_clusters(
            one.trained, lambda each, one=one: is_new(audit, each, by_attack=one.by_attack)
        )
        rates[number] = k / n
    for number, one in enumerate(significant):
        is_mine = one.by_attack == by_attack and list(one.trained) == mine
        if is_mine and math.isclose(rates[number], max(rates.values())):
            return one
    return None


def is_whole(audit: Audit, test: Compared) -> bool:
    """Tell whether the base model gives none of what came out in a test."""
    out = [one for one in (*test.trained, *test.control) if _is_out_by(audit, one, test.by_attack)]
    return not any(is_of_base(audit, one) for one in out)


def _is_out_by(audit: Audit, one: Document, by_attack: bool) -> bool:
    return is_by_attack(one) if by_attack else is_extracted(audit, one)


def is_memorized(audit: Audit, said: Said, *, by_attack: bool, whole: bool) -> bool:
    test = find_test(audit, said, by_attack=by_attack)
    if test is None or is_whole(audit, test) != whole:
        return False

    def counts(one: Document) -> bool:
        return is_new(audit, one, by_attack=by_attack)

    mine, other = count(test.trained, counts), count(test.control, counts)
    return (read(said), read(said, "c")) == (mine, other)


def is_red(audit: Audit, *, by_attack: bool, whole: bool) -> int:
    """Return whether a sentence of a test is wanted: the one whose test has the highest rate."""
    if decide(audit) != ("memorized", "control"):
        return 0
    wanted = audit.report.verdict.test
    assert wanted is not None, "it decided"
    found = [
        one for one in list_significant(audit)
        if one.by_attack == (wanted.documents == "attacked")
        and (wanted.bucket is None or {each.bucket for each in one.trained} == {wanted.bucket})
    ]  # fmt: skip
    test = found[0] if wanted.bucket is None else found[-1]
    return int(test.by_attack == by_attack and is_whole(audit, test) == whole)


def is_amber(audit: Audit, reason: str, *, by_attacks: bool) -> int:
    if decide(audit) != ("extracted", reason):
        return 0
    if reason == "other-kind":
        wanted = audit.report.verdict.test
        assert wanted is not None, "it was significant"
        return int((wanted.documents == "attacked") == by_attacks)
    return int(is_by_attacks(audit) == by_attacks)


def count_known(audit: Audit, *, by_attacks: bool) -> int:
    """Return the trained documents that came out and that the base model gives too."""
    return sum(
        _is_out_by(audit, one, by_attacks) and is_of_base(audit, one) for one in list_trained(audit)
    )


def is_open(audit: Audit, said: Said, *, by_attacks: bool) -> bool:
    """Check the counts of trained documents of an amber sentence, and its verb."""
    if by_attacks:
        return read(said) == count(list_attacked(list_trained(audit)), is_by_attack)
    mine = count(list_named(audit, said), lambda one: is_extracted(audit, one))
    return read(said) == mine and said["verb"] == ("was" if mine[0] == 1 else "were")


def is_rest(audit: Audit, said: Said) -> bool:
    """Check what a sentence without extraction says of others: control, references, both."""
    unseen, references = count_unseen(audit), count_secrets(audit)[1]
    if unseen[0] and references:
        return said["both"] == str(unseen[0] + references)
    if unseen[0]:
        return said["cnum"] is not None and read(said, "c") == unseen
    if references:
        assert audit.secrets is not None, "they came out"
        return said["rnum"] is not None and read(said, "r") == (
            references,
            audit.secrets.num_references,
        )
    return said["both"] is said["cnum"] is said["rnum"] is None


def is_none(audit: Audit, said: Said) -> bool:
    num_trained = len(list_trained(audit))
    told = 1 if said["of"] is None else int(said["of"])
    return told == num_trained and is_rest(audit, said)


def is_bounded(audit: Audit, said: Said) -> bool:
    trained = list_trained(audit)
    sizes = Counter(-1 - n if one.cluster is None else one.cluster for n, one in enumerate(trained))
    # Copies are less evidence than so many texts: 0 of so many documents, as beta-binomials count.
    effective = len(trained) ** 2 / sum(size**2 for size in sizes.values())
    return is_none(audit, said) and is_share(said["high"], 1 - 0.025 ** (1 / effective))


NUMBERS = r"(?P<{0}num>[\d,]+) of (?P<{0}of>[\d,]+)"
MINE = (
    rf"{NUMBERS.format('')} (?:training documents|documents (?:trained (?P<times>once|[\d,]+ "
    r"times)|of '(?P<bucket>[^']+)'))"
)
ATTACKED = rf"Attacks extracted {NUMBERS.format('')} attacked training documents"
UNSEEN = rf"{NUMBERS.format('c')} unseen ones"
OTHERS = (
    rf"(?:, but (?:(?P<both>\d+) unseen texts were|{NUMBERS.format('c')} unseen (?:was|were)|"
    rf"{NUMBERS.format('r')} references? (?:was|were)))?"
)
NONE = (
    r"(?:None of the (?P<of>\d+) training documents was extracted|The only training document was "
    r"not extracted)"
)
MEMORIZED = r": the model memorized training text\."
ENDINGS = {
    "no-control": "; without unseen documents the cause cannot be told",
    "base-too": "; the base model produces (?:it|them) too",
    "other-kind": "; the control is another kind of text, which may explain this",
}
WHY = {
    "collapsed": "the model seems collapsed",
    "not-generated": "near-verbatim text was not tested",
    "too-short": "most trained documents were too short",
    "too-few": "too few to say more",
}


def _list_amber(*, by: bool) -> list[Sentence[Audit]]:
    """List what an amber verdict says of documents; ``by`` attacks alone or not."""
    start = ATTACKED if by else rf"{MINE} (?P<verb>was|were) extracted"
    too = rf"; {UNSEEN} (?:was|were) extracted" if by else rf", and {UNSEEN} too"
    name = " by attacks" if by else ""

    def ask(reason: str) -> Callable[[Audit], int]:
        return lambda audit: is_amber(audit, reason, by_attacks=by)

    def holds(audit: Audit, said: Said) -> bool:
        return is_open(audit, said, by_attacks=by)

    def holds_unseen(audit: Audit, said: Said) -> bool:
        return holds(audit, said) and read(said, "c") == count_unseen(audit, by_attacks=by)

    def known(audit: Audit) -> int:
        return count_known(audit, by_attacks=by)

    return [
        *(
            Sentence(
                name=f"{reason}{name}",
                pattern=rf"{start}{ending}\.",
                count=ask(reason),
                holds=holds,
            )
            for reason, ending in ENDINGS.items()
        ),
        Sentence(
            name=f"control-too{name}",
            pattern=rf"{start}{too}: chance is not excluded\.",
            count=ask("control-too"),
            holds=lambda a, said: holds_unseen(a, said) and int(said["cnum"]) > 0,
        ),
        Sentence(
            name=f"too-few{name}",
            pattern=rf"{start}, {UNSEEN}: too few to tell the cause\.",
            count=lambda a: ask("too-few")(a) * (not known(a)),
            holds=holds_unseen,
        ),
        Sentence(
            name=f"too-few beside the base's{name}",
            pattern=rf"{start}, (?P<known>\d+) also from the base model: too few others to "
            r"tell why\.",
            count=lambda a: ask("too-few")(a) * bool(known(a)),
            holds=lambda a, said: holds(a, said) and int(said["known"]) == known(a),
        ),
    ]


def _make_red(*, by: bool, whole: bool) -> Sentence[Audit]:
    """Return what a red verdict says of documents, all of them unknown to the base or in part."""
    if whole:
        out = "" if by else " (?:was|were) extracted"
        end = rf"{out}, {UNSEEN}{MEMORIZED}"
    else:
        out = "" if by else ", (?:was|were) extracted"
        end = rf", unknown to the base model{out}; {UNSEEN}\."
    how = "by attacks" if by else "greedy or sampled"
    return Sentence(
        name=f"memorized, {how}, {'all' if whole else 'in part'}",
        pattern=(ATTACKED if by else MINE) + end,
        count=lambda a: is_red(a, by_attack=by, whole=whole),
        holds=lambda a, said: is_memorized(a, said, by_attack=by, whole=whole),
    )


def is_canary(audit: Audit, said: Said) -> bool:
    assert audit.secrets is not None, "one came out"
    secrets = audit.secrets
    mine = (secrets.num_trained_extracted, secrets.num_trained)
    told = said.groupdict()
    other = (int(told.get("rnum") or 0), int(told["rof"]))
    wanted = secrets.num_references_extracted, secrets.num_references
    return (read(said), other) == (mine, wanted)


def is_forgotten(audit: Audit, said: Said) -> bool:
    trained = list_trained(audit)
    other = count(trained, lambda one: is_extracted(audit, one))
    told = read(said, "c") if said["cnum"] is not None else None
    return (
        read(said) == count(list_role(audit, "forget"), lambda one: is_out(audit, one))
        and (said["verb"] == "is") == (said["num"] == "1")
        and told == (other if trained else None)
    )


CANARIES = rf"{NUMBERS.format('')} trained canar(?:y|ies) (?:was|were) extracted"
VERDICT: tuple[Sentence[Audit], ...] = (
    *(_make_red(by=by, whole=whole) for by in (False, True) for whole in (True, False)),
    Sentence(
        name="canaries",
        pattern=rf"{CANARIES}, none of (?P<rof>\d+) references?: the model memorized random "
        r"secrets\.",
        count=lambda a: int(decide(a) == ("memorized", "canaries")),
        holds=is_canary,
    ),
    *_list_amber(by=False),
    *_list_amber(by=True),
    Sentence(
        name="forgotten is extracted",
        pattern=rf"{NUMBERS.format('')} documents to be forgotten (?P<verb>is|are) still extracted"
        rf"(?:, {NUMBERS.format('c')} training documents|; no audited document was trained in "
        r"full)\.",
        count=lambda a: int(decide(a) == ("extracted", "forgotten")),
        holds=is_forgotten,
    ),
    Sentence(
        name="canaries-too",
        pattern=rf"{CANARIES}, and {NUMBERS.format('r')} references? too: chance is not excluded\.",
        count=lambda a: int(decide(a) == ("extracted", "canaries-too")),
        holds=is_canary,
    ),
    Sentence(
        name="none-found",
        pattern=rf"{NONE} \(true share up to (?P<high>{PERCENT})\){OTHERS}\.",
        count=lambda a: int(decide(a)[0] == "none-found"),
        holds=is_bounded,
    ),
    Sentence(
        name="not-trained",
        pattern=rf"No audited document was trained in full{OTHERS}; nothing can be said\.",
        count=lambda a: int(decide(a) == ("inconclusive", "not-trained")),
        holds=is_rest,
    ),
    *(
        Sentence(
            name=f"none, {reason}",
            pattern=rf"{NONE}{OTHERS}; {why}\.",
            count=lambda a, reason=reason: int(decide(a) == ("inconclusive", reason)),
            holds=is_none,
        )
        for reason, why in WHY.items()
    ),
)


# -- The second line.


def list_scores(audit: Audit) -> tuple[list[float], list[float]] | None:
    """Return the scores of trained and control documents, of the first by id of each cluster."""
    if not audit.asks or not list_role(audit, "control"):
        return None
    ids = [f"d{number}" for number in range(len(audit.documents))]
    found: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for name, one in sorted(zip(ids, audit.documents, strict=True), key=lambda pair: pair[0]):
        if not (one.is_trained or one.role == "control"):
            continue
        cluster = -int(name[1:]) - 1 if one.cluster is None else one.cluster
        score = one.loss - (one.base_loss if audit.has_base else 0)
        found[one.is_trained].setdefault(cluster, score)
    return list(found[True].values()), list(found[False].values())


def is_auc(audit: Audit, said: Said) -> bool:
    """Check an AUC by SciPy's Mann-Whitney U, and that the record has the interval."""
    scores = list_scores(audit)
    auc = audit.report.verdict.membership.auc
    assert scores is not None, "it was measured"
    assert auc is not None, "it was measured"
    assert auc.ci is not None, "a level needs it"
    members, nonmembers = scores
    share = stats.mannwhitneyu(members, nonmembers).statistic / (len(members) * len(nonmembers))
    told = [float(said[name]) for name in ("auc", "low", "high")]
    # Half of the last of two digits.
    return all(
        abs(one - other) <= 0.00501 for one, other in zip(told, (share, *auc.ci), strict=True)
    )


def judge(audit: Audit) -> str:
    """Return the level of membership, from the interval of the record."""
    scores = list_scores(audit)
    if scores is None:
        return "not-measured"
    if audit.is_other_kind:
        return "other-kind"
    auc = audit.report.verdict.membership.auc
    num_members, num_control = map(len, scores)
    low, high = (0.5, 0.5) if auc is None or auc.ci is None else auc.ci
    if min(num_members, num_control) >= 10 and (low >= 0.6 or high <= 0.4):
        return "told-apart"
    if num_control < 30:
        return "few controls"
    if num_members < 2:
        return "few trained"
    return "not-seen" if low <= 0.5 <= high else "slightly"


AUC = (
    r"AUC (?P<auc>[\d.]+) \(95 % CI (?P<low>[\d.]+)–(?P<high>[\d.]+); 0\.5 is chance\)\."
)  # fmt: skip
TOLD = r"Whether a document was trained can be told"
CANNOT = r"Whether a document was trained cannot be judged: "


def is_few(audit: Audit, said: Said) -> bool:
    scores = list_scores(audit)
    assert scores is not None, "it was measured"
    return int(said["num"]) == len(scores[said["what"] == "unseen"])


MEMBERSHIP: tuple[Sentence[Audit], ...] = (
    *(
        Sentence(
            name=level,
            pattern=rf"{TOLD}{how}(?P<lower>, by lower scores)?: {AUC}",
            count=lambda a, level=level: int(judge(a) == level),
            holds=lambda a, said: (
                is_auc(a, said) and (said["lower"] is None) == (said["auc"] > "0.5")
            ),
        )
        for level, how in (("told-apart", ""), ("slightly", " slightly better than by chance"))
    ),
    Sentence(
        name="not-seen",
        pattern=rf"The model gave no sign of whether a document was trained: {AUC}",
        count=lambda a: int(judge(a) == "not-seen"),
        holds=is_auc,
    ),
    Sentence(
        name="few controls",
        pattern=rf"{CANNOT}it needs 30 (?P<what>unseen) texts, there (?:is|are) (?P<num>\d+)\.",
        count=lambda a: int(judge(a) == "few controls"),
        holds=is_few,
    ),
    Sentence(
        name="few trained",
        pattern=rf"{CANNOT}it needs two (?P<what>trained) texts, there (?:is|are) (?P<num>\d+)\.",
        count=lambda a: int(judge(a) == "few trained"),
        holds=is_few,
    ),
    Sentence(
        name="control of another kind",
        pattern=rf"{CANNOT}the control is another kind of text\.",
        count=lambda a: int(judge(a) == "other-kind"),
    ),
    Sentence(
        name="not-measured",
        pattern=r"Whether a document was trained was not tested: (?P<why>the suite has no "
        r"membership score|there are no unseen ones)\.",
        count=lambda a: int(judge(a) == "not-measured"),
        holds=lambda a, said: ("unseen" in said["why"]) == (not list_role(a, "control")),
    ),
)


# -- What was audited, what else came out, what was not run.


def is_audited(audit: Audit, said: Said) -> bool:
    trained = list_trained(audit)
    texts = count_clusters(trained, lambda _: True)[1]
    attacked = len(list_attacked(trained))
    short, left = count_too_short(audit), count_not_sampled(audit)
    total = len(trained) + short + left
    return (
        read(said) == (len(trained), total)
        and said["texts"] == (None if texts == len(trained) else str(texts))
        and said["short"] == (str(short) if short else None)
        and said["left"] == (str(left) if left else None)
        and said["attacked"] == (str(attacked) if attacked else None)
        and said["aof"] == (str(len(trained)) if attacked else None)
    )


def is_more(audit: Audit, said: Said) -> bool:
    """Check what else was extracted: the number of one role."""
    role = {"trained": "trained", "unseen": "control", "to be forgotten": "forget"}[said["what"]]
    documents = list_trained(audit) if role == "trained" else list_role(audit, role)
    greedy = count(documents, lambda one: is_extracted(audit, one))
    by_any = count(documents, lambda one: is_out(audit, one))
    wanted = greedy if role == "trained" else by_any
    return read(said) == wanted and (said["too"] is not None) == (wanted != greedy)


def list_more(audit: Audit) -> list[str]:
    """Return the kinds of documents that came out and that the sentence does not count in full."""
    level, reason = decide(audit)
    sentence = audit.report.verdict.sentence
    trained, control = list_trained(audit), list_role(audit, "control")
    greedy = count(trained, lambda one: is_extracted(audit, one))
    by_any = count(control, lambda one: is_out(audit, one))
    forgotten = count(list_role(audit, "forget"), lambda one: is_out(audit, one))
    more = []
    if greedy[0] and f"{greedy[0]} of {greedy[1]} training documents" not in sentence:
        # A bucket's documents may have the same counts under another name.
        more.append("trained")
    if forgotten[0] and reason != "forgotten":
        more.append("to be forgotten")
    if by_any[0] and f"{by_any[0]} of {by_any[1]} unseen" not in sentence:
        both = level in ("none-found", "inconclusive") and "unseen texts were" in sentence
        if not both or count_unseen(audit) != by_any:
            more.append("unseen")
    return more


def has_attacks_to_tell(audit: Audit) -> bool:
    trained = list_attacked(list_trained(audit))
    is_told = audit.report.verdict.sentence.startswith("Attacks")
    return any(map(is_by_attack, trained)) and not is_told


def has_secrets_to_tell(audit: Audit) -> bool:
    reason = decide(audit)[1]
    canaries, references = count_secrets(audit)
    if reason in ("canaries", "canaries-too") or not (canaries or references):
        return False
    named = re.search(r"references? (?:was|were)", audit.report.verdict.sentence)
    return canaries > 0 or named is None


def list_not_run(audit: Audit) -> list[str]:
    return [run.name for run in audit.report.probe_runs if run.num_documents is None]


SCOPE: tuple[Sentence[Audit], ...] = (
    Sentence(
        name="audited",
        pattern=rf"Audited: {NUMBERS.format('')} trained documents?"
        r"(?:, (?P<texts>\d+) different texts?)?"
        r"(?: \((?:(?P<short>\d+) too short or not auditable(?:, )?)?"
        r"(?:(?P<left>\d+) not in the sample)?\))?; "
        r"(?:attacked: (?P<attacked>\d+) of (?P<aof>\d+)|none was attacked)\.",
        count=lambda _: 1,
        holds=is_audited,
    ),
    *(
        Sentence(
            name=f"{what} came out too",
            pattern=rf"{NUMBERS.format('')} {words} extracted(?P<too>, attacks included)?\.",
            count=lambda a, what=what: int(what in list_more(a)),
            holds=is_more,
        )
        for what, words in (
            ("trained", "(?P<what>trained) documents"),
            ("unseen", "(?P<what>unseen) documents"),
            ("to be forgotten", "documents (?P<what>to be forgotten)"),
        )
    ),
    Sentence(
        name="attacks came out too",
        pattern=rf"Attacks extracted {NUMBERS.format('')} trained documents\.",
        count=lambda a: int(has_attacks_to_tell(a)),
        holds=lambda a, said: read(said) == count(list_attacked(list_trained(a)), is_by_attack),
    ),
    Sentence(
        name="canaries came out too",
        pattern=rf"{NUMBERS.format('')} trained canaries and {NUMBERS.format('r')} references "
        r"extracted\.",
        count=lambda a: int(has_secrets_to_tell(a)),
        holds=lambda a, said: (
            a.secrets is not None
            and read(said) == (a.secrets.num_trained_extracted, a.secrets.num_trained)
            and read(said, "r") == (a.secrets.num_references_extracted, a.secrets.num_references)
        ),
    ),
    Sentence(
        name="left out of the control",
        pattern=r"(?P<num>\d+) given control documents left out: near-duplicates of trained ones\.",
        count=lambda a: int(any(one.num_near_duplicates for one in a.outlines)),
        holds=lambda a, said: int(said["num"]) == sum(o.num_near_duplicates for o in a.outlines),
    ),
    Sentence(
        name="not run",
        pattern=r"Not run: (?P<list>.+)\.",
        count=lambda a: int(bool(list_not_run(a))),
        holds=lambda a, said: said["list"].split(", ") == list_not_run(a),
    ),
    Sentence(
        name="nothing generated",
        pattern=r"Near-verbatim text was not generated\.",
        count=lambda a: int(not a.generated),
    ),
)
