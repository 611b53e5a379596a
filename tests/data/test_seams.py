"""Prompts and answers: together they give back the text, and the labels are the answer."""

from functools import cache
from typing import Any

import pytest
from document_examples import document, pair, tokenize, turns
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from memguard.data.tokenization import train_bpe

WORDS = ["Once the cat sat on the mat: yes, and the hat is red.", "Is it so? Yes it is  so.\n\n"]


@cache
def build(kind: str) -> Any:
    """Return a tokenizer: byte BPE, BPE with a space before texts and byte fallback, or letters."""
    if kind == "bytes":
        return train_bpe(WORDS * 9, vocab_size=330)
    if kind == "letters":
        letters = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95, "é": 96, "日": 97}
        backend = Tokenizer(models.WordLevel(letters | {"</s>": 98, "<unk>": 99}, "<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=["<unk>", "</s>", *bytes_], show_progress=False
        )
        backend.train_from_iterator(WORDS * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def gives_back(kind: str, text: str) -> bool:
    """Return whether the tokenizer itself loses nothing of a text."""
    tokenizer = build(kind)
    ids = tokenizer(text)["input_ids"]
    return bool(tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text)


def check(kind: str, prompt: str, answer: str) -> None:
    tokenizer, text = build(kind), prompt + answer
    options = {"clean_up_tokenization_spaces": False}
    [tokens] = tokenize([pair(prompt, answer)], tokenizer, append_eos=False)
    ids = tokens.input_ids.tolist()
    assert tokenizer.decode(ids, **options) == text
    num_labels = int(tokens.supervised.sum())
    assert tokens.supervised[len(ids) - num_labels :].all()
    before = tokenizer.decode(ids[: len(ids) - num_labels], **options)
    # Decoded after the prompt: alone, a text loses the space before it with some tokenizers.
    assert text.removeprefix(before) == prompt[len(prompt.rstrip()) :] + answer


@pytest.mark.parametrize("kind", ["bytes", "space", "letters"])
@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Is it so? ", "Yes"),
        ("t", "he cat"),
        ("Is it so?", " Yes"),
        ("yes:\n", "\nyes"),
        (" ", "é"),
    ],
)
def test_a_pair_gives_back_its_text(kind: str, prompt: str, answer: str) -> None:
    assert gives_back(kind, prompt + answer)
    check(kind, prompt, answer)


TEXTS = st.text(st.sampled_from(" \n\nthecatsomyYO.?:1é日"), max_size=12)


@pytest.mark.parametrize("kind", ["bytes", "space", "letters"])
@settings(deadline=None, max_examples=40)
@given(prompt=TEXTS, answer=TEXTS)
def test_any_pair_gives_back_its_text(kind: str, prompt: str, answer: str) -> None:
    # The first token of a document is never predicted.
    assume(answer.strip() and len(build(kind)(prompt + answer)["input_ids"]) > 1)
    assume(gives_back(kind, prompt + answer))
    check(kind, prompt, answer)


@pytest.mark.parametrize("kind", ["bytes", "space"])
@pytest.mark.parametrize("end", [": ", ":", "\n"])
def test_the_first_word_after_a_generation_prompt_has_a_label(kind: str, end: str) -> None:
    tokenizer = build(kind)
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{{{ m.role + {end!r} + m.content + '</s>' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ 'assistant' + {end!r} }}}}{{% endif %}}"
    )
    [tokens] = tokenize([document(turns("the cat", "yes", "so?", "the hat"))], tokenizer)
    said = [("user", "the cat"), ("assistant", "yes"), ("user", "so?"), ("assistant", "the hat")]
    text = "".join(f"{role}{end}{content}</s>" for role, content in said)
    assert tokenizer.decode(tokens.input_ids.tolist()) == tokenizer.decode(
        tokenizer(text).input_ids
    )
    answers = tokenizer.decode(tokens.input_ids[tokens.supervised].tolist())
    assert answers.replace(" ", "") == "yes</s>thehat</s>"
