"""summary.md, read by markdown-it: an independent parser shows what a reader would see."""

import report_examples as examples
from gate_results import make_acceptance, make_judgement, make_mixed, make_result, make_unjudged
from markdown_it import MarkdownIt
from markdown_it.token import Token

from memguard.gate.rendered import code, escape, render_summary
from memguard.records import AuditReport
from memguard.records.gate import GateResult

HOSTILE = "a|b\\|c`d` <img src=x onerror=y> [z](http://e.org) **w** @ada #12 \n# t \ud800"
GREEN = {"level": "none-found", "verdict": "None found. 0 of 40 training documents were extracted."}
# GitHub's comments are cut at this length.
LONGEST_COMMENT = 65_536


def parse(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def read_tables(text: str) -> list[list[list[str]]]:
    """Return the cells of each table, as a reader sees them."""
    tables: list[list[list[str]]] = []
    for token in parse(text):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type == "inline" and tables and token.level >= 4:
            tables[-1][-1].append(show(token))
    return tables


def show(token: Token) -> str:
    shown = (
        child.content for child in token.children or () if child.type in ("text", "code_inline")
    )
    return "".join(shown)


def render(result: GateResult, report: AuditReport | None = None) -> str:
    return render_summary(result, report or examples.make_report())


def test_the_gate_and_the_verdict_are_side_by_side() -> None:
    text = render(make_mixed())
    assert text.startswith(
        "## memguard gate: fail (exit code 10)\n\n**Do not release: 65 documents"
    )
    side_by_side = read_tables(text)[0]
    assert side_by_side[0] == ["Gate", "Text", "Membership", "Verdict of the audit"]
    assert side_by_side[1][:2] == ["❌ Fail", "Text: Memorized (40 of 40 documents)"]
    assert side_by_side[1][3].startswith("Memorized. 40 of 40 documents trained 64 times")
    assert "The gate passes" not in text


def test_a_pass_under_a_verdict_that_alarms_is_said() -> None:
    passed = make_judgement("pass")
    warning = "The gate passes, but the verdict of the audit is 'Memorized'"
    assert warning in render(make_result(passed))
    for level in ("extracted", "inconclusive"):
        assert "The gate passes, but" in render(make_result(passed, level=level))
    assert "The gate passes, but" not in render(make_result(passed, **GREEN))


def test_judgements_are_in_the_order_in_which_they_decide() -> None:
    rows = read_tables(render(make_mixed()))[1]
    assert rows[0] == [
        *("Outcome", "Rule", "Counts", "Value", "95\u00a0% interval", "Limit"),
        "Documents needed",
    ]
    outcomes = [row[0].split(" ", 1)[1] for row in rows[1:]]
    assert outcomes == ["Fail", "Fail", "Cannot be judged", "Inconclusive", "Pass", "Pass", "Pass"]
    # Clopper and Pearson's interval of 2 of 40, as R's binom.test gives it: 0.0061 to 0.169.
    assert rows[4][1:] == [
        *("attack on r4 at most 10 %", "2\u00a0of\u00a040", "5.0\u00a0%", "0.61–16.9\u00a0%"),
        *("10\u00a0%", "154"),
    ]
    # Epsilon is no share, and has no interval.
    assert rows[7][2:] == ["–", "3", "no interval", "8", "–"]


def test_no_number_of_documents_decides() -> None:
    judgement = make_judgement("inconclusive", 4, num_documents_needed=None)
    assert read_tables(render(make_result(judgement)))[1][1][-1] == "no number decides"


def test_a_comparison_is_in_percentage_points() -> None:
    judgement = make_judgement("pass", 3, compared_with="control", low=-0.02, high=0.11)
    row = read_tables(render(make_result(judgement)))[1][1]
    assert row[3:6] == ["+7.5\u00a0pp", "\u22122.0 to +11.0\u00a0pp", "10\u00a0pp"]


def test_what_cannot_be_judged_is_explained() -> None:
    text = render(make_result(make_unjudged()))
    assert "did you mean 'near\\_verbatim'?" in text
    assert "exit code 12" in text


def test_what_did_not_run_is_listed_with_its_reason() -> None:
    report = examples.make_report()
    runs = [*report.probe_runs, examples.make_probe_run("sampling", None)]
    runs[-1] = runs[-1].model_copy(update={"reason_not_run": "no room in /home/ada/cache"})
    text = render(make_mixed(), report.model_copy(update={"probe_runs": runs}))
    assert "- `sampling`: no room in \\(local path\\)" in text
    assert "Every probe of the suite ran" not in text
    assert "Every probe of the suite ran: `extraction`, `membership`." in render(make_mixed())


def test_acceptances_are_counted_and_listed_expired_first() -> None:
    result = make_result(
        accepted=[
            make_acceptance("aa"),
            make_acceptance("bb", "not-found", until=None),
            make_acceptance("cc", "expired", until="2026-10-01"),
        ]
    )
    text = render(result)
    assert (
        "65 documents came out. Accepted in the triage file: 1 in force; 1 expired, counted again; "
        "1 not in this audit. Rates stay as measured."
    ) in text
    rows = read_tables(text)[2]
    assert [row[:2] for row in rows[1:]] == [
        ["expired", "cc"],
        ["not in this audit", "bb"],
        ["accepted", "aa"],
    ]
    assert rows[2][3] == "without end"
    assert "None was accepted by a person." in render(make_mixed())
    assert "could not be counted" in render(make_result(num_findings=None))


def test_how_intervals_are_meant_is_said() -> None:
    text = render(make_mixed())
    assert "two-sided 95\u00a0% intervals, of clusters where documents are copies" in text
    assert "not corrected for the number of rules and buckets" in text


def test_hostile_names_stay_in_their_cell() -> None:
    judgements = [
        make_judgement(outcome, name=HOSTILE, sentence=HOSTILE, bucket=HOSTILE)
        for outcome in ("fail", "inconclusive", "cannot-be-judged")
    ]
    accepted = make_acceptance(HOSTILE, by=HOSTILE, reason=HOSTILE, until=HOSTILE)
    report = examples.make_report()
    run = examples.make_probe_run(HOSTILE, None).model_copy(update={"reason_not_run": HOSTILE})
    report = report.model_copy(update={"probe_runs": [run]})
    result = make_result(*judgements, accepted=[accepted], audit=HOSTILE, verdict=HOSTILE)
    text = render(result, report)
    assert text == render(result.model_copy(deep=True), report)
    text.encode()
    tokens = parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    assert not {"link_open", "image", "em_open"} & {token.type for token in inline}
    assert {t.content for t in inline if t.type == "html_inline"} == {"<!-- -->"}
    assert "html_block" not in {token.type for token in tokens}
    headings = [show(tokens[n + 1]) for n, t in enumerate(tokens) if t.type == "heading_open"]
    assert headings[1:] == [
        *("Judgements", "Not run", "Documents that were accepted", "How to read this")
    ]
    widths = [{len(row) for row in table} for table in read_tables(text)]
    assert widths == [{4}, {7}, {5}]
    # Bold text is memguard's own; the escaped one is shown with its asterisks.
    assert "**w**" in read_tables(text)[0][1][3]


def test_mentions_and_issue_numbers_notify_nobody() -> None:
    # An empty comment is not shown, and GitHub finds no name or number after it.
    assert escape("ask @ada about #12") == "ask @<!-- -->ada about #<!-- -->12"
    assert escape("see https://e.org") == "see https<!-- -->://e.org"
    assert escape("1. x") == "1\\. x"
    assert escape("62.5 %") == "62.5 %"
    assert code("a`b|c\n") == "`a'b¦c `"
    assert code("") == "`(empty)`"


def test_many_judgements_fit_a_comment_worst_first() -> None:
    passed = [
        make_judgement("pass", rule=n, name=f"{n} {'x' * 400}", bucket=f"b{n}") for n in range(500)
    ]
    failed = [make_judgement("fail", 40, rule=n, name=f"f{n} {'y' * 400}") for n in range(30)]
    accepted = [make_acceptance(f"{n}:x", reason="why " * 200) for n in range(500)]
    text = render(make_result(*passed, *failed, accepted=accepted))
    assert len(text) < LONGEST_COMMENT
    assert "And 470 more in `gate.json`." in text
    assert "and 10 more in `gate.json`" in text
    rows = read_tables(text)[1]
    assert [row[0] for row in rows[1:31]] == ["❌ Fail"] * 30


def test_no_document_is_named() -> None:
    report = examples.make_report()
    text = render(make_mixed(), report)
    for finding in report.findings:
        assert finding.id not in text
        assert finding.text_hmac is not None
        assert finding.text_hmac not in text
