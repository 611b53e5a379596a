"""Measure which documents count as near-duplicates, on texts of which it is known, and the cost.

python scripts/bench/near_duplicates.py DOCUMENTS.jsonl            ten seconds on one core
python scripts/bench/near_duplicates.py DOCUMENTS.jsonl --quick    without the largest sets

DOCUMENTS.jsonl gives English texts, `{"text": ...}` a line, 80,000 words at least; texts in other
scripts are drawn. `unseen left out` are the documents of a control that are in a cluster with a
trained one: none of chats that share a prompt or a footer, all of edited copies. The last table is
CPU time; a chat has 178 words of its own, and a book of 100,000 words is quoted by 2,000 texts. The
last line is a verdict; exit 1 if a bar is missed.
"""

import json
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from harness import Table, Verdict, build_parser

from memguard.config import DataConfig
from memguard.data.duplicates import WordGrams
from memguard.data.given import read_given
from memguard.runtime import Console

NUM_COPIES, MIN_COPIES, NUM_OTHERS = 30, 28, 70
MAX_MS, MAX_GROWTH = 3.0, 1.5
OWN_WORDS, PASSAGE_WORDS = 178, 60
NUM_CLAUSES, CLAUSE_LETTERS = 10, 14
_DRAW = np.random.default_rng(0)


