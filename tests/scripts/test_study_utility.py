"""The study of utility: its questions, the division of documents, and its tables."""

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import RankPool
from result_examples import make_tables, value_row
from script_calls import list_cells, load_script, run_study

from memguard.compare import load_sweep
from memguard.records import ComparedRun, Comparison, Cost, TestRow
from memguard.records.comparison import ComparedTask, Utility
from memguard.records.utility import ItemScore, TaskDetail, name_task, save_item_scores

pytestmark = pytest.mark.slow

STUDIES = Path(__file__).resolve().parents[2] / "eval" / "studies"
WORDS = ("matrix", "vector", "tensor", "scalar", "graph", "kernel")


@pytest.fixture(scope="module")
def questions() -> Any:
    return load_script("study_questions")


@pytest.fixture(scope="module")
def study() -> Any:
    return load_script("study_utility")


def make_documents(questions: Any, number: int, *, per_cluster: int = 2) -> list[Any]:
    """Return documents whose only sentence ends with one of `WORDS`."""
    return [
        questions.Document(
            id=f"package.module.function{place}",
            text=f"Return for every input of part {place} the result as a {WORDS[place % 6]}. More",
            source="package",
            cluster=place // per_cluster,
        )
        for place in range(number)
    ]


def test_every_run_of_the_sweep_has_the_four_tasks() -> None:
    own = yaml.safe_load((STUDIES / "utility.yaml").read_text())
    sweep = load_sweep(STUDIES / "utility.yaml")
    assert len(sweep.runs) == 3
    assert [task.task for task in sweep.runs[0].config.audit.utility] == own["run"]["audit"][
        "utility"
    ]


def test_no_cluster_is_trained_and_held_out(questions: Any) -> None:
    documents = make_documents(questions, 60, per_cluster=3)
    groups = questions.divide(documents, 20)
    held_out, trained = ({one.cluster for one in groups[name]} for name in questions.GROUPS)
    assert not held_out & trained
    assert len(groups["held_out"]) == 18, "whole clusters of three, at most twenty documents"
    assert sorted(one.id for part in groups.values() for one in part) == sorted(
        one.id for one in documents
    )


def test_a_cloze_lacks_the_last_word_of_the_last_sentence(questions: Any) -> None:
    text = "Compute the inverse of a matrix. This part must be square and regular. Unfinished"
    document = questions.Document(id="a", text=text, source="a", cluster=0)
    draft = questions.draft_cloze(document)
    assert draft.context + " " + draft.answer == text.removesuffix(" Unfinished")
    assert draft.answer == "regular."
    beyond = f"{'Long ' * 60}sentence."
    far = questions.Document(id="a", text=beyond, source="a", cluster=0)
    assert questions.draft_cloze(far) is None, "its end is not within the trained text"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(self, x, /, y=1, *args, key: int = 2, **rest): ...", "x y *args key **rest"),
        ("def f(cls, one, *, two): ...", "one two"),
        ("async def f(a, b): ...", "a b"),
        ("def f(): ...", ""),
    ],
)
def test_a_signature_is_its_parameters(questions: Any, source: str, names: str) -> None:
    (node,) = ast.parse(source).body
    assert questions.list_parameters(node) == names.split()


def test_definitions_are_found_by_the_id_of_their_documentation(questions: Any) -> None:
    node = questions.find_definition("yaml.emitter.Emitter.write_indicator")
    assert questions.list_parameters(node)[:2] == ["indicator", "need_whitespace"]
    assert questions.find_definition("yaml.load").name == "load", "of the package itself"
    for missing in ("yaml.emitter", "yaml.emitter.Emitter.write_indicator#2", "no_such_package.f"):
        assert questions.find_definition(missing) is None


