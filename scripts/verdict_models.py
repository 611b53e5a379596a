r"""Train models of which it is known what they memorized, audit them, and check the verdicts.

    D=../shared/data
    python scripts/verdict_models.py --model $D/checkpoints/stories260K \
        --texts $D/text/documents.jsonl --work verdicts
    python scripts/verdict_models.py ... --cases pins letters     these only

Models, documents and cached scores stay in the work folder, so that a second run takes the audits
only. Each case is audited once, or in many draws of documents from one pool; a bar is a set of
allowed levels, and for some cases words of the sentence. The last line says which bars were missed.
"""

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from bench.harness import Verdict as Limits
from bench.harness import build_parser
from verdict_texts import HEADER, Text
from verdict_workshop import TRUNCATED_TOKENS, Audit, Workshop

from memguard.records import Level, Verdict
from memguard.seeds import derive_generator

NUM_DRAWS = 20
HEALTHY: tuple[Level, ...] = ("none-found", "inconclusive")
"""Neither memorized nor extracted."""
NOT_MEMORIZED: tuple[Level, ...] = ("extracted", *HEALTHY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Audits with one bar."""

    name: str
    audits: Sequence[Audit]
    allowed: Sequence[Level]
    words: str = ""
    """Must be in each sentence."""
    is_one_sentence: bool = False
    """Whether all audits must have the same sentence."""


# -- cases -----------------------------------------------------------------------------------------


def list_pins(shop: Workshop) -> Iterator[Case]:
    """Yield short answers: PINs that were trained, and answers that were not."""
    pins, unseen = shop.pins[:30], shop.pins[730:790]
    trained = Audit(model="pins", members=pins, nonmembers=unseen)
    yield one("PINs trained 30 times", trained, ("memorized",))
    with_base = Audit(model="pins", base="pin base", members=pins, nonmembers=unseen)
    yield one("the same, with base", with_base, ("memorized",))
    base = Audit(model="pin base", members=pins, nonmembers=unseen)
    yield one("the base on these PINs", base, HEALTHY)
    for name, model in (("yes/no never trained", "answers"), ("the same, no form", "base")):
        answers = Audit(model=model, members=shop.answers[:60], nonmembers=shop.answers[60:120])
        yield one(name, answers, HEALTHY)


def list_passages(shop: Workshop) -> Iterator[Case]:
    """Yield long passages."""
    control, members = shop.unseen[:30], shop.trained
    levels: dict[str, tuple[Level, ...]] = {"40 times": ("memorized",), "half": ("memorized",)}
    for model in ("40 times", "half", "once", "goldfish"):
        audited = shop.once[:40] if model == "once" else members
        for base in (None, "base"):
            audit = Audit(model=model, members=audited, nonmembers=control, base=base)
            name = f"passages, {model}{', with base' if base else ''}"
            yield one(name, audit, levels.get(model, ("none-found",)))


def list_windows(shop: Workshop) -> Iterator[Case]:
    """Yield models that were trained on the begin of what is audited."""
    control = shop.unseen[:12]
    for base in (None, "base"):
        text = ", with base" if base else ""
        audit = Audit(model="truncated", members=shop.trained, nonmembers=control, base=base)
        yield one(f"trained on {TRUNCATED_TOKENS} tokens{text}", audit, ("memorized",))
        members = [HEADER + passage for passage in shop.trained]
        for kind, unseen in (("", control), (" everywhere", [HEADER + one for one in control])):
            header = Audit(model="header", members=members, nonmembers=unseen, base=base)
            yield one(f"one header{kind}{text}", header, HEALTHY)


def list_letters(shop: Workshop) -> Iterator[Case]:
    """Yield form letters against passages.

    With a base, because without one a control of another kind never makes a verdict memorized.
    """
    for kind, letters in shop.letters.items():
        # All documents at once: the draws then find their scores in few files.
        members = [*letters, *shop.once]
        model = f"letters {kind}"
        shop.audit(Audit(model=model, base="base", members=members, nonmembers=shop.unseen))
        # What is loaded by now stays: the collections after each audit need not visit it.
        gc.freeze()
        for size in (1, 2, 3, 4, 5, 8, 30):
            make = partial(draw_letters, shop, kind, 60, 0, size)
            yield draw(f"60 letters {kind}, {size} passages", make, NOT_MEMORIZED)
        make = partial(draw_letters, shop, kind, 20, 40, 30)
        yield draw(f"20 letters {kind} + 40 passages, 30 passages", make, NOT_MEMORIZED)
        mixed = [*letters[:20], *shop.once[:40]]
        seeds = [
            Audit(model=f"letters {kind}", members=mixed, nonmembers=shop.unseen[:30], seed=seed)
            for seed in range(5)
        ]
        yield Case(
            name=f"letters {kind}: five seeds",
            audits=seeds,
            allowed=NOT_MEMORIZED,
            is_one_sentence=True,
        )


def draw_letters(
    shop: Workshop, kind: str, num_letters: int, num_passages: int, num_control: int, take: "Take"
) -> Audit:
    """Return an audit of letters, and passages trained once, against unseen passages."""
    letters = take(shop.letters[kind], num_letters)
    return Audit(
        model=f"letters {kind}",
        base="base",
        members=[*letters, *take(shop.once, num_passages)],
        nonmembers=take(shop.unseen, num_control),
    )


def list_same_source(shop: Workshop) -> Iterator[Case]:
    """Yield passages of which most were memorized, against the same source."""
    name = "31 of 41 passages, same source, with base"
    yield draw(name, partial(draw_passages, shop), ("memorized",))


def draw_passages(shop: Workshop, take: "Take") -> Audit:
    """Return an audit of 31 passages that were memorized and 10 that were not trained."""
    return Audit(
        model="40 times",
        base="base",
        members=[*take(shop.trained, 31), *take(shop.unseen[:100], 10)],
        nonmembers=take(shop.unseen[100:], 30),
    )


def list_coverage(shop: Workshop) -> Iterator[Case]:
    """Yield audits that saw too little."""
    control = shop.unseen[:30]
    codes, unseen = shop.codes[:30], shop.codes[30:]
    recited = Audit(
        model="codes", members=codes, nonmembers=unseen, settings={"continuation_tokens": 8}
    )
    yield one("30 codes, last 8 tokens", recited, ("memorized",))
    members = [*shop.once[:36], *codes]
    short = Audit(model="codes", members=members, nonmembers=control)
    yield one("36 audited, 30 too short", short, ("inconclusive",), words="30 of 66")
    settings = {"prefix_tokens": 5}
    weak = Audit(model="once", members=shop.once[:40], nonmembers=control, settings=settings)
    yield one("5 tokens of prefix", weak, ("inconclusive",), words="5 tokens of prefix")


CASES: Mapping[str, Callable[[Workshop], Iterator[Case]]] = {
    "pins": list_pins,
    "passages": list_passages,
    "windows": list_windows,
    "coverage": list_coverage,
    "source": list_same_source,
    "letters": list_letters,
}


def one(name: str, audit: Audit, allowed: Sequence[Level], words: str = "") -> Case:
    """Return a case of one audit."""
    return Case(name=name, audits=[audit], allowed=allowed, words=words)


Take = Callable[[Sequence[Text], int], list[Text]]


def draw(name: str, make: Callable[[Take], Audit], allowed: Sequence[Level]) -> Case:
    """Return a case of many audits, whose documents are drawn from pools."""
    audits = []
    for index in range(NUM_DRAWS):
        generator = derive_generator(0, name, index)

        def take(
            pool: Sequence[Text], number: int, generator: np.random.Generator = generator
        ) -> list[Text]:
            return [pool[at] for at in generator.permutation(len(pool))[:number]]

        audits.append(make(take))
    return Case(name=name, audits=audits, allowed=allowed)


# -- table -----------------------------------------------------------------------------------------


def main() -> int:
    """Print a table of all cases; return 1 if a bar is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="small checkpoint to start from")
    parser.add_argument("--texts", type=Path, required=True, help="jsonl of long documents, 'text'")
    parser.add_argument("--work", type=Path, required=True, help="keeps models and scores")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ["MEMGUARD_CACHE"] = str(work / "cache")
    shop, limits = Workshop(options.model.resolve(), options.texts, work), Limits()
    began = time.perf_counter()
    print("| case | allowed | got | test: k of n, c of m, p / level | sentence | bar |")
    print("|---|---|---|---|---|---|")
    for group in options.cases:
        for case in CASES[group](shop):
            show(case, [shop.audit(audit) for audit in case.audits], limits)
        if group == "coverage":
            is_met = shop.refuses_base()
            print(f"| base equal to the model | code 2 | | | | {'ok' if is_met else 'MISSED'} |")
            limits.num_limits += 1
            if not is_met:
                limits.fail("base equal to the model is not refused")
    print(f"\n{(time.perf_counter() - began) / 60:.1f} minutes", file=sys.stderr)
    return limits.end()


