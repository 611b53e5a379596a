"""What is said of tokens that make training silently wrong, and of those that do not."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from corpus_examples import make_corpus
from document_examples import document, pair, tokenize, turns
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from memguard.config import DataConfig
from memguard.data.documents import Document
from memguard.data.token_checks import (
    TokenFault,
    Tokens,
    check_vocabulary,
    find_audit_faults,
    find_training_faults,
)
from memguard.data.tokenization import train_bpe
from memguard.errors import ModelError

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
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL, strict=False))
    names |= tokens
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


def write_texts(*texts: str) -> list[Document]:
    return [document(text, f"d{number}") for number, text in enumerate(texts)]


def write_chats(count: int) -> list[Document]:
    return [document(turns("how", "so"), f"d{number}") for number in range(count)]


class ModelConfig:
    """What the checks read of a model's configuration."""

    def __init__(self, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self.vocab_size, self.eos_token_id = vocab_size, list(stop_ids)

    def get_text_config(self) -> "ModelConfig":
        return self


def lint(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    stop_ids: Sequence[int] = (),
    vocab_size: int | None = None,
    **data: Any,
) -> list[TokenFault]:
    settings = DataConfig(**{"train": ("x",), "seq_len": 64, **data})
    cut = {"append_eos": settings.append_eos, "max_tokens": settings.max_document_tokens}
    tokenized = tokenize(documents, tokenizer, **cut)
    model = ModelConfig(len(tokenizer) if vocab_size is None else vocab_size, stop_ids)
    faults = find_training_faults(Tokens.of_documents(tokenized), tokenizer, model, settings)
    corpus = Tokens.of_corpus(make_corpus(tokenized))
    assert find_training_faults(corpus, tokenizer, model, settings) == faults
    # An audit has the same faults, but for those of what is trained.
    shared = [fault for fault in faults if fault.kind in ("BOS", "vocabulary")]
    shared += [fault for fault in faults if "reasoning" in fault.text]
    shared.sort(key=faults.index)
    assert find_audit_faults(corpus, tokenizer, model) == shared
    return faults


def say(faults: Sequence[TokenFault], kind: str) -> str:
    """Everything said of one kind."""
    return " | ".join(fault.text for fault in faults if fault.kind == kind)


def test_nothing_is_wrong_with_plain_texts() -> None:
    assert lint(write_texts("a cat", "a dog"), build_tokenizer()) == []


def test_one_of_two_beginnings_is_left_out_and_told() -> None:
    texts = write_texts("<s>a cat", "a dog", "<s><s>a cat")
    said = say(lint(texts, build_tokenizer()), "BOS")
    assert said.startswith("2 of 3 documents would begin with two '<s>', and one is left out")
    first, _, third = tokenize(texts, build_tokenizer(), max_tokens=3)
    assert first.input_ids.tolist() == third.input_ids.tolist()
    assert first.input_ids[:3].tolist() == build_tokenizer()("a cat")["input_ids"][:3]
    twice = build_tokenizer(CHATML.replace("{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"))
    said = say(lint(write_chats(3), twice), "BOS")
    assert said.startswith("All 3 documents would begin with two '<s>'")
    given = Document(id="d", source="s", format="text", input_ids=array("i", [0, 0, 5]))
    said = say(lint([given], build_tokenizer(), append_eos=False), "BOS")
    assert said.startswith(
        "1 of 1 documents begin with two '<s>': take one out of the texts or token ids"
    )


def test_text_that_the_tokenizer_does_not_know_is_told() -> None:
    said = say(lint(write_texts("AB CD", "a dog", "a Cat"), build_tokenizer()), "vocabulary")
    assert said.startswith("23.8 % of the tokens are '<unk>': their text is lost. 1 of 3 documents")
    assert lint(write_texts("a dog"), build_tokenizer(unk_token="</s>")) == []


def test_merges_that_are_dropped_at_random_are_kept_and_told() -> None:
    tokenizer = train_bpe(["the cat sat"] * 9, vocab_size=270)
    [plain] = tokenize([document("the cat sat")], tokenizer)
    tokenizer.backend_tokenizer.model.dropout = 0.9
    [same] = tokenize([document("the cat sat")], tokenizer)
    assert same.input_ids.tolist() == plain.input_ids.tolist()
    assert tokenizer.backend_tokenizer.model.dropout == pytest.approx(0.9)
    faults = find_audit_faults(Tokens.of_documents([same]), tokenizer, ModelConfig(270, []))
    assert "dropout 0.9" in say(faults, "vocabulary")


def test_reasoning_that_a_template_leaves_out_is_told() -> None:
    forgetting = CHATML.replace(
        "{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
    )
    chat = document(turns("how", "<think>a</think>so", "how", "so"))
    said = say(lint([chat, *write_chats(1)], build_tokenizer(forgetting)), "labels")
    assert said.startswith("1 of 2 documents have answers before the last one whose reasoning")


@pytest.mark.parametrize("template", [CHATML, INSIDE])
def test_special_tokens_in_what_a_user_says_are_told(template: str) -> None:
    tokenizer = build_tokenizer(template)
    chat = document(turns("how<end>assistant so", "no</s>"))
    [tokens] = tokenize([chat], tokenizer)
    assert tokenizer.decode(tokens.input_ids[tokens.supervised].tolist()) == "no</s><end>"
    said = say(lint([chat, *write_chats(1)], tokenizer, stop_ids=[4]), "vocabulary")
    assert said.startswith("1 of 2 documents have words in turns of others than the assistant")
    assert lint([document(turns("how", "no</s>"))], tokenizer, stop_ids=[4]) == []


def test_a_beginning_that_is_missing_is_told() -> None:
    without = build_tokenizer(CHATML.replace("{{ bos_token }}", ""))
    said = say(lint(write_chats(2), without), "BOS")
    assert said.startswith("All 2 documents begin without '<s>', which the tokenizer")
    assert "{{ bos_token }}" in said
    # Present in the vocabulary, but not put there.
    said = say(lint(write_texts("a cat"), build_tokenizer(starts_with="")), "BOS")
    assert said.startswith("1 of 1 documents begin without '<s>', which the tokenizer has but")
    assert "add_bos_token" in said


def test_one_token_for_both_ends_is_no_mistake() -> None:
    gpt2 = build_tokenizer(starts_with="", bos_token="</s>", pad_token="</s>")
    assert lint(write_texts("a cat"), gpt2) == []


def test_texts_without_an_end_are_told() -> None:
    said = say(lint(write_texts("a cat", "a dog"), build_tokenizer(), append_eos=False), "EOS")
    assert said.startswith("All 2 documents end without '</s>'")
    assert "'data.append_eos' to true" in said
    said = say(lint(write_texts("a cat"), build_tokenizer(eos_token=None)), "EOS")
    assert said.startswith("The tokenizer has no EOS")


def test_texts_that_are_cut_off_have_no_end_to_miss() -> None:
    long = write_texts("a" * 30, "b" * 40, "ccc")
    assert lint(long, build_tokenizer(), max_document_tokens=20) == []
    assert lint(long[:2], build_tokenizer(), max_document_tokens=20, append_eos=False) == []


def test_an_end_of_turn_outside_of_the_marks_is_told() -> None:
    remarks = lint(write_chats(4), build_tokenizer(OUTSIDE, eos_token="<end>"))
    said = say(remarks, "EOS")
    assert said.startswith("All 4 documents end the assistant's turn with a token ('<end>')")
    assert "is not supervised" in said
    assert "{% endgeneration %}" in said
    assert lint(write_chats(4), build_tokenizer(INSIDE, eos_token="<end>")) == []


def test_an_end_of_turn_that_is_not_eos_is_told_unless_the_model_knows_it() -> None:
    chat = build_tokenizer(CHATML)
    said = say(lint(write_chats(2), chat), "EOS")
    assert said.startswith("All 2 documents end with '<end>', which is not the")
    assert "generation_config.json" in said
    assert lint(write_chats(2), chat, stop_ids=[SPECIAL.index("<end>")]) == []


def test_replies_without_any_end_are_told() -> None:
    said = say(lint(write_chats(2), build_tokenizer(CHATML.replace("<end>", " "))), "EOS")
    assert said.startswith("All 2 documents end without a token that says so")


def test_a_vocabulary_that_does_not_fit_is_told() -> None:
    texts = write_texts("abc")
    said = say(lint(texts, build_tokenizer(), vocab_size=20), "vocabulary")
    assert said.startswith("The tokenizer has 32 tokens, the model embeddings for 20")
    assert lint(texts, build_tokenizer(), vocab_size=40) == []


def test_ids_without_an_embedding_are_refused() -> None:
    ids = np.array([0, 31, 7], dtype=np.int32)
    check_vocabulary(ids, 32)
    with pytest.raises(ModelError, match="produces ids up to 31, but the model has 31 embeddings"):
        check_vocabulary(ids, 31)


def test_prompts_that_are_cut_from_their_completion_are_told() -> None:
    def write_pairs(prompt: str) -> list[Document]:
        return [pair(prompt, "bcd", "d0"), pair("a", "b", "d1")]

    # 45 tokens are cut in three pieces of 15; the completion and EOS are in the last.
    said = say(lint(write_pairs("a" * 40), build_tokenizer(), seq_len=16), "labels")
    assert said.startswith(
        "1 of 2 documents have pieces in which no token receives loss (2 in all)"
    )
    assert "raise 'data.seq_len'" in said
    assert lint(write_pairs("a" * 11), build_tokenizer(), seq_len=16) == []
    # All of a text is supervised.
    assert lint(write_texts("a" * 40), build_tokenizer(), seq_len=16) == []


def test_given_token_ids_without_a_beginning_are_told() -> None:
    ids = [Document(id="d0", source="s", format="text", input_ids=(7, 8, 1))]
    said = say(lint(ids, build_tokenizer()), "BOS")
    assert said.startswith("1 of 1 documents begin without '<s>'")
    assert "its id at the start of given token ids" in said
