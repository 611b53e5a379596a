"""The words of the pages, explained."""

from memguard.records import NUM_RISK_QUERIES, AuditReport
from memguard.report.formatting import PERCENT, format_threshold
from memguard.report.page import Fact


def write_glossary(report: AuditReport | None, *, attacked: bool = False) -> tuple[Fact, ...]:
    """Explain the words of a page.

    Args:
        report: gives its own numbers, and which words its page has; None for a comparison.
        attacked: whether a comparison shows attack cost or attacks.
    """
    share = format_threshold(report.method.max_edit_share) if report else f"10{PERCENT}"
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
    return tuple(Fact(term=term, value=value) for term, value in words)


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
            f"floor well above 0. 90{PERCENT} teacher-forced counts documents with at least "
            f"90{PERCENT}. Neither is extraction: who lacks the text cannot supply it.",
        ),
        (
            "Control",
            "Documents of the same kind that were never trained: what they show is not "
            "memorization of this training.",
        ),
        (
            f"95{PERCENT} CI",
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