class Words:
    """Words of real texts, in their order."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines()
        self._words = " ".join(json.loads(line)["text"] for line in lines).split()
        self._taken = 0

    def take(self, count: int) -> str:
        """Return the next words, which were not taken before."""
        self._taken += count
        if self._taken > len(self._words):
            raise SystemExit(f"DOCUMENTS.jsonl has {len(self._words):,} words: give more")
        return " ".join(self._words[self._taken - count : self._taken])

    def draw(self, count: int) -> str:
        """Return words drawn at random."""
        return " ".join(self._words[n] for n in _DRAW.integers(0, len(self._words), count))


def count_left_out(trained: Sequence[str], unseen: Sequence[str]) -> int:
    """Return how many unseen texts are near-duplicates of a trained one."""
    cluster = WordGrams([*trained, *unseen]).cluster()
    return int(np.isin(cluster[len(trained) :], cluster[: len(trained)]).sum())


# -- texts ----------------------------------------------------------------------------------------


def change_words(count: int) -> Callable[[str], str]:
    """Return a change of so many words of a text."""

    def change(text: str) -> str:
        words = text.split()
        for place in _DRAW.choice(len(words), count, replace=False):
            words[place] = f"other{place}"
        return " ".join(words)

    return change


def widen(text: str) -> str:
    """Return a text in full-width letters."""
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


def wrap(text: str, prefix: str = "", width: int = 7) -> str:
    """Return a text in lines of so many words."""
    words = text.split()
    lines = (" ".join(words[n : n + width]) for n in range(0, len(words), width))
    return "\n".join(prefix + line for line in lines)


EDITS: dict[str, Callable[[str], str]] = {
    **{f"{count} of {PASSAGE_WORDS} words changed": change_words(count) for count in (2, 4, 6)},
    "NFD": lambda text: unicodedata.normalize("NFD", text),
    "zero-width spaces": lambda text: "\u200b".join(text),
    "soft hyphens": lambda text: " ".join("\u00ad".join(word) for word in text.split()),
    "full-width": widen,
    "lines of 7 words": wrap,
    "quoted with >": lambda text: wrap(text, "> "),
    "in capitals": str.upper,
}
"""Of an English text; its letters e have an accent, so that NFD differs."""

LETTERS = {
    "Chinese": ["\u4e00-\u5fff"],
    "Japanese": ["\u3041-\u3096", "\u30a1-\u30fa", "\u4e00-\u51ff"],
    "Thai": ["\u0e01-\u0e2e", "\u0e30-\u0e39"],
}


def draw_letters(ranges: Sequence[str], count: int) -> str:
    """Return random letters of ranges such as a-z, each range with the same probability."""
    bounds = [(ord(letters[0]), ord(letters[2])) for letters in ranges]
    chosen = _DRAW.integers(0, len(bounds), count)
    return "".join(chr(_DRAW.integers(bounds[n][0], bounds[n][1] + 1)) for n in chosen)


def draw_spaceless(ranges: Sequence[str]) -> str:
    """Return clauses of a script without spaces between words."""
    return "，".join(draw_letters(ranges, CLAUSE_LETTERS) for _ in range(NUM_CLAUSES))


def change_clauses(text: str, ranges: Sequence[str]) -> str:
    """Return a text with one letter changed in each clause."""
    clauses = text.split("，")
    for n, clause in enumerate(clauses):
        place = int(_DRAW.integers(len(clause)))
        clauses[n] = clause[:place] + draw_letters(ranges, 1) + clause[place + 1 :]
    return "，".join(clauses)


def draw_hindi(count: int) -> str:
    """Return words of Devanagari, each of syllables with vowel signs."""

    def syllable() -> str:
        return draw_letters(["\u0915-\u0928"], 1) + draw_letters(["\u093e-\u094c"], 1)

    return " ".join("".join(syllable() for _ in range(3)) for _ in range(count))


# -- tables ---------------------------------------------------------------------------------------


def show_forms(words: Words, verdict: Verdict, *, quick: bool) -> None:
    """Print how many chats of one form are left out: none may be."""
    table = Table(44, "  trained", "  unseen", "  left out", corner="texts that share a form")
    sizes = [(60, 30), (300, 100)] if quick else [(60, 30), (300, 100), (2000, 200)]
    cases = [
        (f"system prompt of {length} words", [words.take(length)], "", size)
        for length in (22, 150)
        for size in sizes
    ]
    cases.append(("footer of 17 words", [""], words.take(17), (20, 20)))
    cases.append(("ten prompts of 100 words", [words.take(100) for _ in range(10)], "", (300, 100)))
    for name, prompts, footer, (num_trained, num_unseen) in cases:
        texts = [
            f"{prompts[n % len(prompts)]}\n{words.draw(PASSAGE_WORDS)}\n{footer}"
            for n in range(num_trained + num_unseen)
        ]
        count = count_left_out(texts[:num_trained], texts[num_trained:])
        end = verdict.check(f"{name}, {num_trained}+{num_unseen}", count, at_most=0, unit="")
        table.row(name, f"{num_trained:,}", f"{num_unseen:,}", f"{count}", end=end)
    texts = [words.take(PASSAGE_WORDS) for _ in range(45)]
    for length in range(5, 13):
        closing = draw_hindi(length)
        letters = [f"{draw_hindi(30)}\n{closing}" for _ in texts]
        num_texts = len(set(WordGrams(letters).cluster().tolist()))
        name = f"Hindi, closing of {length} words"
        end = verdict.check(name, len(letters) - num_texts, at_most=0, unit="")
        table.row(name, "-", f"{len(letters)}", f"{len(letters) - num_texts}", end=end)


def show_copies(words: Words, verdict: Verdict) -> None:
    """Print how many of 30 edited copies are found, and how many of 70 other texts."""
    table = Table(
        44, "  copies", "  found", "  others", corner=f"copies among {NUM_COPIES} trained"
    )

    def show(name: str, trained: list[str], copies: list[str], others: list[str]) -> None:
        num_found, num_others = count_left_out(trained, copies), count_left_out(trained, others)
        both = count_left_out(trained, [*copies, *others])
        if both != num_found + num_others:
            verdict.fail(f"{name}: {both} together")
        bars = (
            verdict.check(name, num_found, at_least=MIN_COPIES, unit=""),
            verdict.check(f"{name}, others", num_others, at_most=0, unit=""),
        )
        table.row(name, f"{len(copies)}", f"{num_found}", f"{num_others}", end=", ".join(bars))

    def passages(count: int) -> list[str]:
        return [words.take(PASSAGE_WORDS).replace("e", "\u00e9") for _ in range(count)]

    trained, others = passages(NUM_COPIES), passages(NUM_OTHERS)
    for name, edit in EDITS.items():
        show(f"English, {name}", trained, [edit(text) for text in trained], others)
    for name, ranges in LETTERS.items():
        drawn = [draw_spaceless(ranges) for _ in range(NUM_COPIES + NUM_OTHERS)]
        trained, others = drawn[:NUM_COPIES], drawn[NUM_COPIES:]
        copies = [change_clauses(text, ranges) for text in trained]
        show(f"{name}, one letter of each clause changed", trained, copies, others)


def show_forgotten(words: Words, verdict: Verdict) -> None:
    """Print how many of ten trained texts a list of them in NFD takes out."""
    texts = [words.take(PASSAGE_WORDS).replace("e", "\u00e9") for _ in range(50)]
    with tempfile.TemporaryDirectory() as folder:
        files = {"train": texts, "forget": [unicodedata.normalize("NFD", t) for t in texts[:10]]}
        for name, rows in files.items():
            lines = (json.dumps({"id": f"d{n}", "text": text}) for n, text in enumerate(rows))
            (Path(folder) / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        sources = {name: (str(Path(folder) / f"{name}.jsonl"),) for name in files}
        data = DataConfig.model_validate({**sources, "control_fraction": 0})
        count = read_given(data, Path(folder), Console(quiet=True)).num_same_text
    end = verdict.check("forget list in NFD", count, at_least=10, unit="")
    print(f"\nforget list in NFD: {count} of 10 taken out  {end}")


def show_cost(words: Words, verdict: Verdict, *, quick: bool) -> None:
    """Print CPU time a document, for more and more chats of one prompt."""
    table = Table(44, "  documents", "  ms each", "  growth", corner="CPU time")
    for length in (22, 150):
        before = 0.0
        for count in (500, 2000) if quick else (2000, 8000):
            prompt = words.take(length)
            texts = [f"{prompt} {words.draw(OWN_WORDS)}" for _ in range(count)]
            begin = time.process_time()
            num_texts = len(set(WordGrams(texts).cluster().tolist()))
            ms = 1000 * (time.process_time() - begin) / count
            name = f"system prompt of {length} words"
            if num_texts != count:
                verdict.fail(f"{name}: {num_texts:,} of {count:,} texts")
            bars = [verdict.check(f"{name}, {count:,}", ms, at_most=MAX_MS, unit=" ms")]
            growth = ms / before if before else 1.0
            if before:
                bars.append(verdict.check(f"{name}, growth", growth, at_most=MAX_GROWTH))
            table.row(name, f"{count:,}", f"{ms:.2f}", f"{growth:.2f}", end=", ".join(bars))
            before = ms
    book = words.draw(100_000).split()
    texts = [
        f"{words.draw(85)} {' '.join(book[40 * n : 40 * n + 30])} {words.draw(85)}"
        for n in range(500 if quick else 2000)
    ]
    name, begin = "a book, quoted by all others", time.process_time()
    num_texts = len(set(WordGrams([" ".join(book), *texts]).cluster().tolist()))
    ms = 1000 * (time.process_time() - begin) / len(texts)
    if num_texts != len(texts) + 1:
        verdict.fail(f"{name}: {num_texts:,} texts")
    end = verdict.check(name, ms, at_most=MAX_MS, unit=" ms")
    table.row(name, f"{len(texts):,}", f"{ms:.2f}", "-", end=end)


def main() -> int:
    """Print the tables; return 1 if a bar is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("documents", type=Path, help="JSONL file of English texts")
    parser.add_argument("--quick", action="store_true", help="without the largest sets")
    options = parser.parse_args()
    words, verdict = Words(options.documents), Verdict()
    show_forms(words, verdict, quick=options.quick)
    print()
    show_copies(words, verdict)
    show_forgotten(words, verdict)
    print()
    show_cost(words, verdict, quick=options.quick)
    return verdict.end()


if __name__ == "__main__":
    sys.exit(main())
