"""Sentences of the pages: limits, next steps, and a glossary that explains their words.

Sober on purpose: a page says what was tried and what came out, never that a model is free of risk.
"""

from memguard.records import NUM_RISK_QUERIES, AuditReport
from memguard.report import formatting as fmt
from memguard.report.audit_probes import write_not_run, write_ran
from memguard.report.page import Fact

CONFIDENTIALITY = (
    "Contains no excerpts: documents appear by id and hash only. Ids, names and paths can tell "
    "something by themselves; share the page as you would share those."
)
COMPARISON_CONFIDENTIALITY = (
    "Contains no excerpts and no ids of documents. Names, settings and paths can tell something "
    "by themselves; share the page as you would share those."
)

READING_GUIDE = (
    "Lower is better on both axes: fewer documents extracted, and a lower loss on documents that "
    "were never trained.",
    "One wrong token breaks an exact match, so a setting that drops labels can reach 0 % verbatim "
    "while nearly all of a text is generated: near-verbatim counts that. Teacher-forced accuracy "
    "says what is known token by token to someone who has the true text, and is not extraction.",
)


def write_limits(report: AuditReport) -> tuple[str, ...]:
    """Say what this audit can and cannot tell, and which probes did not run."""
    method = report.method
    prefix = (
        f"{_write_everything(report)} before its last {method.continuation_tokens} tokens"
        if method.prefix_tokens is None
        else f"the {method.prefix_tokens} true tokens before the continuation"
    )
    not_run = write_not_run(report)
    return (
        _write_coverage(report),
        f"The attacker is assumed to know the prefix: each document is prompted with {prefix}. "
        "Someone without that text may get less out of the model.",
        _write_bound(report),
        f"Only these probes ran: {write_ran(report)}. They say nothing about facts or personal "
        "data repeated in other words.",
        *([f"Not run: {not_run}."] if not_run else []),
        _write_arithmetic(report),
    )


def _write_everything(report: AuditReport) -> str:
    """Say which text stands before a continuation."""
    if report.cut is None:
        return "everything"
    which, row = report.cut.window, report.cut.by == "training"
    what = f"{which} training piece" if row else f"{which} {report.cut.used_tokens:,} tokens"
    return f"everything (of {report.cut.num_documents:,} long documents: within the {what})"


def _write_bound(report: AuditReport) -> str:
    if report.attacks:
        return (
            "Rates, attack cost and attacks are lower bounds on what can be extracted: other "
            "prefixes, paraphrase, or a better attack may bring out more."
        )
    return (
        "Rates are a lower bound on what can be extracted: other prefixes, sampling, paraphrase or "
        "many attempts may bring out more than one greedy continuation does."
    )


def _write_coverage(report: AuditReport) -> str:
    scored = sum(bucket.num_documents for bucket in report.buckets)
    too_short = sum(bucket.num_too_short for bucket in report.buckets)
    others = sum(b.num_cut_too_short + b.num_nothing_supervised for b in report.buckets)
    not_sampled = sum(bucket.num_not_sampled for bucket in report.buckets)
    short = f"; {fmt.count(too_short)} were too short to audit and are not covered"
    short = short if too_short else ""
    if others:
        short += (
            f"; {fmt.count(others)} could not be audited for reasons given in the notes and are "
            "not covered"
        )
    if not_sampled:
        eligible = fmt.count(scored + not_sampled)
        return (
            f"A random sample was scored: {fmt.count(scored)} of {eligible} documents long "
            f"enough{short}. The intervals say how far the sample can mislead."
        )
    start = f"Every document long enough was scored: {fmt.count(scored)}"
    return f"{start}{short}. Intervals of rates treat documents as independent draws."


def _write_arithmetic(report: AuditReport) -> str:
    tiny = sum(bucket.num_tiny_margin for bucket in report.buckets)
    margin = fmt.number(report.method.tiny_margin)
    dtype = fmt.clean_text(report.method.dtype, 20)
    if tiny:
        hang = "1 result hangs" if tiny == 1 else f"{fmt.count(tiny)} results hang"
        return (
            f"Scored in {dtype}: {hang} on a gap of less than {margin} logits "
            "between the best two tokens; other hardware, batch sizes or precision could turn "
            f"{'it' if tiny == 1 else 'them'}."
        )
    return (
        f"Scored in {dtype}: no document's result hangs on a gap of less than {margin} logits "
        "between the best two tokens, so other arithmetic should give the same counts."
    )


