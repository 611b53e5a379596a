"""Chat templates that leave out turns are refused; those that change or merge them are not."""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import document_examples
import pytest

from memguard.data.documents import Document, Message
from memguard.data.tokenization import TokenizedDocument, train_bpe
from memguard.errors import DataError

ASK = "{% if add_generation_prompt %}<assistant>{% endif %}"
PAIRS = (
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (before if loop.BEFORE else '') + m.content.strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}"
)
SPLIT_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set before, turns = '', messages %}{% endif %}"
)


def write_each(*roles: str, content: str = "m.content") -> str:
    """Return a template that renders the turns of some roles, and has no word about others."""
    return (
        f"{{% for m in messages %}}{{% if m.role in {roles} %}}"
        f"{{{{ '<' + m.role + '>' + ({content}) + '<end>' }}}}{{% endif %}}{{% endfor %}}{ASK}"
    )


CHATML = write_each("system", "user", "assistant", "tool")
# The shapes of published templates, in our own words.
LLAMA_2 = SPLIT_SYSTEM + PAIRS.replace("BEFORE", "first")
MISTRAL = SPLIT_SYSTEM + PAIRS.replace("BEFORE", "last")
MISTRAL_1 = "{% set before, turns = '', messages %}" + PAIRS.replace("BEFORE", "first")
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + m.content | trim + '<end>' }}"
    "{% endfor %}{% if add_generation_prompt %}<turn>model{% endif %}"
)
QWEN = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<user>{% endif %}"
    "{{ '<tool_response>' + m.content + '</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<end>{% endif %}"
    "{% elif m.role == 'assistant' and not loop.last %}"
    "{{ '<assistant>' + m.content.split('</think>')[-1].strip() + '<end>' }}"
    "{% else %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endif %}{% endfor %}" + ASK
)
LLAMA_3 = write_each(
    *("system", "user", "assistant", "tool"),
    content="m.content | tojson if m.role == 'tool' else m.content | trim",
)
ZEPHYR = write_each("system", "user", "assistant")
PHI_3 = write_each("user", "assistant")
MARKED, QWEN_MARKED = (
    template.replace(begin, "{% generation %}" + begin, 1).replace(
        "+ '<end>' }}", "+ '<end>' }}{% endgeneration %}", 1
    )
    for template, begin in ((ZEPHYR, "{{ '<' + m.role"), (QWEN, "{{ '<assistant>'"))
)
FIRST_SYSTEM = CHATML.replace("{% if m.", "{% if (m.role != 'system' or loop.first) and m.")
SHOUTING = write_each("system", "user", "assistant", content="m.content | upper")

Turns = tuple[tuple[str, str], ...]
PLAIN: Turns = (("user", "hi"), ("assistant", "5"))
SYSTEM: Turns = (("system", "Speak\nas 'Ada'.\n"), *PLAIN)
LONGER: Turns = (*SYSTEM, ("user", "more"), ("assistant", " six "))
# The tool's text is also a part of the answer: looking for it would find it.
TOOL: Turns = (*PLAIN, ("tool", '"5",\n'), ("assistant", 'It says "5",\n as said'))
TOOLS: Turns = (*TOOL[:3], ("tool", "7"), TOOL[3])
THOUGHT: Turns = (("user", "hi"), ("assistant", "<think>so</think>"), *TOOL[2:])


