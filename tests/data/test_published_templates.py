"""Chats under the templates of published models: whole, or refused with the part that is missing.

The templates are those that TRL ships; without it nothing is tested here.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from document_examples import document, pair, tokenize

from memguard.data.documents import Message
from memguard.data.tokenization import train_bpe
from memguard.errors import DataError

_TRL = find_spec("trl")
FOLDER = Path(str(_TRL.origin)).parent / "chat_templates" if _TRL else Path("none")
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
pytestmark = pytest.mark.skipif(not NAMES, reason="TRL, which ships the templates, is missing")

Turns = tuple[tuple[str, str], ...]
HEAD: Turns = (("user", "Ask1 now?"), ("assistant", "Reply1 here."))
TAIL: Turns = (("user", "Ask2 now?"), ("assistant", "Reply2 here."))
CHATS: dict[str, Turns] = {
    "one answer": HEAD,
    "system": (("system", "Rule1 holds."), *HEAD),
    "two answers": (*HEAD, *TAIL),
    "many answers": (("system", "Rule1 holds."), *HEAD, *TAIL, *HEAD, *TAIL),
    "reasoning": (HEAD[0], ("assistant", "<think>\nThought1 it.\n</think>\n\nReply1 here.")),
    "reasoning on one line": (HEAD[0], ("assistant", "<think>Thought1 it.</think>Reply1 here.")),
    "reasoning twice": (
        HEAD[0],
        ("assistant", "<think>\nThought1 it.\n</think>\n\nReply1 here."),
        TAIL[0],
        ("assistant", "<think>\nThought2 it.\n</think>\n\nReply2 here."),
    ),
    "earlier reasoning": (
        HEAD[0],
        ("assistant", "<think>\nThought1 it.\n</think>\n\nReply1 here."),
        *TAIL,
    ),
    "tool": (*HEAD, ("tool", '{"Result1": 7}'), TAIL[1]),
    "white space": (("user", " Ask1\n now? \n"), ("assistant", "\n Reply1  here. "), *TAIL),
    "letters": (("user", "Ask1 “é” ไทย & <b>?"), ("assistant", 'Reply1 "日本" ไทย 🎉 \\n {{ x }}')),
    "the same": (("user", "Same1"), ("assistant", "5"), ("user", "5"), ("assistant", "Same1")),
}
assert len(CHATS) == 12


def list_missing(chat: Turns, text: str) -> dict[int, str]:
    """Return the turns that are not whole in a text, by number, with their role."""
    last = max(number for number, (role, _) in enumerate(chat) if role == "assistant")
    missing = {}
    for number, (role, content) in enumerate(chat):
        forms = [[content.strip()], [part.strip() for part in re.split("</?think>", content)]]
        forms += [[content.strip().replace("\\", "\\\\").replace('"', '\\"')]]
        if role == "assistant" and number < last:
            forms.append([content.split("</think>")[-1].strip()])
        if not any(all(part in text for part in form) for form in forms):
            missing[number + 1] = role
    return missing


def check(name: str, chat: Turns, *, is_pair: bool = False) -> str:
    """Check a chat under a template and return what became of it."""
    tokenizer = train_bpe(["a"], vocab_size=257)
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    turns = [{"role": role, "content": content} for role, content in chat]
    messages = tuple(Message(role=role, content=content) for role, content in chat)
    given = pair(messages[:-1], messages[-1:]) if is_pair else document(messages)
    refusal = ""
    try:
        [tokens] = tokenize([given], tokenizer)
    except DataError as error:
        refusal = str(error)
    try:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:
        assert "that the chat template rejects" in refusal
        return "rejected"
    missing = list_missing(chat, rendered)
    if refusal:
        named = re.findall(r"the (?:text|reasoning) of message (\d+) \('(\w+)'\)", refusal)
        assert named, refusal
        assert dict(list(missing.items())[:3]) == {int(number): role for number, role in named}
        return "refused"
    text = tokenizer.decode(tokens.input_ids.tolist())
    assert text == rendered
    assert missing == {}
    answers = tokenizer.decode(tokens.input_ids[tokens.supervised].tolist())
    assert not re.search(r"Ask\d|now|Rule\d|Result\d", answers), "a user's word has a label"
    for role, content in chat[-1:] if is_pair else chat:
        if role == "assistant":
            assert content.split("</think>")[-1].strip() in answers
            if "Thought" in content and content.split("\n")[1:2] and content in text:
                assert re.search(r"Thought\d", content).group() in answers
    return "accepted"


@pytest.mark.parametrize(
    ("name", "chat", "expected"),
    [
        ("llama3", "many answers", "accepted"),  # Plain turns.
        ("qwen3", "reasoning twice", "accepted"),  # Leaves out earlier reasoning.
        ("qwen3", "reasoning on one line", "accepted"),
        ("deepseekv3", "reasoning", "refused"),  # Keeps only what follows it.
        ("qwen3_training", "reasoning twice", "accepted"),  # States what is generated.
        ("gemma", "system", "rejected"),
        ("phi3", "tool", "refused"),
    ],
)
def test_chats_are_whole_or_the_missing_part_is_named(name: str, chat: str, expected: str) -> None:
    assert check(name, CHATS[chat]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_chats_are_whole_or_the_missing_part_is_named(name: str) -> None:
    for chat in CHATS.values():
        check(name, chat)
        check(name, chat, is_pair=True)
