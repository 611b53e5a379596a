"""Questions about documentation of packages, with four answers each, as tasks of lm-eval.

    cloze      the last word of a sentence; the others are last words of other documents' sentences
    signature  the parameters of a function, given its name and the first paragraph of its
               documentation; the others are those of functions with as many parameters

Documents are divided by clusters of near-duplicates before anything is trained: those that a study
trains from, and those that it never trains. Each cluster gives at most one question of a kind, from
the part of a text that is trained. Everything is drawn from one seed. Sources are parsed, never
imported.
"""

import ast
import importlib.util
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from memguard.data.duplicates import WordGrams
from memguard.data.sources import build_docstring_file
from memguard.seeds import derive_generator

SEED = 0
MIN_CHARACTERS = 450
"""Shorter documents may have fewer tokens than a run trains of each."""
TEXT_CHARACTERS = 240
"""Questions are about this part of a document, which is within the tokens that are trained."""
MAX_CLUSTER = 100
"""Documents of larger clusters, most of which repeat one paragraph, are not used."""
NUM_OPTIONS = 4
_MIN_CONTEXT = 40
_MIN_PARAMETERS = 2
_LAST_WORD = re.compile(r"(?<=\S) ([a-zA-Z_]{3,})(?=\.(\s|$))")
_Function = ast.FunctionDef | ast.AsyncFunctionDef

GROUPS = ("held_out", "trained")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One docstring."""

    id: str
    text: str
    source: str
    cluster: int

    @property
    def trained_text(self) -> str:
        """The part that questions are about."""
        return self.text[:TEXT_CHARACTERS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A question without its wrong answers."""

    document: str
    context: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One line of a task's file."""

    document: str
    """Its id, which no prompt has."""
    context: str
    choices: list[str]
    gold: int
    """Place of the right answer."""


def read_documents(packages: Sequence[str], folder: Path) -> list[Document]:
    """Return the documents that are long enough, in random order, with their clusters.

    Args:
        packages: names of installed packages.
        folder: where the file of all their documentation is kept.
    """
    path = build_docstring_file(packages, folder)
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if len(row["text"]) >= MIN_CHARACTERS]
    # Once more without the large clusters: grams that were in too many documents may join now.
    cluster_N = _cluster(rows)
    sizes = Counter(cluster_N.tolist())
    rows = [
        row for row, name in zip(rows, cluster_N, strict=True) if sizes[int(name)] <= MAX_CLUSTER
    ]
    documents = [
        Document(**row, cluster=int(name)) for row, name in zip(rows, _cluster(rows), strict=True)
    ]
    order = derive_generator(SEED, "order of documents").permutation(len(documents))
    return [documents[place] for place in order]


