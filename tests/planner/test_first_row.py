"""The first row: states by hand, and text that is put together again."""

from pathlib import Path

import pytest
from row_examples import make_corpus, make_loader
from transformers import AutoTokenizer

from memguard.data.tokenization import train_bpe
from memguard.planner.rows import decode_tokens, read_first_row

TEXTS = ["the cat sat on the mat", "日本の文字 🙂 and more", "a\tb\n\nc  d"]


def test_the_first_row_by_hand() -> None:
    tokenizer = train_bpe(["abcdefghij klmnop"], vocab_size=300)
    corpus = make_corpus([6, 5, 16], epochs=1)
    loader = make_loader(corpus, batch_size=2, k=2, mode="static")
    first = read_first_row(loader, tokenizer)
    rows, row = loader.rows, loader.schedule[0]
    numbers = rows.document[rows.row_start[row] : rows.row_start[row + 1]]
    assert [piece.id for piece in first.pieces] == [f"d{number}" for number in numbers]
    for piece, number in zip(first.pieces, numbers, strict=True):
        size = corpus.manifest[number].num_tokens
        expected = [
            # The first third is a prompt, and of the rest every odd position is dropped.
            "ignored" if t < max(1, size // 3) else "dropped" if t % 2 else "supervised"
            for t in range(size)
        ]
        assert [token.state for token in piece.tokens] == expected
    num_tokens = sum(len(piece.tokens) for piece in first.pieces)
    assert first.num_padding == 16 - num_tokens
    states = ("supervised", "dropped", "ignored", "padding")
    assert sum(first.count(state) for state in states) == 16


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_text_put_together_are_the_text(text: str) -> None:
    tokenizer = train_bpe(["the cat sat on the mat"], vocab_size=280)
    ids = tokenizer(text)["input_ids"]
    texts = decode_tokens(ids, tokenizer)
    assert len(texts) == len(ids)
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)


def test_spaces_of_a_sentencepiece_tokenizer_are_kept(shared_data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "checkpoints" / "stories260K")
    ids = tokenizer("Once upon a time 🙂 there was")["input_ids"]
    texts = decode_tokens(ids, tokenizer)
    assert texts[0] == "<s>"
    assert "".join(texts[1:]).strip() == "Once upon a time 🙂 there was"
