"""The study of utility: does the held-out loss order mitigations as benchmark tasks do?

    1  documents  of two packages, divided by clusters: trained from, and never trained
    2  tasks      two kinds of questions about documents of each part (`study_questions`)
    3  sweep      plain loss and goldfish, audited with the four tasks
    4  tables     values, paired differences, orders, and accuracy by number of repetitions

The same documents are held out for all seeds, and the held-out loss is measured on them. Accuracy
on questions about trained documents includes memorization; that on the others does not.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from study_common import QUICK_PRETRAIN, ROOT, STUDIES, mean, run_compare, show_change, show_dose
from study_questions import (
    KINDS,
    divide,
    load_questions,
    read_documents,
    save_documents,
    save_task,
    write_questions,
)

from memguard.records import Comparison, ResultRow, load_manifest
from memguard.records.comparison import HELDOUT, Utility, find_change
from memguard.records.utility import ITEM_SCORES, ITEMS, UTILITY, load_item_scores, name_task
from memguard.report.seed_means import Setting, list_settings

NAME = "utility"
PACKAGES = ("scipy", "sympy")
NUM_HELD_OUT = 1700
HELD_OUT, TRAINED = "held_out", "trained"
QUICK_OVERRIDES = (
    *QUICK_PRETRAIN,
    "run.data.study={num_repetitions: [0, 2], documents_per_bucket: 6}",
    "run.data.canaries={count: 0}",
    "seeds=[0]",
)
QUICK_PACKAGES = ("networkx",)
QUICK_HELD_OUT, QUICK_QUESTIONS = 40, 8

Answers = Mapping[int, Sequence[float]]
"""1 or 0 of each question, by how often its document was trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much of the study is run."""

    name: str
    packages: Sequence[str]
    num_held_out: int
    most_questions: int | None
    overrides: Sequence[str]


FULL = Scale(
    name=NAME, packages=PACKAGES, num_held_out=NUM_HELD_OUT, most_questions=None, overrides=()
)
QUICK = Scale(
    name=f"{NAME}-quick",
    packages=QUICK_PACKAGES,
    num_held_out=QUICK_HELD_OUT,
    most_questions=QUICK_QUESTIONS,
    overrides=QUICK_OVERRIDES,
)


def run(output_dir: Path, *, jobs: int, quick: bool, overrides: Sequence[str]) -> str:
    """Run all steps and return the tables.

    Args:
        output_dir: folder of the sweep.
        jobs: runs trained at a time.
        quick: a tiny model, one seed and a few questions of each task.
        overrides: key=value for the study's YAML.
    """
    scale = QUICK if quick else FULL
    folder = output_dir / scale.name
    paths = write_inputs(ROOT / folder, scale)
    comparison = run_compare(
        STUDIES / f"{NAME}.yaml",
        folder,
        jobs=jobs,
        overrides=[
            f"name={scale.name}",
            f"output_dir={output_dir}",
            *paths,
            *scale.overrides,
            *overrides,
        ],
    )
    answers = read_answers(comparison, ROOT / folder)
    return "\n\n".join(
        [
            write_values(comparison),
            write_differences(comparison),
            write_orders(comparison),
            write_doses(comparison, answers),
        ]
    )


def write_inputs(folder: Path, scale: Scale) -> list[str]:
    """Write documents and tasks; return the sweep's overrides that name them.

    Args:
        folder: of the sweep.
        scale: packages and numbers.
    """
    groups = divide(read_documents(scale.packages, folder / "documents"), scale.num_held_out)
    files = {name: folder / "documents" / f"{name}.jsonl" for name in groups}
    for name, documents in groups.items():
        save_documents(documents, files[name])
    tasks = [
        save_task(f"{kind.name}_{group}", questions, kind.between, folder / "tasks")
        for kind in KINDS
        for group, questions in write_questions(
            groups, kind.draft, most=scale.most_questions
        ).items()
    ]
    return [
        f"run.data.train=['{files[TRAINED]}']",
        f"run.data.heldout=['{files[HELD_OUT]}']",
        f"run.audit.utility=[{', '.join(f'{{task: {str(path)!r}}}' for path in tasks)}]",
    ]


def list_utilities(comparison: Comparison) -> list[Utility]:
    """Return the held-out loss and the tasks."""
    return [HELDOUT, *(task.utility for task in comparison.tasks)]


def find_values(setting: Setting, utility: Utility, model: str = "trained") -> dict[int, float]:
    """Return the value of a setting, or of its base model, by seed."""
    tables = setting.comparison.tables
    values = {}
    for one in setting.runs:
        if utility.is_task:
            place = {"parameters": name_task(utility.name), "setting": one.setting}
            row = tables.find(UTILITY, utility.metric, ITEMS, seed=one.seed, model=model, **place)
        else:
            row = setting.comparison.find_loss(one, model)
        if row is not None and row.value is not None:
            values[one.seed] = row.value
    return values


def read_answers(comparison: Comparison, folder: Path) -> dict[tuple[str, str], Answers]:
    """Return the answers by kind of question and by model, of all runs.

    Args:
        comparison: of the sweep.
        folder: of the sweep.
    """
    answers: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    first = comparison.runs[0].setting
    for one in comparison.runs:
        counts = read_counts(folder / one.run)
        documents = {
            task.utility.name: load_questions(folder / "tasks" / f"{task.utility.name}.jsonl")
            for task in comparison.tasks
        }
        for score in load_item_scores(folder / one.run / "audit" / ITEM_SCORES):
            count = counts.get(documents[score.task][score.index].document)
            kind = score.task.partition("_")[0]
            is_trained = score.task == f"{kind}_{TRAINED}"
            # Copies of an unused document may be trained, but not of one that is held out.
            if count is None or score.value is None or bool(count) != is_trained:
                continue
            if score.model == "base" and one.setting != first:
                continue
            model = one.setting if score.model == "trained" else "base model"
            answers[kind, model][count].append(score.value)
    return {key: dict(parts) for key, parts in answers.items()}


def read_counts(run: Path) -> dict[str, int]:
    """Return how often a run trained each of its documents, by id."""
    entries = load_manifest(run / "manifest.jsonl")
    return {entry.id: entry.num_repetitions or 0 for entry in entries}


# Tables


def show_value(value: float, utility: Utility) -> str:
    """Format a loss, or a share in percent."""
    return f"{100 * value:.1f} %" if utility.is_share else f"{value:.3f}"


def show_points(row: ResultRow | None) -> str:
    """Format a difference of shares and its interval, in percentage points."""
    if row is None or row.value is None:
        return "not measured"
    parts = [row.value, *(row.ci or ())]
    value, *ci = (f"{round(100 * part, 1) + 0.0:+.1f}" for part in parts)
    return f"{value} [{', '.join(ci)}]" if ci else value


def write_values(comparison: Comparison) -> str:
    """Format one row for each utility: its value by model, the mean over seeds."""
    settings = list_settings(comparison)
    rows = [
        "| | items | random choice | smallest difference shown | base model | "
        + " | ".join(setting.name for setting in settings)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(settings),
    ]
    details = {task.detail.task: task.detail for task in comparison.tasks}
    for utility in list_utilities(comparison):
        detail = details.get(utility.name)
        smallest = None if detail is None else detail.smallest_difference
        models = [find_values(settings[0], utility, "base")]
        models += [find_values(setting, utility) for setting in settings]
        cells = (
            utility.name,
            f"{count_documents(comparison) if detail is None else detail.num_items:,}",
            "" if utility.chance is None else show_value(utility.chance, utility),
            "" if smallest is None else f"{100 * smallest:.1f}",
            *(show_value(mean(list(values.values())), utility) for values in models),
        )
        rows.append(f"| {' | '.join(cells)} |")
    seeds = sorted({one.seed for one in comparison.runs})
    over = f"means over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else "one seed"
    return "\n".join(
        [
            f"Held-out loss (nats a token) and accuracy, {over}. The smallest "
            "difference (percentage points) is the one that a paired test of this number of "
            "questions shows in one seed with power 0.8.",
            "",
            *rows,
        ]
    )


def count_documents(comparison: Comparison) -> int:
    """Return the number of held-out documents of the first run."""
    row = comparison.find_loss(comparison.runs[0])
    return 0 if row is None else row.num_documents


def write_differences(comparison: Comparison) -> str:
    """Format one row for each task: trained minus base, and each setting minus the first."""
    first, *others = list_settings(comparison)
    rows = [
        f"| | {first.name} minus base model, each seed | "
        + " | ".join(f"{setting.name} minus {first.name}" for setting in others)
        + " |",
        "|---|---|" + "---|" * len(others),
    ]
    for utility in list_utilities(comparison):
        if utility.is_task:
            gains = "; ".join(map(show_points, list_gains(first, utility)))
        else:
            after, before = (find_values(first, utility, model) for model in ("trained", "base"))
            gains = "; ".join(f"{after[seed] - before[seed]:+.3f}" for seed in after)
        cells = [utility.name, gains]
        for setting in others:
            change = find_change(comparison.tables, setting.name, utility)
            shown = show_points(change) if utility.is_task else show_change(change)
            cells.append(f"{shown}{show_tests(comparison, setting.name, utility)}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            "Differences of accuracy in percentage points, paired by question, with 95 % "
            "intervals; the change of the held-out loss in percent, over per-seed differences. p "
            "is of the paired test of each seed, after Holm's correction over all tests of the "
            "comparison.",
            "",
            *rows,
        ]
    )


def list_gains(setting: Setting, utility: Utility) -> Iterator[ResultRow | None]:
    """Yield trained minus base of each seed."""
    for one in setting.runs:
        yield setting.comparison.tables.find(
            UTILITY,
            utility.metric,
            ITEMS,
            parameters=name_task(utility.name),
            setting=one.setting,
            seed=one.seed,
            against="base",
        )


def show_tests(comparison: Comparison, setting: str, utility: Utility) -> str:
    """Format the corrected p values of a setting's tests on a task."""
    tests = [
        test
        for test in comparison.tables.tests
        if (test.probe, test.metric, test.setting) == (UTILITY, utility.metric, setting)
        and test.parameters == name_task(utility.name)
        and test.p_holm is not None
    ]
    if not utility.is_task or not tests:
        return ""
    return f", p {'; '.join(f'{test.p_holm:.2g}' for test in tests)}"