def tokenize(template: str, turns: Turns, **settings: Any) -> tuple[str, TokenizedDocument]:
    """Return the whole text of a conversation as it is trained, and its tokens."""
    tokenizer = train_bpe(["a"], vocab_size=257)
    tokenizer.chat_template = template
    messages = tuple(Message(role=role, content=content) for role, content in turns)
    settings = settings or {"format": "messages", "messages": messages}
    documents = [Document(id="x-000001", source="x.jsonl", **settings)]
    (tokens,) = document_examples.tokenize(documents, tokenizer)
    return tokenizer.decode(tokens.input_ids.tolist()), tokens


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (CHATML, SYSTEM, "<system>Speak\nas 'Ada'.\n<end><user>hi<end><assistant>5<end>"),
        (LLAMA_2, LONGER, "[INST] Speak\nas 'Ada'.\n\n\nhi [/INST] 5 </s>[INST] more [/INST] six"),
        (GEMMA, PLAIN, "<turn>userhi<end><turn>model5<end>"),
        (QWEN, TOOLS, '<user><tool_response>"5",\n</tool_response><tool_response>7</tool_respons'),
        (QWEN_MARKED, THOUGHT, "<user>hi<end><assistant><end><user><tool_response>"),
        (LLAMA_3, SYSTEM, "<system>Speak\nas 'Ada'.<end><user>hi<end><assistant>5<end>"),
        (LLAMA_3, TOOL, r'<tool>"\"5\",\n"<end>'),
        # Nothing is lost with a turn without text.
        (PHI_3, (("system", " \n"), *PLAIN), "<user>hi<end><assistant>5<end>"),
    ],
)
def test_turns_that_a_template_merges_strips_or_escapes_are_accepted(
    template: str, turns: Turns, expected: str
) -> None:
    text, _ = tokenize(template, turns)
    assert expected in text


@pytest.mark.parametrize(
    ("template", "turns", "parts"),
    [
        (ZEPHYR, TOOL, {3: "tool"}),
        (MARKED, TOOL, {3: "tool"}),
        (PHI_3, SYSTEM, {1: "system"}),
        # It goes before the last turn if that is the user's: in prompts, not in what is trained.
        (MISTRAL, SYSTEM, {1: "system"}),
        (PHI_3, (*SYSTEM, *TOOL[2:]), {1: "system", 4: "tool"}),
        (FIRST_SYSTEM, (*LONGER[:3], ("system", "Stop."), *LONGER[3:]), {4: "system"}),
        # It also changes the user's text.
        (SHOUTING, TOOL, {1: "user", 3: "tool", 4: "assistant"}),
        # One that names the roles of another model: its answers would not be trained.
        (write_each("user", "model"), PLAIN, {2: "assistant"}),
        (CHATML, (("remark " * 9, "a"), *PLAIN), {1: "(63 characters)"}),
    ],
)
def test_turns_that_a_template_leaves_out_are_refused(
    template: str, turns: Turns, parts: dict[int, str]
) -> None:
    with pytest.raises(DataError) as caught:
        tokenize(template, turns)
    named = " and ".join(f"the text of message {n} ('{role}')" for n, role in parts.items())
    assert str(caught.value) == (
        f"'data' has 1 of 1 documents of which the chat template leaves out or changes {named}, so "
        "that it would not be trained or audited (take a tokenizer whose template renders it, "
        "correct its chat_template.jinja, or remove it from the documents): x-000001."
    )


def test_a_prompt_of_messages_is_checked_too() -> None:
    prompt = (Message(role="system", content="a"), Message(role="user", content="b"))
    completion = (Message(role="assistant", content="c"),)
    form = {"format": "prompt_completion", "prompt": prompt, "completion": completion}
    text, tokens = tokenize(ZEPHYR, (), **form)
    assert text == "<system>a<end><user>b<end><assistant>c<end>"
    assert int(tokens.supervised.sum()) == 6
    with pytest.raises(DataError, match=r"the text of message 1 \('system'\)"):
        tokenize(PHI_3, (), **form)


@pytest.mark.parametrize(
    ("template", "turns", "reason"),
    [
        (GEMMA, SYSTEM, "System role not supported"),
        (MISTRAL_1, SYSTEM, "Roles must alternate"),
        (LLAMA_2, TOOLS, "Roles must alternate"),
    ],
)
def test_turns_that_a_template_rejects_keep_its_own_reason(
    template: str, turns: Turns, reason: str
) -> None:
    with pytest.raises(DataError, match=rf"that the chat template rejects \({reason}\): x-000001"):
        tokenize(template, turns)


@pytest.mark.parametrize(
    ("template", "lack"),
    [
        (None, "has no chat template: take an instruction-tuned model's"),
        ({"tool_use": CHATML, "rag": CHATML}, "has no chat template named 'default', only others"),
    ],
)
def test_chats_need_a_template(template: Any, lack: str) -> None:
    with pytest.raises(DataError, match=f"'data' holds conversations, but the tokenizer {lack}"):
        tokenize(template, PLAIN)
    text, _ = tokenize({"tool_use": SHOUTING, "default": CHATML}, PLAIN)  # type: ignore[arg-type]
    assert text == "<user>hi<end><assistant>5<end>"


