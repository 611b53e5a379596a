"""What is said of tokenizers and documents that are right, and of those that are not."""

from collections.abc import Sequence
from typing import Any

import pytest
from corpus_examples import make_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from memguard.config import DataConfig
from memguard.data.documents import Document, Message
from memguard.data.tokenization import tokenize_documents
from memguard.planner.dry_run import Remark
from memguard.planner.tokenizer_lint import lint_tokenizer

SPECIAL = ("<s>", "</s>", "<pad>", "<unk>", "<end>")
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
# The end-of-turn token stands outside of what the assistant is said to write.
OUTSIDE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<end>{% endfor %}"
)
INSIDE = OUTSIDE.replace("{% endgeneration %}", "<end>{% endgeneration %}").replace(
    "{% endif %}<end>", "{% endif %}"
)


def build_tokenizer(
    template: str | None = None, *, starts_with: str = "<s>", **tokens: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer of single letters; capital ones are unknown to it."""
    letters = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    backend = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(letters)},
            merges=[],
            unk_token="<unk>",
        )
    )
    backend.add_special_tokens(list(SPECIAL))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{starts_with} $A".strip(), special_tokens=[(t, SPECIAL.index(t)) for t in SPECIAL]
    )
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        **tokens,
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


def write_texts(*texts: str) -> list[Document]:
    return [
        Document(id=f"d{number}", source="s", format="text", text=text)
        for number, text in enumerate(texts)
    ]


def write_chats(count: int) -> list[Document]:
    turns = (Message(role="user", content="how"), Message(role="assistant", content="so"))
    return [
        Document(id=f"d{number}", source="s", format="messages", messages=turns)
        for number in range(count)
    ]


def lint(
    documents: Sequence[Document], tokenizer: Any, *, stop_ids: Sequence[int] = (), **data: Any
) -> list[Remark]:
    settings = DataConfig(**{"train": ("x",), "seq_len": 64, **data})
    tokens = list(
        tokenize_documents(
            documents,
            tokenizer,
            append_eos=settings.append_eos,
            max_tokens=settings.max_document_tokens,
            setting="data",
        )
    )
    return lint_tokenizer(
        make_corpus(tokens), tokenizer, data=settings, vocab_size=len(tokenizer), stop_ids=stop_ids
    )


def say(remarks: Sequence[Remark], topic: str) -> str:
    """Everything said of one topic, warnings marked."""
    return " | ".join(
        ("WARNING " if remark.level == "warning" else "") + remark.text
        for remark in remarks
        if remark.topic == topic
    )


def test_nothing_is_wrong_with_plain_texts() -> None:
    remarks = lint(write_texts("a cat", "a dog"), build_tokenizer())
    assert all(remark.level == "info" for remark in remarks)
    assert say(remarks, "BOS") == "All 2 documents begin with '<s>', once."
    assert say(remarks, "EOS") == "All 2 documents end with '</s>', and it is supervised."
    assert say(remarks, "padding") == "'<pad>', which occurs in no document."
    assert "none is needed" in say(remarks, "template")
    assert say(remarks, "unknown") == "No '<unk>' in any document."
    assert "as many as the model has" in say(remarks, "vocabulary")
    assert say(remarks, "lengths") == "Documents have 7 to 7 tokens, the median 7."


def test_two_beginnings_are_told() -> None:
    said = say(lint(write_texts("<s>a cat", "a dog"), build_tokenizer()), "BOS")
    assert said.startswith("WARNING 1 of 2 documents begin with two '<s>'")
    assert "out of the texts" in said
    twice = build_tokenizer(CHATML.replace("{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"))
    said = say(lint(write_chats(3), twice), "BOS")
    assert said.startswith("WARNING All 3 documents begin with two '<s>'")
    assert "out of the chat template" in said


def test_a_beginning_that_is_missing_is_told() -> None:
    without = build_tokenizer(CHATML.replace("{{ bos_token }}", ""))
    said = say(lint(write_chats(2), without), "BOS")
    assert said.startswith("WARNING No document begins with '<s>', which the tokenizer")
    assert "{{ bos_token }}" in said
    # Present in the vocabulary, but not put there.
    said = say(lint(write_texts("a cat"), build_tokenizer(starts_with="")), "BOS")
    assert said.startswith("WARNING No document begins with '<s>', which the tokenizer has but")
    assert "add_bos_token" in said


def test_one_token_for_both_ends_is_no_mistake() -> None:
    gpt2 = build_tokenizer(starts_with="", bos_token="</s>", pad_token="</s>")
    remarks = lint(write_texts("a cat"), gpt2)
    assert all(remark.level == "info" for remark in remarks)
    assert "GPT-2" in say(remarks, "BOS")
    assert say(remarks, "padding").startswith("'</s>' is EOS as well. Harmless here")


def test_texts_without_an_end_are_told() -> None:
    said = say(lint(write_texts("a cat", "a dog"), build_tokenizer(), append_eos=False), "EOS")
    assert said.startswith("WARNING No document ends with '</s>'")
    assert "'data.append_eos' to true" in said
    said = say(lint(write_texts("a cat"), build_tokenizer(eos_token=None)), "EOS")
    assert said.startswith("WARNING The tokenizer has none")


def test_texts_that_are_cut_off_have_no_end_to_miss() -> None:
    long = write_texts("a" * 30, "b" * 40, "ccc")
    remarks = lint(long, build_tokenizer(), max_document_tokens=20)
    assert say(remarks, "EOS") == "1 of 3 documents end with '</s>', and it is supervised."
    assert "2 of 3 documents are cut off at 'data.max_document_tokens' = 20." in say(
        remarks, "lengths"
    )
    remarks = lint(long[:2], build_tokenizer(), max_document_tokens=20, append_eos=False)
    assert say(remarks, "EOS").startswith("All 2 documents are cut off before '</s>'")


def test_an_end_of_turn_outside_of_the_marks_is_told() -> None:
    remarks = lint(write_chats(4), build_tokenizer(OUTSIDE, eos_token="<end>"))
    said = say(remarks, "EOS")
    assert said.startswith("WARNING In all 4 documents the token that ends the assistant's turn")
    assert "('<end>') is not supervised" in said
    assert "{% generation %}" in say(remarks, "template")
    remarks = lint(write_chats(4), build_tokenizer(INSIDE, eos_token="<end>"))
    assert all(remark.level == "info" for remark in remarks)
    assert say(remarks, "EOS") == (
        "In all 4 documents the last reply ends with EOS, and it is supervised."
    )


def test_an_end_of_turn_that_is_not_eos_is_told_unless_the_model_knows_it() -> None:
    chat = build_tokenizer(CHATML)
    said = say(lint(write_chats(2), chat), "EOS")
    assert said.startswith("WARNING All 2 documents end with '<end>', which is not the")
    assert "generation_config.json" in said
    remarks = lint(write_chats(2), chat, stop_ids=[SPECIAL.index("<end>")])
    assert all(remark.level == "info" for remark in remarks)
    assert "no {% generation %} marks" in say(remarks, "template")


def test_replies_without_any_end_are_told() -> None:
    said = say(lint(write_chats(2), build_tokenizer(CHATML.replace("<end>", " "))), "EOS")
    assert said.startswith("WARNING All 2 documents end without a token that says so")


def test_padding_inside_texts_is_counted() -> None:
    remarks = lint(write_texts("a<pad><pad>b", "c<pad>", "d"), build_tokenizer())
    said = say(remarks, "padding")
    assert said.startswith("WARNING '<pad>' occurs 3 times in 2 of 3 documents")
    said = say(lint(write_texts("a"), build_tokenizer(pad_token=None)), "padding")
    assert "rows are filled with EOS ('</s>')" in said


def test_unknown_text_is_counted() -> None:
    said = say(lint(write_texts("aB", "cde"), build_tokenizer()), "unknown")
    # <s> a <unk> </s> and <s> c d e </s>
    assert said.startswith("WARNING 1 tokens (11.11 %) of 1 of 2 documents are '<unk>'")
    said = say(lint(write_texts("B" + "a" * 3000), build_tokenizer()), "unknown")
    assert said.startswith("1 tokens (0.03 %)")


def test_a_vocabulary_that_does_not_fit_is_told() -> None:
    tokenizer = build_tokenizer()
    (document,) = tokenize_documents(
        write_texts("abc"), tokenizer, append_eos=True, max_tokens=None, setting="data"
    )
    corpus = make_corpus([document])
    data = DataConfig(train=("x",))
    for size, said in ((20, "WARNING The tokenizer has 32 tokens"), (40, "8 of the model's 40")):
        remarks = lint_tokenizer(corpus, tokenizer, data=data, vocab_size=size)
        assert said in say(remarks, "vocabulary")


@pytest.mark.parametrize(("num_short", "level"), [(1, "WARNING"), (30, "1 of 31")])
def test_documents_longer_than_a_row_are_told(num_short: int, level: str) -> None:
    texts = ["a" * 38, *["b"] * num_short]  # 40 tokens with BOS and EOS: three pieces of 16
    said = say(lint(write_texts(*texts), build_tokenizer(), seq_len=16), "lengths").split(" | ")[1]
    assert said.startswith(level)
    assert "cut into 3 pieces" in said