def _cluster(rows: Sequence[Mapping[str, Any]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return WordGrams(row["text"] for row in rows).cluster()


def divide(documents: Sequence[Document], num_held_out: int) -> dict[str, list[Document]]:
    """Divide documents into those never trained and the rest; no cluster is in both.

    Args:
        documents: in random order.
        num_held_out: number of documents never trained, to within a cluster.
    """
    members: dict[int, list[Document]] = {}
    for document in documents:
        members.setdefault(document.cluster, []).append(document)
    groups: dict[str, list[Document]] = {name: [] for name in GROUPS}
    clusters = list(members.values())
    # Large clusters appear early in the order of documents.
    for place in derive_generator(SEED, "order of clusters").permutation(len(clusters)):
        cluster = clusters[place]
        is_held_out = len(groups["held_out"]) + len(cluster) <= num_held_out
        groups["held_out" if is_held_out else "trained"] += cluster
    return groups


def draft_cloze(document: Document) -> Draft | None:
    """Return the last sentence that ends within the trained text, without its last word."""
    text = document.trained_text
    # A full stop at the cut may be inside of a number or a name.
    ends = [end for end in _LAST_WORD.finditer(text[:-1]) if end.start() >= _MIN_CONTEXT]
    if not ends:
        return None
    end = ends[-1]
    return Draft(document=document.id, context=text[: end.start()], answer=f"{end.group(1)}.")


def draft_signature(document: Document) -> Draft | None:
    """Return a function's first paragraph and the beginning of a call, and its parameters."""
    node = find_definition(document.id)
    if not isinstance(node, _Function):
        return None
    names = list_parameters(node)
    if len(names) < _MIN_PARAMETERS:
        return None
    paragraph = document.trained_text.partition("\n\n")[0]
    context = f"{paragraph}\n\n>>> {node.name}("
    return Draft(document=document.id, context=context, answer=f"{', '.join(names)})")


def list_parameters(node: _Function) -> list[str]:
    """Return the parameters as a signature has them, without self, defaults and annotations."""
    own = node.args
    names = [argument.arg for argument in (*own.posonlyargs, *own.args)]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    if own.vararg is not None:
        names.append(f"*{own.vararg.arg}")
    names += [argument.arg for argument in own.kwonlyargs]
    if own.kwarg is not None:
        names.append(f"**{own.kwarg.arg}")
    return names


def find_definition(identifier: str) -> ast.AST | None:
    """Return the class or function of a document's id; None for modules and repeated names."""
    parts = identifier.split(".")
    spec = importlib.util.find_spec(parts[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0])
    for num_parts in range(len(parts), 0, -1):
        place = root.joinpath(*parts[1:num_parts])
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return _follow(_parse(path), parts[num_parts:])
    return None


def _follow(node: ast.AST | None, names: Sequence[str]) -> ast.AST | None:
    if not names:
        return None
    for name in names:
        inner = getattr(node, "body", ())
        matching = (
            child
            for child in inner
            if isinstance(child, ast.ClassDef | _Function) and child.name == name
        )
        node = next(matching, None)
    return node


@cache
def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(path.read_text(encoding="utf-8"))


def count_words(answer: str) -> int:
    """Return the number of words of an answer, between which spaces are."""
    return len(answer.split())


def write_questions(
    groups: Mapping[str, Sequence[Document]],
    draft: Callable[[Document], Draft | None],
    *,
    most: int | None = None,
) -> dict[str, list[Question]]:
    """Return the questions of each group; wrong answers are right ones of all groups.

    Args:
        groups: documents in random order.
        draft: makes a question of a document, if it can.
        most: questions of a group; None takes all.
    """
    drafts = {name: _draft_each(documents, draft) for name, documents in groups.items()}
    answers: dict[int, set[str]] = {}
    for one in (one for part in drafts.values() for one in part):
        answers.setdefault(count_words(one.answer), set()).add(one.answer)
    pools = {number: sorted(pool) for number, pool in answers.items()}
    return {
        name: [
            _add_choices(one, pools[count_words(one.answer)])
            for one in part
            if len(pools[count_words(one.answer)]) >= NUM_OPTIONS
        ][:most]
        for name, part in drafts.items()
    }


def _draft_each(
    documents: Iterable[Document], draft: Callable[[Document], Draft | None]
) -> list[Draft]:
    """Return at most one question of each cluster."""
    drafts: dict[int, Draft] = {}
    for document in documents:
        if document.cluster not in drafts and (one := draft(document)) is not None:
            drafts[document.cluster] = one
    return list(drafts.values())


def _add_choices(draft: Draft, pool: Sequence[str]) -> Question:
    generator = derive_generator(SEED, f"answers of {draft.document}")
    others = [answer for answer in pool if answer != draft.answer]
    drawn = generator.choice(len(others), size=NUM_OPTIONS - 1, replace=False)
    choices = [others[place] for place in drawn]
    gold = int(generator.integers(NUM_OPTIONS))
    choices.insert(gold, draft.answer)
    return Question(document=draft.document, context=draft.context, choices=choices, gold=gold)


def save_documents(documents: Iterable[Document], path: Path) -> None:
    """Write documents as JSON lines {id, text, source}."""
    rows = ({"id": one.id, "text": one.text, "source": one.source} for one in documents)
    _save_lines(rows, path)


def save_task(name: str, questions: Iterable[Question], between: str, folder: Path) -> Path:
    """Write a task's YAML and its questions; return the YAML.

    Args:
        name: of the task and of its files.
        questions: in the order of the task.
        between: what stands between context and answer.
        folder: of the files.
    """
    lines = (folder / f"{name}.jsonl").absolute()
    _save_lines(map(asdict, questions), lines)
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(lines)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": between,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(task, sort_keys=False), encoding="utf-8")
    return path


def _save_lines(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of question."""

    name: str
    draft: Callable[[Document], Draft | None]
    between: str
    """Characters between context and answer."""


KINDS = (
    Kind(name="cloze", draft=draft_cloze, between=" "),
    Kind(name="signature", draft=draft_signature, between=""),
)


def load_questions(path: Path) -> list[Question]:
    """Return the questions of a task's file."""
    return [Question(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