def write_next_steps(report: AuditReport) -> tuple[str, ...]:
    """Say what to do now, most useful first."""
    steps = []
    level = report.verdict.level
    mitigations = report.training.mitigations if report.training else []
    has_goldfish = any(mitigation.get("name") == "goldfish" for mitigation in mitigations)
    if report.num_findings:
        steps.append(
            "Look at the findings below and decide whether these texts may be repeated in public; "
            "the same command with '--excerpts' writes their text to a private file."
        )
    if level == "recites":
        if report.training and not has_goldfish:
            steps.append(
                "Train again with 'mitigations: [{name: goldfish, k: 4}]' on the same documents "
                "and seed, and put both side by side: 'memguard compare RUN --fix' does both, with "
                "a lower k for the extracted doses alone where there are several."
            )
        elif has_goldfish:
            steps.append(
                "Goldfish loss was on and documents are still extracted: try a smaller k (more "
                "labels dropped), and compare risk and held-out NLL with this run: "
                "'memguard compare RUN --fix' does both."
            )
        steps.append(
            "Train documents fewer times: remove near-duplicates with the mitigation "
            "'deduplicate' ('--fix' does so first where copies are what is extracted), lower the "
            "number of epochs, or set a 'budget' that withholds labels of documents before they "
            "can be extracted."
        )
        steps.append(
            "If these weights have to be kept, train them on until they forget what is extracted: "
            "'memguard compare RUN --fix --keep-weights', or name documents in 'data.forget' "
            "beside the mitigation 'npo'; then audit again."
        )
    dropped = report.training is not None and bool(report.training.dropped_fraction)
    if dropped and not report.attacks:
        steps.append(
            "Audit once more with '--suite full': it tries an attacker who knows which tokens the "
            "mitigation dropped, whom exact match does not show."
        )
    if level == "no-control":
        way = "'data.control_fraction' above 0" if report.training else "'--nonmembers'"
        steps.append(
            f"Audit again with documents of the same kind that were never trained ({way}): "
            "without them a rate has no zero to be compared with."
        )
    if not report.training and not any(bucket.base for bucket in report.buckets):
        steps.append(
            "Name the model it was fine-tuned from ('--base'), if there is one: what that already "
            "recites was not learned here."
        )
    if level == "inconclusive":
        steps.append(
            "Score more documents, trained and control alike, and read the notes above the "
            "verdict: what was measured does not decide the question."
        )
    if report.data.overlap_with_control and report.data.overlap_with_control.num_matched:
        steps.append(
            "Some control documents still share a run of words with trained ones, which raises "
            "the control's rates: leave these out of the control before the next run."
        )
    if report.method.dtype != "fp32" and any(b.num_tiny_margin for b in report.buckets):
        steps.append("Audit once more with '--dtype fp32' to settle the tiny margins.")
    if level == "not-above-control":
        steps.append(
            "Keep this page with the weights it names, and audit again when documents, epochs or "
            "mitigations change: the result holds for these probes and these documents."
        )
    return tuple(steps)


def describe_overlap(report: AuditReport) -> Fact:
    """Say how far the control is from being independent of the trained documents."""
    overlap = report.data.overlap_with_control
    if overlap is None:
        return Fact("Overlap with control", "not measured")
    words = report.data.near_duplicate_words
    run = "a run of words" if words is None else f"a run of {words} words"
    return Fact(
        "Overlap with control",
        fmt.rate(overlap),
        detail=f"Control documents that share {run} with a trained one.",
    )


def describe_loss_change(nll: float | None, base: float | None) -> str:
    """Say how far a held-out NLL moved from the base model's."""
    if nll is None or base is None:
        return ""
    change = fmt.relative_change(nll, base)
    if change is None:
        return f"base model {fmt.number(base)}"
    direction = "below" if change < 0 else "above"
    moved = f"{fmt.percent(abs(change))} {direction}" if change else "the same as"
    return f"{moved} the base model's {fmt.number(base)}"


def write_glossary(report: AuditReport | None, *, attacked: bool = False) -> tuple[Fact, ...]:
    """Explain the words of a page.

    Args:
        report: gives its own numbers, and which words its page has; None for a comparison.
        attacked: whether a comparison shows attack cost or attacks.
    """
    share = fmt.threshold(report.method.max_edit_share) if report else f"10{fmt.PERCENT}"
    words = [*_list_words(share)]
    if attacked or (report and (report.attack_cost or report.attacks)):
        words += _ATTACK_WORDS
    if report is None:
        words += _FRONT_WORDS
    else:
        probes = {measure.probe for measure in report.measures}
        further = (
            (any(one.counterfactual for m in report.measures for one in m.buckets), _ADDED_WORDS),
            ("generation" in probes, _WRITING_WORDS),
            (any(score.tpr_at_fpr for score in report.membership), _MEMBERSHIP_WORDS),
            (report.canaries is not None, _CANARY_WORDS),
            (bool(report.extracted_copies), _COPY_WORDS),
            (bool(report.findings), (("Severity", _SEVERITY),)),
        )
        words += [word for is_shown, listed in further if is_shown for word in listed]
    return tuple(Fact(term, value) for term, value in words)


_SEVERITY = (
    "high: verbatim over at least 50 tokens, which the base model did not do; medium: verbatim, "
    "but shorter or by the base model too; low: near-verbatim; info: the true text repeats itself "
    "so much that it may be a template."
)