def write_orders(comparison: Comparison) -> str:
    """Format the order of the settings by each utility, best first: over seeds, and of each."""
    seeds = sorted({one.seed for one in comparison.runs})
    shown = seeds if len(seeds) > 1 else []
    headings = ["best first", "means over seeds" if shown else f"seed {seeds[0]}"]
    headings += [f"seed {seed}" for seed in shown]
    rows = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for utility in list_utilities(comparison):
        values = {one.name: find_values(one, utility) for one in list_settings(comparison)}
        means = {name: mean(list(own.values())) for name, own in values.items()}
        columns = [means, *({name: own[seed] for name, own in values.items()} for seed in shown)]
        cells = [utility.name, *(show_order(column, utility) for column in columns)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def show_order(values: Mapping[str, float], utility: Utility) -> str:
    """Format names, best first, with ``=`` between equal values."""
    names = sorted(values, key=lambda name: utility.worsening(values[name]))
    text = names[0]
    for before, name in pairwise(names):
        text += f" = {name}" if values[before] == values[name] else f", {name}"
    return text


def write_doses(comparison: Comparison, answers: Mapping[tuple[str, str], Answers]) -> str:
    """Format accuracy by how often the question's document was trained."""
    counts = sorted({count for parts in answers.values() for count in parts})
    models = ["base model", *(setting.name for setting in list_settings(comparison))]
    rows = [f"| | | {' | '.join(map(show_dose, counts))} |", "|---|---|" + "---|" * len(counts)]
    for kind in KINDS:
        for model in models:
            parts = answers.get((kind.name, model), {})
            cells = [
                f"{100 * mean(parts[count]):.0f} % of {len(parts[count]):,}"
                if parts.get(count)
                else ""
                for count in counts
            ]
            rows.append(f"| {kind.name} | {model} | {' | '.join(cells)} |")
    return "\n".join(
        [
            "Accuracy by how often the document of a question was trained; answers of all seeds "
            "together.",
            "",
            *rows,
        ]
    )
