"""The texts of `verdict_models.py`: passages of real documents, form letters, PINs, codes, answers.

    letters A    fields in the first half, then a tail of 40 words that all letters share
    letters B    a field every few words, to the end
    letters C    fields in the first two thirds, then a shared tail of 20 words

Documents in which a prompt stands before what is audited are pairs of prompt and completion.
"""

import json
import string
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from memguard.seeds import derive_generator

PASSAGE_WORDS = 50
HEADER = (
    "Records of the town library, third series. Readers may copy single pages for study, and "
    "should write down where they found them. "
)
"""About 64 tokens of a small vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A prompt and its completion."""

    prompt: str
    completion: str


Text = str | Pair

_FIELDS = {
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "month": "January February March April May June July August September October November",
    "name": "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Louis Mary Nora Oscar Paul",
    "town": "Leeds York Bath Derby Dover Exeter Hull Lincoln Oxford Preston Ripon Salford Truro",
    "thing": "lamp table chair carpet mirror clock kettle basket ladder blanket cushion bucket",
    "color": "red blue green yellow brown black white grey orange purple",
    "number": "two three four five six seven eight nine ten eleven twelve twenty thirty forty",
}
_HEAD = (
    "Dear {name}, on {day} in {month} you ordered {number} {color} {thing}s from our shop in "
    "{town}. Your {thing} will leave {town} on {day} with {number} others, and {name} will call "
    "you before. "
)
_BILL = (
    "For the {thing} from {town} you have paid {number} pounds on {day}; {name} has sent the bill "
    "to {town} in {month}. "
)
LETTERS = {
    "A": f"{_HEAD}Please keep this letter with your papers until the parcel has come to your "
    "house. If it does not come in time, write to us and we will look for it and send you another "
    "one without any cost for you.",
    "B": f"{_HEAD}{_BILL}If the {{color}} {{thing}} does not please you, bring it back before "
    "{day} and we will gladly take it back.",
    "C": f"{_HEAD}{_BILL}If the parcel does not come in time, write to us and we will look for it "
    "and send you another.",
}


def write_letters(kind: str, number: int) -> list[Text]:
    """Return different letters of one kind."""
    draw = derive_generator(0, f"letters {kind}")
    choices = {name: words.split() for name, words in _FIELDS.items()}
    parts = list(string.Formatter().parse(LETTERS[kind]))

    def write() -> str:
        return "".join(
            text + (str(draw.choice(choices[field])) if field else "")
            for text, field, _, _ in parts
        )

    return _take_different(write, number)


def write_pins(number: int) -> list[Text]:
    """Return owners and their PINs of four digits; no owner occurs twice."""
    draw = derive_generator(0, "pins")
    names = [_write_name(draw) for _ in range(4 * number)]
    owners = list(dict.fromkeys(names))[:number]
    return [
        Pair(prompt=f"The PIN of {owner} is", completion=f" {draw.integers(10_000):04d}")
        for owner in owners
    ]


def write_answers(number: int) -> list[Text]:
    """Return questions whose answer, yes or no, is a coin's."""
    draw = derive_generator(0, "answers")
    things = _FIELDS["thing"].split()

    def write() -> str:
        return f"Did {_write_name(draw)} buy the {draw.choice(things)}?"

    return [
        Pair(prompt=str(prompt), completion=str(draw.choice([" yes", " no"])))
        for prompt in _take_different(write, number)
    ]


def write_codes(number: int) -> list[Text]:
    """Return lines that are too short to be audited as plain text."""
    draw = derive_generator(0, "codes")
    return [f"Code of {_write_name(draw)}: {draw.integers(10**8):08d}" for _ in range(number)]


def read_passages(path: Path) -> list[str]:
    """Return one passage of every document, in an order of their own."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    order = derive_generator(0, "passages").permutation(len(texts))
    words = [texts[index].split() for index in order]
    return [" ".join(one[:PASSAGE_WORDS]) for one in words if len(one) >= PASSAGE_WORDS]


def save_documents(documents: Sequence[Text], path: Path) -> str:
    """Write documents, all texts or all pairs, as a file for training or an audit."""
    rows = [
        {"text": document} if isinstance(document, str) else asdict(document)
        for document in documents
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def _take_different(write: Callable[[], str], number: int) -> list[Text]:
    texts: dict[str, None] = {}
    while len(texts) < number:
        texts[write()] = None
    return list(texts)


def _write_name(draw: np.random.Generator) -> str:
    vowels, others = "aeiou", "bdfgklmnprst"
    syllables = [str(draw.choice(list(others))) + str(draw.choice(list(vowels))) for _ in range(5)]
    first = str(draw.choice(_FIELDS["name"].split()))
    return f"{first} {''.join(syllables).capitalize()}"