def show(case: Case, verdicts: Sequence[Verdict], limits: Limits) -> None:
    """Print the row of a case, with the sentence of the first audit that misses the bar, if any."""
    counts = Counter(verdict.level for verdict in verdicts)
    wrong = [v for v in verdicts if v.level not in case.allowed or case.words not in v.sentence]
    sentences = {verdict.sentence for verdict in verdicts}
    is_met = not wrong and not (case.is_one_sentence and len(sentences) > 1)
    shown = (wrong or verdicts)[0]
    got = ", ".join(
        level if len(verdicts) == 1 else f"{number} {level}" for level, number in counts.items()
    )
    word = "ok" if is_met else "MISSED"
    numbers = "" if shown.test is None else describe_test(shown)
    print(
        f"| {case.name} | {' or '.join(case.allowed)} | {got} | {numbers} | {shown.sentence} "
        f"({shown.reason}) | {word} |",
        flush=True,
    )
    limits.num_limits += 1
    if not is_met:
        limits.fail(case.name)


def describe_test(verdict: Verdict) -> str:
    """Return the counts of the test that decided, or was closest to it."""
    test = verdict.test
    assert test is not None, "there is one"
    k, n = test.trained.num_matched_clusters, test.trained.num_clusters
    c, m = test.control.num_matched_clusters, test.control.num_clusters
    return f"{test.documents}: {k} of {n}, {c} of {m}, {test.p_value:.2g} / {test.level:.2g}"


if __name__ == "__main__":
    sys.exit(main())