def test_wrong_answers_are_right_ones_of_as_many_words(questions: Any) -> None:
    groups = questions.divide(make_documents(questions, 40), 16)

    def draft(document: Any) -> Any:
        number = document.cluster
        answer = WORDS[number % 6] if number < 10 else f"{WORDS[number % 6]} and {number}"
        return questions.Draft(document=document.id, context="It is", answer=answer)

    made = questions.write_questions(groups, draft)
    again = questions.write_questions(groups, draft)
    assert made == again, "drawn from a seed"
    right = {draft(one).answer for part in groups.values() for one in part}
    for name, part in made.items():
        assert len(part) == len({one.cluster for one in groups[name]}), "one of each cluster"
        by_id = {one.id: one for one in groups[name]}
        for question in part:
            assert len(set(question.choices)) == 4
            assert question.choices[question.gold] == draft(by_id[question.document]).answer
            assert {len(choice.split()) for choice in question.choices} == {
                len(question.choices[question.gold].split())
            }
            assert set(question.choices) <= right
    assert len({question.gold for part in made.values() for question in part}) == 4
    fewer = questions.write_questions(groups, draft, most=3)
    assert {name: len(part) for name, part in fewer.items()} == {"held_out": 3, "trained": 3}


def test_a_task_is_written_as_lm_eval_reads_it(questions: Any, tmp_path: Path) -> None:
    made = questions.write_questions(
        questions.divide(make_documents(questions, 40), 16), questions.draft_cloze
    )["held_out"]
    path = questions.save_task("cloze_held_out", made, " ", tmp_path)
    task = yaml.safe_load(path.read_text())
    lines = Path(task["dataset_kwargs"]["data_files"]["test"])
    assert [json.loads(line)["document"] for line in lines.read_text().splitlines()] == [
        one.document for one in made
    ]
    assert questions.load_questions(lines) == made
    assert task["target_delimiter"] == " "


# Tables


def make_task(name: str, *, num_items: int = 4) -> ComparedTask:
    sums = {"trained": "0", "base": "0"}
    numbers = {"trained": 0, "base": 0}
    detail = TaskDetail(
        task=name,
        version="1",
        limit=None,
        num_fewshot=0,
        is_chat=False,
        headline="acc",
        aggregations={"acc": "mean"},
        chance=0.25,
        num_items=num_items,
        samples_sha256=sums,
        smallest_difference=0.051,
        is_smallest_paired=True,
        is_at_chance=False,
        num_forwards=numbers,
        num_decoded_tokens=numbers,
        num_truncated=numbers,
        is_cached={"trained": False, "base": True},
    )
    return ComparedTask(detail=detail, unit="share", higher_is_better=True)


Values = Mapping[str, Sequence[float]]
"""Of each setting, by seed."""


def make_comparison(losses: Values, accuracies: Mapping[str, Values]) -> Comparison:
    """Return a comparison with these losses, and accuracies by task; the base has 5 and 0.3."""
    runs, rows, tests = [], [], []
    for name, nlls in losses.items():
        for seed, nll in enumerate(nlls):
            place = {"setting": name, "seed": seed}
            runs.append(
                ComparedRun.model_construct(
                    **place, run=f"{name}-{seed}", doses={}, cost=Cost.model_construct(train_s=1)
                )
            )
            for model, loss in (("trained", nll), ("base", 5.0)):
                rows.append(value_row("heldout", "nll", "heldout", loss, model=model, **place))
            for task, values in accuracies.items():
                own = {**place, "parameters": name_task(task), "statistic": "rate"}
                accuracy = values[name][seed]
                for model, value in (("trained", accuracy), ("base", 0.3)):
                    rows.append(value_row("utility", "acc", "(items)", value, model=model, **own))
                gain = {**own, "against": "base", "statistic": "difference"}
                rows.append(value_row("utility", "acc", "(items)", accuracy - 0.3, **gain))
                tests.append(
                    TestRow(
                        **place,
                        probe="utility",
                        metric="acc",
                        parameters=name_task(task),
                        bucket="(items)",
                        test="mcnemar",
                        num_documents=4,
                        p_holm=0.01 * (seed + 1),
                    )
                )
    tables = make_tables(rows).model_copy(update={"tests": tuple(tests)})
    return Comparison.model_construct(
        runs=runs, front=[], tables=tables, tasks=[make_task(task) for task in accuracies]
    )


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return make_comparison(
        {"none": (4.0, 4.2), "k2": (4.4, 4.1)},
        {"cloze_held_out": {"none": (0.5, 0.5), "k2": (0.4, 0.5)}},
    )


