"""A byte-level BPE tokenizer trained on the documents."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Any:
    """Train a byte-level BPE on ``texts`` and return it as a transformers tokenizer.

    Every string can be encoded (all 256 bytes are in the vocabulary). BOS, EOS and padding are the
    same token, which the tokenizer never adds by itself.

    Args:
        texts: what to learn the merges from.
        vocab_size: entries of the vocabulary (tokens), the 256 bytes and the special one included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
