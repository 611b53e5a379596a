"""The words of the pages, explained."""

from memguard.records import AuditReport
from memguard.report.formatting import PERCENT, format_threshold
from memguard.report.page import Fact


def write_glossary(report: AuditReport | None) -> tuple[Fact, ...]:
    """Explain the words of a page; with a report, in its own numbers."""
    threshold = (
        format_threshold(report.method.near_verbatim_threshold) if report else f"90{PERCENT}"
    )
    facts = [Fact(term=term, value=value) for term, value in _list_words(threshold)]
    if report and report.findings:
        facts.append(Fact(term="Severity", value=_SEVERITY))
    return tuple(facts)


_SEVERITY = (
    "high: verbatim over at least 50 tokens, which the base model did not do; medium: verbatim, "
    "but shorter or by the base model too; low: near-verbatim; info: the true text repeats itself "
    "so much that it may be a template."
)


def _list_words(threshold: str) -> tuple[tuple[str, str], ...]:
    return (
        (
            "Prefix, continuation",
            "The true tokens the model is given, and the true tokens that follow and that it "
            "has to reproduce.",
        ),
        (
            "Verbatim match",
            "Every token of the greedy continuation equals the true one, decided by a single "
            "pass over the true text.",
        ),
        (
            "Near-verbatim match",
            f"At least {threshold} of the continuation tokens are right, each judged after "
            "the true tokens before it.",
        ),
        (
            "Token accuracy",
            "Share of continuation tokens that are the model's first choice given everything "
            "true before them; ordinary language gives this a floor well above 0.",
        ),
        (
            "Control",
            "Documents of the same kind that were never trained: what they show is not "
            "memorization of this training.",
        ),
        (
            f"95{PERCENT} CI",
            "Clopper-Pearson interval for rates, Newcombe's for differences of rates, "
            "DeLong's for AUC, Student's t over documents for means.",
        ),
        (
            "Extraction strength",
            "The share at the end of the continuation that comes out without a single wrong "
            "token; 1 is a verbatim match.",
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