def test_orders_have_the_best_first_of_losses_and_of_shares(
    study: Any, comparison: Comparison
) -> None:
    assert list_cells(study.write_orders(comparison)) == [
        ["heldout_nll", "none, k2", "none, k2", "k2, none"],
        ["cloze_held_out", "none, k2", "none, k2", "none = k2"],
    ]
    higher = Utility(name="a", probe="utility", metric="acc", higher_is_better=True)
    assert study.show_order({"a": 1.0, "b": 3.0, "c": 2.0}, higher) == "b, c, a"


def test_values_and_differences_are_those_of_the_comparison(
    study: Any, comparison: Comparison
) -> None:
    loss, task = list_cells(study.write_values(comparison))
    assert [loss[0], *loss[-3:]] == ["heldout_nll", "5.000", "4.100", "4.250"]
    assert task[1:] == ["4", "25.0 %", "5.1", "30.0 %", "50.0 %", "45.0 %"]
    loss, task = list_cells(study.write_differences(comparison))
    assert loss[1] == "-1.000; -0.800"
    assert task[1] == "+20.0; +20.0", "trained minus base of each seed"
    assert task[2].endswith("p 0.01; 0.02"), "Holm's p of each seed"


def test_answers_are_counted_by_how_often_their_document_was_trained(
    study: Any, questions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {"cloze_held_out": "abc", "cloze_trained": "defg"}
    for task, names in tasks.items():
        made = [
            questions.Question(document=name, context="", choices=["x", "y"], gold=0)
            for name in names
        ]
        questions.save_task(task, made, " ", tmp_path / "tasks")
    # One held-out document was left out of the run, one of the others was not trained.
    counts = {"a": 0, "b": 0, "d": 64, "e": 1, "f": 0, "g": 64}
    monkeypatch.setattr(study, "read_counts", lambda run: counts)
    right = {"a": 1, "b": 0, "c": 1, "d": 1, "e": 0, "f": 1, "g": 0}
    (tmp_path / "none-0" / "audit").mkdir(parents=True)
    scores = [
        ItemScore(
            task=task,
            metric="acc",
            model=model,
            index=index,
            item=name,
            value=float(right[name] if model == "trained" else 0),
            weight=None,
        )
        for task, names in tasks.items()
        for model in ("trained", "base")
        for index, name in enumerate(names)
    ]
    save_item_scores(scores, tmp_path / "none-0" / "audit" / "utility.parquet")
    comparison = make_comparison({"none": (4.0,)}, {task: {"none": (0.5,)} for task in tasks})
    answers = study.read_answers(comparison, tmp_path)
    assert answers == {
        ("cloze", "none"): {0: [1, 0], 64: [1, 0], 1: [0]},
        ("cloze", "base model"): {0: [0, 0], 64: [0, 0], 1: [0]},
    }
    rows = list_cells(study.write_doses(comparison, answers))
    assert rows[1] == ["cloze", "none", "50 % of 2", "0 % of 1", "50 % of 2"]


@pytest.mark.long
def test_a_quick_run_writes_its_tasks_and_prints_its_tables(
    study: Any, ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = study.STUDIES / "utility.md"
    before = page.read_bytes()
    run_study("utility", "--quick", f"--output-dir={tmp_path}")
    printed = capsys.readouterr().out
    assert page.read_bytes() == before, "a quick run is no result"
    folder = tmp_path / "utility-quick"
    trained, held_out = (
        {json.loads(line)["id"] for line in (folder / "documents" / name).read_text().splitlines()}
        for name in ("trained.jsonl", "held_out.jsonl")
    )
    assert trained
    assert held_out
    assert not trained & held_out
    # Each kind of question about each part, beside the held-out loss, in two tables and the orders.
    names = [
        f"{kind}_{part}" for kind in ("cloze", "signature") for part in ("held_out", "trained")
    ]
    for name in ("heldout_nll", *names):
        assert printed.count(f"| {name} | ") == 3, name
    assert "| cloze | goldfish-k2 | " in printed
