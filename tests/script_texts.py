"""Texts of random words in eight scripts, and three kinds of tokenizers that divide letters."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from memguard.data.tokenization import train_bpe

# First and last code points: letters, then marks that are none; and what stands between words.
SCRIPTS: dict[str, tuple[tuple[int, int], tuple[int, int] | None, str]] = {
    "English": ((0x61, 0x7A), None, " "),
    "Cyrillic": ((0x430, 0x44F), None, " "),
    "Greek": ((0x3B1, 0x3C9), None, " "),
    "Thai": ((0xE01, 0xE2E), (0xE34, 0xE3A), ""),
    "Hindi": ((0x905, 0x939), (0x93E, 0x94D), " "),
    "Arabic": ((0x621, 0x63A), (0x64B, 0x652), " "),
    "Japanese": ((0x3041, 0x3096), None, ""),
    "Chinese": ((0x4E00, 0x55FF), None, ""),
}
SPECIAL = "<s>"
_MARKED = 0.25
"""Share of the letters that a mark follows."""


def draw_texts(script: str, count: int, *, words: int = 110, seed: int = 0) -> list[str]:
    """Return texts of a script; between two words of some is a space, of others nothing."""
    draw = np.random.default_rng([seed, list(SCRIPTS).index(script)])
    (first, last), marks, gap = SCRIPTS[script]

    def draw_word() -> str:
        letters = draw.integers(first, last + 1, draw.integers(1, 7)).tolist()
        word = [chr(code) for code in letters]
        if marks is not None:
            is_marked = draw.random(len(word)) < _MARKED
            drawn = draw.integers(marks[0], marks[1] + 1, len(word)).tolist()
            word = [
                c + chr(m) * bool(is_) for c, m, is_ in zip(word, drawn, is_marked, strict=True)
            ]
        return "".join(word)

    vocabulary = [draw_word() for _ in range(400)]
    return [gap.join(draw.choice(vocabulary, words)) for _ in range(count)]


def wrap(text: str, *, seed: int = 0) -> str:
    """Return a text with other white space: between words, or where a line ends in a word."""
    draw = np.random.default_rng(seed)
    if " " not in text:
        # Between characters, as a script without spaces is wrapped; never before a mark.
        ends = [n for n in range(1, len(text)) if draw.random() < 0.05 and text[n].isalnum()]
        return "\n".join(text[a:b] for a, b in pairwise([0, *ends, len(text)]))
    words = text.split()
    gaps = draw.choice([" ", "\n", "\n\n  ", "\t"], len(words) - 1).tolist()
    return "".join(f"{word}{gap}" for word, gap in zip(words, [*gaps, ""], strict=True))


def build_bpe() -> PreTrainedTokenizerFast:
    """A byte-level BPE of English and some Cyrillic, as GPT-2's: other letters are divided."""
    texts = draw_texts("English", 60, seed=1) + draw_texts("Cyrillic", 4, seed=1)
    tokenizer: PreTrainedTokenizerFast = train_bpe(texts, vocab_size=700)
    return tokenizer


def build_fallback() -> PreTrainedTokenizerFast:
    """A BPE like SentencePiece's: words of ASCII letters, and the bytes of all else."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
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
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", SPECIAL, *names], show_progress=False
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*"), "isolated")
    backend.train_from_iterator(draw_texts("English", 60, seed=1), trainer)
    stored = json.loads(backend.to_str())
    # As in SentencePiece's vocabularies, bytes are tokens like all others.
    stored["added_tokens"] = [each for each in stored["added_tokens"] if each["id"] < 2]
    return _finish(Tokenizer.from_str(json.dumps(stored)))


def build_characters() -> PreTrainedTokenizerFast:
    """One token for each character of all scripts."""
    characters = {" ", "\n", "\t"}
    for letters, marks, _ in SCRIPTS.values():
        for first, last in (letters, marks or letters):
            characters |= set(map(chr, range(first, last + 1)))
    vocabulary = ["<unk>", SPECIAL, *sorted(characters)]
    backend = Tokenizer(models.WordLevel({c: n for n, c in enumerate(vocabulary)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _finish(backend)


def _finish(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL, eos_token=SPECIAL, unk_token="<unk>"
    )


KINDS: dict[str, Any] = {
    "byte BPE": build_bpe,
    "byte fallback": build_fallback,
    "characters": build_characters,
}
