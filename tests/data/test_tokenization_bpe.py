"""The byte-level BPE: encodes everything, exactly, and nothing it was not asked to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.data.tokenization import END_OF_TEXT, train_bpe

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"] * 20
TEXTS += [f"number {n} of {n * n}" for n in range(100)]


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return train_bpe(TEXTS, vocab_size=300)


# Hypothesis draws the marker itself hardly ever; with it the text is not plain any more.
@given(text=st.text(max_size=60).filter(lambda text: END_OF_TEXT not in text))
def test_every_text_is_encoded_and_comes_back(tokenizer: object, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids
    assert all(0 <= token < len(tokenizer) for token in ids)


def test_the_vocabulary_has_the_size_asked_for_where_the_text_gives_it(tokenizer: object) -> None:
    assert len(tokenizer) == 300
    assert len(train_bpe(["ab"], vocab_size=300)) <= 259


def test_one_special_token_for_all_roles(tokenizer: object) -> None:
    assert {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token} == {END_OF_TEXT}
    assert tokenizer.all_special_ids == [tokenizer.eos_token_id]
    assert tokenizer(f"a{END_OF_TEXT}b")["input_ids"].count(tokenizer.eos_token_id) == 1


def test_frequent_words_become_one_token(tokenizer: object) -> None:
    assert len(tokenizer(" the cat")["input_ids"]) == 2


def test_the_same_texts_give_the_same_tokenizer(tokenizer: object) -> None:
    again = train_bpe(iter(TEXTS), vocab_size=300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_it_is_saved_and_read_back_by_transformers(
    tokenizer: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from memguard.hf.checkpoint import load_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    read = load_tokenizer(str(folder))
    text = "the cat  sat ; on 'the' mat . \n\n naïve \u202e x"
    assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert read.decode(read(text)["input_ids"]) == text
    assert read.eos_token_id == tokenizer.eos_token_id
    assert read.all_special_ids == tokenizer.all_special_ids
