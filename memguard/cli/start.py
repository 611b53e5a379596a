"""What a run starts from: a checkpoint, or random weights and a tokenizer of its own."""

from collections.abc import Sequence
from typing import Any

from memguard.config import RunConfig
from memguard.data.bpe import train_bpe
from memguard.data.documents import Document, document_text
from memguard.errors import ModelError
from memguard.parallel.weights import (
    build_scratch_model,
    load_model,
    load_tokenizer,
    max_positions,
)
from memguard.runtime import Console
from memguard.seeds import derive_seed


def load_known_tokenizer(config: RunConfig) -> Any:
    """Return the tokenizer of the checkpoint or of `model.scratch`; None where it is to be trained.

    Called before the documents are read: what is wrong with the checkpoint is told in seconds.

    Raises:
        ModelError: no usable checkpoint or tokenizer, or rows longer than it has positions for.
    """
    model, scratch = config.model, config.model.scratch
    if scratch is None:
        limit = max_positions(_path(config), revision=model.revision)
        tokenizer = load_tokenizer(_path(config), revision=model.revision)
    else:
        limit = scratch.config.get("max_position_embeddings")
        tokenizer = None if scratch.tokenizer is None else load_tokenizer(scratch.tokenizer)
    if isinstance(limit, int) and config.data.seq_len > limit:
        raise ModelError(
            f"'data.seq_len' must be at most {limit}, the model's max_position_embeddings; "
            f"got {config.data.seq_len}"
        )
    return tokenizer


def train_tokenizer(config: RunConfig, documents: Sequence[Document], console: Console) -> Any:
    """Train the byte-level BPE of a model that starts from nothing, on the documents."""
    scratch = config.model.scratch
    assert scratch is not None, "a checkpoint has its tokenizer"
    console.info(f"tokenizer: training a BPE of {scratch.vocab_size:,} entries")
    texts = (document_text(document) for document in documents)
    return train_bpe(texts, vocab_size=scratch.vocab_size)


def load_or_draw_model(config: RunConfig, tokenizer: Any) -> Any:
    """Return the checkpoint's model, or one with random weights of the run's seed."""
    model, scratch = config.model, config.model.scratch
    if scratch is None:
        return load_model(
            _path(config),
            revision=model.revision,
            attn_implementation=model.attn_implementation,
        )
    return build_scratch_model(
        scratch.config,
        vocab_size=len(tokenizer),
        tokenizer=tokenizer,
        seed=derive_seed(config.seed, "initial weights"),
        attn=model.attn_implementation,
    )


def _path(config: RunConfig) -> str:
    assert config.model.path is not None, "one of 'path' and 'scratch' is set"
    return config.model.path