def test_a_template_that_takes_no_other_text_must_mark_its_answers() -> None:
    """The mark is then no evidence: the template rejects it, not the user's turns."""
    strict = (
        "{% for m in messages %}{% if '73' in m.content %}{{ raise_exception('no') }}{% endif %}"
    )
    with pytest.raises(DataError, match="renders depending on their text"):
        tokenize(strict + CHATML.removeprefix("{% for m in messages %}"), PLAIN)
    text, _ = tokenize(strict + MARKED.removeprefix("{% for m in messages %}"), PLAIN)
    assert text == "<user>hi<end><assistant>5<end>"


@pytest.mark.parametrize("content", ["<tool_response>7</tool_response>", ""])
def test_templates_that_look_at_a_text_are_located_by_their_answers(content: str) -> None:
    looking = CHATML.replace("(m.content)", "('(none)' if not m.content else m.content)").replace(
        "{% for", "{% if messages[0].content.endswith('response>') %}<tools>{% endif %}{% for", 1
    )
    _, tokens = tokenize(looking, (("user", content), *PLAIN[1:], *LONGER[3:]))
    assert int(tokens.supervised.sum()) == len("5<end> six <end>")


def test_words_of_headers_in_a_user_turn_have_no_label() -> None:
    """Without marks in the user's turns, the place of a text is not certain."""
    looking = (
        "{% if messages[0].content.endswith('.') %}{% set a = '!' %}{% endif %}"
        "{% for m in messages %}{{ '\nuser:\n' if m.role == 'user' else '\nbot:' }}"
        "{{ m.content }}{{ a }}{% endfor %}{% if add_generation_prompt %}\nbot:{% endif %}"
    )
    for said in ("user:", "u.", "bot:", "\nbot:x", "bot"):
        chat = (("user", "a."), PLAIN[1], ("user", said), ("assistant", " six"))
        _, tokens = tokenize(looking, chat)
        assert len(" six") <= tokens.supervised.sum() - len("5!") <= len(" six!")
        assert tokens.supervised[-len(" six!") : -1].all()


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_time_is_linear_in_the_number_of_turns(template: str) -> None:
    tokenizer = train_bpe(["a"], vocab_size=257)
    tokenizer.chat_template = template

    def measure(num_turns: int) -> float:
        roles = ("user", "assistant") * (num_turns // 2)
        messages = tuple(Message(role=role, content=f"turn {n}") for n, role in enumerate(roles))
        given = Document(id="x", source="s", format="messages", messages=messages)
        times = []
        for _ in range(3):
            begin = time.process_time()
            document_examples.tokenize([given], tokenizer)
            times.append(time.process_time() - begin)
        return min(times)

    measure(20)
    assert measure(2000) <= 12 * measure(200) + 0.05


PUBLISHED = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
"""Templates of published models, as trl ships them for training."""


@pytest.mark.parametrize(
    "name",
    ["qwen3", "llama3", "deepseekv3", "glm4moe", "gptoss", "gemma3", "cohere2", "nemotron_3_super"],
)
def test_published_templates_are_accepted(name: str) -> None:
    """Several of them strip text, leave out earlier reasoning, or move the system's turn."""
    turns = (*SYSTEM[:2], ("assistant", "<think>so</think>5"), *LONGER[3:])
    text, _ = tokenize((PUBLISHED / f"{name}_training.jinja").read_text(), turns)
    assert all(piece in text for piece in ("as 'Ada'.", "hi", "5", "more", "six"))


@pytest.mark.parametrize(
    ("name", "part"), [("phi3", r"message 3 \('tool'\)"), ("smolvlm", r"message 2 \('assistant'\)")]
)
def test_published_templates_that_leave_turns_out(name: str, part: str) -> None:
    with pytest.raises(DataError, match=f"the text of {part}"):
        tokenize((PUBLISHED / f"{name}_training.jinja").read_text(), TOOL)
