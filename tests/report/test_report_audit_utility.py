"""The section "Utility" of an audit's page, its lines in the terminal and on the model card."""

import math
import re

import pytest
import report_examples as examples
from result_examples import make_tables
from task_examples import make_metric, make_task

from memguard import records as r
from memguard.audit.benchmarks.rows import tabulate_utility
from memguard.errors import RecordError
from memguard.gate.template import render_policy
from memguard.records.utility import TaskResult
from memguard.report.audit_training import build_utility, describe_utility
from memguard.report.html import render_report

QUIZ = [1.0] * 30 + [0.0] * 20
BASE = [1.0] * 10 + [0.0] * 10 + [1.0] * 2 + [0.0] * 28


def make_report(*results: TaskResult) -> r.AuditReport:
    report = examples.make_report()
    tables = r.merge_tables([report.tables, tabulate_utility(results, seed=0)])
    return report.model_copy(update={"tables": tables})


def make_answered() -> r.AuditReport:
    words = {"weights": [6.0, 8.0] * 25, "higher": False, "aggregation": "weighted_perplexity"}
    logprobs = [-20.0 - n % 7 for n in range(50)]
    return make_report(
        make_task(
            "quiz",
            "trained",
            make_metric("acc", QUIZ),
            make_metric("acc_norm", QUIZ[::-1]),
            chance=0.25,
            num_fewshot=2,
            is_chat=True,
            num_truncated=3,
            limit=50,
        ),
        make_task(
            "quiz", "base", make_metric("acc", BASE), make_metric("acc_norm", BASE), chance=0.25
        ),
        make_task("texts", "trained", make_metric("word_perplexity", logprobs, **words)),
        make_task(
            "texts", "base", make_metric("word_perplexity", [n - 1.0 for n in logprobs], **words)
        ),
    )


def read_words(page: str) -> str:
    text = re.sub(r"<style.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text.replace("&#39;", "'").replace("\xa0", " "))


def test_the_section_gives_both_models_and_how_they_answered() -> None:
    words = read_words(render_report(make_answered()))
    assert (
        "Benchmark tasks of lm-eval, answered by the trained model and by the base model" in words
    )
    assert "quiz: acc higher is better 30 of 50 60.0 %" in words
    assert "12 of 50 24.0 %" in words
    # 20 won, 2 lost.
    assert "+36.0 pp" in words
    perplexity = math.exp(sum(20 + n % 7 for n in range(50)) / (25 * 14))
    # Long names may break after an underscore.
    assert f"texts: word_ perplexity lower is better {perplexity:.3f}" in words
    (detail, *_) = r.AuditReport.model_validate(make_answered().model_dump()).tables.find_detail(
        "utility"
    )["tasks"]
    smallest = f"{100 * detail['smallest_difference']:.1f} pp"
    assert smallest in words
    assert "50 limited 1.0 2 used 3 25.0 %" in words
    assert "cannot tell" not in words


def test_the_lines_of_the_terminal() -> None:
    quiz, texts = describe_utility(make_answered().tables)
    assert quiz.startswith("quiz: acc 30 of 50 (60.0 % (")
    assert ", base model 12 of 50 (24.0 % (" in quiz
    assert ", difference +36.0 pp (" in quiz
    assert re.search(r"; 50 items can show a difference of \d+\.\d pp or more$", quiz)
    assert texts.startswith("texts: word_perplexity ")
    assert describe_utility(examples.make_report().tables) == []
    assert build_utility(examples.make_report()) is None


@pytest.mark.parametrize(("num_right", "is_said"), [(5, True), (14, False)])
def test_both_models_at_chance_are_said_to_tell_nothing(num_right: int, is_said: bool) -> None:
    flags = make_metric("acc", [1.0] * num_right + [0.0] * 15)
    report = make_report(
        *(make_task("quiz", model, flags, chance=0.25) for model in ("trained", "base"))
    )
    said = "both models are at chance (25.0 % within the interval): this task cannot tell whether"
    assert (said in read_words(render_report(report))) == is_said
    assert (said in describe_utility(report.tables)[0]) == is_said


def test_a_task_without_base_and_one_without_numbers() -> None:
    bleu = make_metric("bleu", [math.nan] * 3, aggregation="bleu")
    report = make_report(
        make_task("quiz", "trained", make_metric("acc", [1.0, 0.0, 1.0])),
        make_task("mt", "trained", bleu),
        make_task("mt", "base", bleu),
    )
    words = read_words(render_report(report))
    assert "not answered" in words
    assert "lm-eval gives no number of each item" in words
    assert "too few items, or equal answers" in words


def test_tasks_have_no_part_in_the_verdict_or_the_risk() -> None:
    plain, answered = examples.make_report(), make_answered()
    assert render_report(answered) != render_report(plain)
    for bucket in plain.tables.buckets:
        assert answered.tables.risks(bucket.bucket) == plain.tables.risks(bucket.bucket)
    policy = render_policy(answered, every=True)
    # Today's number is proposed, for the items, not the limit of a rate of extraction.
    assert (
        "{metric: acc, probe: utility, parameters: task=quiz, on: (items), at_least: 0.6}" in policy
    )


def test_names_of_a_task_are_cleaned() -> None:
    name = "<b>bad\u202e</b>"
    report = make_report(make_task(name, "trained", make_metric("<i>acc", [1.0, 0.0])))
    page = render_report(report)
    assert "<b>bad" not in page
    assert "<i>acc" not in page
    assert "\u202e" not in page + describe_utility(report.tables)[0]


def test_a_detail_of_another_form_is_refused() -> None:
    tables = make_tables(
        [], details=[r.DetailRow(probe="utility", schema=1, value={"tasks": [{"task": "quiz"}]})]
    )
    with pytest.raises(RecordError, match=r"does not read\. Audit the run again"):
        describe_utility(tables)