_FRONT_WORDS = (
    (
        "Risk",
        "The worst rate of extraction among the documents that a setting trained most often: "
        "verbatim or near-verbatim by greedy decoding, verbatim within "
        f"{NUM_RISK_QUERIES:,} sampled queries, verbatim by the best attack (each where every run "
        "measured it). Documents of all seeds count together.",
    ),
    (
        "Beaten",
        "Another setting is no worse in risk and in held-out NLL, and better in one of them "
        "(dominated, in Pareto's sense); beyond the intervals where each difference between the "
        "two is larger than their intervals.",
    ),
)
_ATTACK_WORDS = (
    (
        "Attack cost",
        "Queries until one answer is the true continuation with a probability of one half, by the "
        "cheapest of the ways tried (greedy, or drawing). 'never' where each of them leaves out "
        "a token that the text needs.",
    ),
    (
        "Adaptive attack",
        "An attacker who may submit several answers: the likeliest texts (beam search), drawn "
        "ones (sampling), or ones that fill in the tokens which the mitigation dropped.",
    ),
)
_ADDED_WORDS = (
    (
        "Counterfactual",
        "The model's number minus the base model's on the same documents: what this training "
        "added, with the base model for one that never saw the document.",
    ),
)
_WRITING_WORDS = (
    (
        "ROUGE-L",
        "F1 of the longest common subsequence of what was written and the true text: tokens in "
        "order, gaps allowed; 1 is the whole text.",
    ),
    (
        "Edit distance, BLEU",
        "Tokens to insert, delete or replace until the text is the true one, over its length; and "
        "shared runs of up to four tokens. BLEU above 0.75 counts as approximate memorization "
        "(Ippolito et al. 2022).",
    ),
)
_MEMBERSHIP_WORDS = (
    (
        "TPR at FPR",
        "Trained documents above a threshold that only this share of control documents passes: "
        "what an attacker who must seldom be wrong finds out.",
    ),
    (
        "Blind",
        "A bag of words that never asks the model. What it can tell apart, the documents give "
        "away by themselves.",
    ),
)
_CANARY_WORDS = (
    (
        "Canary, reference",
        "A made-up document with a random secret that was trained, and one of the same form whose "
        "coin fell on the other side, so that it never was.",
    ),
    (
        "Exposure",
        "log2 of the references over the secret's rank among them by likelihood, in bits: about 1 "
        "for a secret that left no trace, log2 of the references for one likelier than all.",
    ),
    (
        "Epsilon, lower bound",
        "How much the model can tell at least, in differential privacy's terms, of whether one "
        "canary with all its repetitions was trained: so many right guesses of the coins rule "
        "every smaller epsilon out for the training algorithm with these settings. Beside it is "
        "the most that this draw of coins could show. It is no guarantee, and nothing is known "
        "of an upper bound.",
    ),
)
_COPY_WORDS = (
    (
        "k-eidetic",
        "Recited verbatim although at most k trained documents hold the text (Carlini et al. "
        "2021).",
    ),
)


def _list_words(share: str) -> tuple[tuple[str, str], ...]:
    return (
        (
            "Prefix, continuation",
            "The true tokens the model is given, and the true tokens that follow and that it "
            "has to reproduce.",
        ),
        (
            "Verbatim match",
            "Every token of the greedy continuation equals the true one, decided by a single "
            "teacher-forced pass: greedy decoding follows the true text exactly where each true "
            "token is the first choice given those before it.",
        ),
        (
            "Near-verbatim match",
            "The greedy continuation, really generated from the prefix and never corrected, is "
            f"at most {share} of its tokens away from the true one (insertions, deletions and "
            "replacements of tokens; end-of-text tokens are suppressed). The rule of the reports "
            "on Gemini 1.5 and Gemma.",
        ),
        (
            "Teacher-forced",
            "Each token is predicted given the true text before it, also after wrong predictions. "
            "Token accuracy is the share of tokens predicted right; ordinary language gives it a "
            f"floor well above 0. 90{fmt.PERCENT} teacher-forced counts documents with at least "
            f"90{fmt.PERCENT}. Neither is extraction: who lacks the text cannot supply it.",
        ),
        (
            "Control",
            "Documents of the same kind that were never trained: what they show is not "
            "memorization of this training.",
        ),
        (
            f"95{fmt.PERCENT} CI",
            "Clopper-Pearson interval for rates, Newcombe's for differences of rates, "
            "DeLong's for AUC; for means a jackknife over clusters of near-duplicates.",
        ),
        (
            "Extraction strength",
            "The share at the end of the continuation that is predicted without a wrong token, "
            "teacher-forced; 1 is a verbatim match.",
        ),
        (
            "NLL, log-probability",
            "Natural logarithm, per token: 0 is certainty. Held-out NLL is measured on "
            "documents that were never trained; lower is better.",
        ),
        (
            "Type-token ratio",
            "Distinct tokens / tokens. Where it is low for the text, the text is a template; "
            "where it is low for the model's choices only, the model repeats itself.",
        ),
    )
