"""A written table of small rows: how each is read, its text in the order of training, its mask.

The chat template of the tests renders a turn as ``<role>content<end>``. In ``trained`` the text
that receives loss is between brackets, written by hand from the rules, not by the code under test.
"""

from dataclasses import dataclass
from typing import Any

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row and what becomes of it."""

    name: str
    row: dict[str, Any]
    trained: str | None
    """The rendered text, its trained parts in brackets; None: the row has no text."""
    settings: dict[str, Any]
    """Fields of the settings that are given."""
    has_template: bool
    words: str | None = None
    """What near-duplicates are compared by, where the test names it."""


def case(
    name: str,
    row: dict[str, Any],
    trained: str | None,
    *,
    has_template: bool = True,
    words: str | None = None,
    **settings: Any,
) -> Case:
    return Case(
        name=name,
        row=row,
        trained=trained,
        settings=settings,
        has_template=has_template,
        words=words,
    )


def turns(*pairs: tuple[str, str], keys: tuple[str, str] = ("from", "value")) -> dict[str, Any]:
    name = "messages" if keys[0] == "role" else "conversations"
    return {name: [dict(zip(keys, pair, strict=True)) for pair in pairs]}


TASK = {"instruction": "Add.", "input": "2 3", "output": "5"}
CASES = [
    case("text", {"text": "a b"}, "[a b</s>]"),
    case("text under another name", {"body": "a b", "n": 1}, "[a b</s>]", columns={"text": "body"}),
    case("prompt and completion", {"prompt": "a ", "completion": "b"}, "a[ b</s>]"),
    case(
        "question and answer",
        {"question": "a ", "answer": "b"},
        "a[ b</s>]",
        columns={"prompt": "question", "completion": "answer"},
    ),
    case(
        "messages",
        turns(("user", "a"), ("assistant", "b"), keys=("role", "content")),
        "<user>a<end><assistant>[b<end>]",
    ),
    case(
        "both text and messages: messages, as before there were formats",
        {"text": "c", **turns(("user", "a"), ("assistant", "b"), keys=("role", "content"))},
        "<user>a<end><assistant>[b<end>]",
    ),
    case(
        "both instruction and text: text, as before there were formats",
        {**TASK, "text": "all of it"},
        "[all of it</s>]",
    ),
    case(
        "both, and the format says which",
        {**TASK, "text": "all of it"},
        "<user>Add.\n2 3<end><assistant>[5<end>]",
        format="alpaca",
    ),
    case(
        "alpaca without a chat template",
        TASK,
        f"{WITH_INPUT}Add.\n\n### Input:\n2 3\n\n### Response:[5</s>]",
        has_template=False,
        words="Add.\n2 3\n5",
    ),
    case(
        "alpaca with an empty input, stanford",
        {**TASK, "input": ""},
        f"{WITHOUT_INPUT}Add.\n\n### Response:[5</s>]",
        template="stanford",
        words="Add.\n5",
    ),
    case(
        "alpaca without a column of inputs, stanford",
        {"instruction": "Add {input}.", "output": "5"},
        f"{WITHOUT_INPUT}Add {{input}}.\n\n### Response:[5</s>]",
        has_template=False,
    ),
    case(
        "alpaca with a chat template",
        TASK,
        "<user>Add.\n2 3<end><assistant>[5<end>]",
        words="Add.\n2 3\n5",
    ),
    case("alpaca, input null, chat", {**TASK, "input": None}, "<user>Add.<end><assistant>[5<end>]"),
    case(
        "alpaca, empty instruction, chat",
        {**TASK, "instruction": ""},
        "<user>2 3<end><assistant>[5<end>]",
    ),
    case(
        "alpaca with system and history: the answers of the history are trained",
        {**TASK, "system": "Be brief.", "history": [["Hi", "Ho"], ["What?", "So."]]},
        "<system>Be brief.<end><user>Hi<end><assistant>[Ho<end>]<user>What?<end><assistant>"
        "[So.<end>]<user>Add.\n2 3<end><assistant>[5<end>]",
    ),
    case(
        "alpaca, empty system and history, stanford",
        {**TASK, "system": "", "history": []},
        f"{WITH_INPUT}Add.\n\n### Input:\n2 3\n\n### Response:[5</s>]",
        template="stanford",
    ),
    case("alpaca, empty output", {**TASK, "output": " "}, None),
    case(
        "sharegpt",
        turns(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")),
        "<user>a<end><assistant>[b<end>]<user>c<end><assistant>[d<end>]",
        words="a\nb\nc\nd",
    ),
    case(
        "sharegpt with a system turn and other names of roles",
        turns(("system", "s"), ("user", "a"), ("model", "b"), ("user", "c"), ("assistant", "d")),
        "<system>s<end><user>a<end><assistant>[b<end>]<user>c<end><assistant>[d<end>]",
    ),
    case(
        "sharegpt with a column system",
        {"system": "s", **turns(("human", "a"), ("gpt", "b"))},
        "<system>s<end><user>a<end><assistant>[b<end>]",
    ),
    case(
        "sharegpt, system missing in this row",
        {"system": None, **turns(("human", "a"), ("gpt", "b"))},
        "<user>a<end><assistant>[b<end>]",
    ),
    case(
        "sharegpt with tools: the call is trained, its result is not",
        turns(("human", "a"), ("function_call", "f(1)"), ("observation", "2"), ("gpt", "b")),
        "<user>a<end><assistant>[f(1)<end>]<tool>2<end><assistant>[b<end>]",
    ),
    case(
        "sharegpt with roles in other scripts and other keys",
        {"dialogue": [{"wer": "人", "was": "ä"}, {"wer": "机", "was": "ß\n🙂"}]},
        "<user>ä<end><assistant>[ß\n🙂<end>]",
        columns={"conversations": "dialogue"},
        tags={"role": "wer", "content": "was", "user": "人", "assistant": "机"},
    ),
    case(
        "sharegpt with the weights of its roles",
        {
            "conversations": [
                {"from": "human", "value": "a", "weight": 0},
                {"from": "gpt", "value": "b", "weight": 1.0},
            ]
        },
        "<user>a<end><assistant>[b<end>]",
    ),
    case(
        "sharegpt that begins with the assistant, a tag with another role than usual",
        turns(("bot", "a"), ("gpt", "b")),
        "<assistant>[a<end>]<user>b<end>",
        tags={"assistant": "bot", "user": "gpt"},
    ),
    case("sharegpt without turns", {"conversations": []}, None),
]
