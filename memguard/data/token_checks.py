"""Finds mistakes in the tokens of documents that make training or an audit silently wrong.

    BOS         twice at the start of documents, or missing there
    EOS         missing at their end, or not supervised: the model does not learn to stop
    labels      pieces of documents in which no token receives loss
    vocabulary  tokens without an embedding

Every count is over all documents. Turns that a chat template leaves out are refused earlier, when
the conversation is encoded (chat.py).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memguard.config import DataConfig
from memguard.data.chat import find_special_ids
from memguard.data.corpus import FORMATS, Corpus
from memguard.data.packing import split_points
from memguard.data.tokenization import TokenizedDocument
from memguard.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFault:
    """One mistake in the tokens of documents."""

    kind: Literal["BOS", "EOS", "labels", "vocabulary"]
    text: str
    """One sentence with the way out; no text of a document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The tokens of N documents, end to end."""

    input_ids: NDArray[np.int32]
    """``[T]``"""
    supervised: NDArray[np.bool_]
    """``[T]``"""
    offsets: NDArray[np.int64]
    """``[N + 1]`` where each document begins, and the end of the last."""
    is_text: NDArray[np.bool_]
    """``[N]`` which documents are plain text or given token ids."""

    @classmethod
    def of_corpus(cls, corpus: Corpus) -> "Tokens":
        """Return the tokens of a run's own documents, without canaries."""
        given = corpus.without_canaries()
        return cls(
            input_ids=given.input_ids,
            supervised=given.supervised,
            offsets=given.offsets,
            is_text=np.asarray(given.format == FORMATS.index("text")),
        )

    @classmethod
    def of_documents(cls, documents: Sequence[TokenizedDocument]) -> "Tokens":
        """Return the tokens of documents in memory; at least one must have some."""
        documents = [document for document in documents if len(document.input_ids)]
        sizes = [len(document.input_ids) for document in documents]
        return cls(
            input_ids=np.concatenate([document.input_ids for document in documents]),
            supervised=np.concatenate([document.supervised for document in documents]),
            offsets=np.cumsum([0, *sizes]),
            is_text=np.array([document.format == "text" for document in documents]),
        )

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.is_text)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``[N]`` tokens of each document."""
        return np.diff(self.offsets)

    def write_all(self, count: int) -> str:
        """Write how many of the documents, as the start of a sentence."""
        if count == self.num_documents > 1:
            return f"All {count:,} documents"
        return f"{count:,} of {self.num_documents:,} documents"

    def write_none(self, count: int, verb: str) -> str:
        """Write that so many documents do not do it."""
        if count == self.num_documents:
            return f"No document {verb}s"
        return f"{count:,} of {self.num_documents:,} documents do not {verb}"


def check_vocabulary(input_ids: NDArray[np.int32], vocab_size: int) -> None:
    """Reject token ids without a row in the model's embedding.

    Raises:
        ModelError: an id is not below ``vocab_size`` (rows of the embedding).
    """
    highest = int(input_ids.max())
    if highest >= vocab_size:
        raise ModelError(
            f"the tokenizer produces ids up to {highest}, but the model has {vocab_size} "
            "embeddings; use the model's own tokenizer"
        )


def find_audit_faults(tokens: Tokens, tokenizer: Any, model_config: Any) -> list[TokenFault]:
    """Return mistakes in the documents of an audit, whoever trained the model.

    Args:
        tokens: of the documents.
        tokenizer: what made the tokens.
        model_config: the model's transformers configuration.
    """
    stop_ids = _list_stop_ids(tokenizer, model_config)
    return [
        *_find_bos(tokens, tokenizer, stop_ids),
        *_find_vocabulary(tokenizer, model_config),
    ]


def find_training_faults(
    tokens: Tokens, tokenizer: Any, model_config: Any, data: DataConfig
) -> list[TokenFault]:
    """Return mistakes in the documents of a run, which its training and its audit both have.

    Args:
        tokens: of the documents.
        tokenizer: what made the tokens.
        model_config: the model's transformers configuration.
        data: `max_document_tokens` and `seq_len` cut documents.
    """
    stop_ids = _list_stop_ids(tokenizer, model_config)
    return [
        *_find_bos(tokens, tokenizer, stop_ids),
        *_find_open_texts(tokens, tokenizer, stop_ids, data),
        *_find_open_replies(tokens, tokenizer, stop_ids, data),
        *_find_unlabelled(tokens, data),
        *_find_vocabulary(tokenizer, model_config),
    ]


def _list_stop_ids(tokenizer: Any, model_config: Any) -> frozenset[int]:
    """Return EOS, and other ids that end a text according to the model's configuration."""
    eos_ids = getattr(model_config.get_text_config(), "eos_token_id", None)
    ids = [eos_ids] if isinstance(eos_ids, int) else list(eos_ids or ())
    return frozenset(id_ for id_ in (*ids, tokenizer.eos_token_id) if id_ is not None)


def _find_bos(tokens: Tokens, tokenizer: Any, stop_ids: frozenset[int]) -> Iterator[TokenFault]:
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    starts = tokens.offsets[:-1]
    has_one = tokens.input_ids[starts] == bos
    has_two = has_one & (tokens.lengths > 1)
    has_two[has_two] = tokens.input_ids[starts[has_two] + 1] == bos
    num_two, num_without = int(has_two.sum()), int((~has_one).sum())
    name = _name(tokenizer, bos)
    if num_two:
        where = (
            "the documents begin with one that the tokenizer adds again: take it out of the texts"
            if tokens.is_text[has_two].any()
            else "take one of them out of the chat template, or out of the messages"
        )
        text = f"{tokens.write_all(num_two)} begin with two {name}: {where}."
        yield TokenFault(kind="BOS", text=text)
    elif num_without and tokenizer("a")["input_ids"][:1] == [bos]:
        text = (
            f"{tokens.write_none(num_without, 'begin')} with {name}, which the tokenizer puts "
            "before plain text: write {{ bos_token }} at the start of the chat template, and its "
            "id at the start of given token ids."
        )
        yield TokenFault(kind="BOS", text=text)
    elif num_without and bos not in stop_ids:  # One token for both is right for GPT-2.
        text = (
            f"{tokens.write_none(num_without, 'begin')} with {name}, which the tokenizer has but "
            "does not add: right only if the model was trained so, else set add_bos_token to true "
            "in its tokenizer_config.json."
        )
        yield TokenFault(kind="BOS", text=text)


def _find_open_texts(
    tokens: Tokens, tokenizer: Any, stop_ids: frozenset[int], data: DataConfig
) -> Iterator[TokenFault]:
    """Yield a fault if plain texts have no end; all their tokens are supervised."""
    if not tokens.is_text.any():
        return
    if tokenizer.eos_token_id is None:
        text = (
            "The tokenizer has no EOS: documents end without it, and the model never learns to "
            "stop; set eos_token in its tokenizer_config.json."
        )
        yield TokenFault(kind="EOS", text=text)
        return
    last = tokens.input_ids[tokens.offsets[1:] - 1]
    is_open = tokens.is_text & ~np.isin(last, list(stop_ids)) & ~_is_cut(tokens, data)
    if num_open := int(is_open.sum()):
        text = (
            f"{tokens.write_none(num_open, 'end')} with {_name(tokenizer, tokenizer.eos_token_id)}"
            ", so that the model does not learn to stop there; set 'data.append_eos' to true, or "
            "end given token ids with it."
        )
        yield TokenFault(kind="EOS", text=text)


def _find_open_replies(
    tokens: Tokens, tokenizer: Any, stop_ids: frozenset[int], data: DataConfig
) -> Iterator[TokenFault]:
    """Yield faults in how completions and the assistant's last turns end."""
    special = find_special_ids(tokenizer)
    num_open = 0
    unsupervised: Counter[int] = Counter()
    others: Counter[int] = Counter()
    is_cut = _is_cut(tokens, data)
    for index in np.flatnonzero(~tokens.is_text):
        piece = slice(tokens.offsets[index], tokens.offsets[index + 1])
        ids = tokens.input_ids[piece]
        last = int(np.flatnonzero(tokens.supervised[piece])[-1])
        after = int(ids[last + 1]) if last + 1 < len(ids) else None
        if int(ids[last]) in stop_ids:
            continue
        if int(ids[last]) in special:
            others[int(ids[last])] += 1
        elif after is not None and (after in stop_ids or after in special):
            unsupervised[after] += 1
        elif not is_cut[index]:
            num_open += 1
    if unsupervised:
        text = (
            f"{tokens.write_all(unsupervised.total())} end the assistant's turn with a token "
            f"({_name_first(tokenizer, unsupervised)}) that is not supervised: the model never "
            "learns to stop. Move it before {% endgeneration %} in the chat template."
        )
        yield TokenFault(kind="EOS", text=text)
    if others:
        eos = tokenizer.eos_token_id
        text = (
            f"{tokens.write_all(others.total())} end with {_name_first(tokenizer, others)}, which "
            f"is not the tokenizer's EOS ({'none' if eos is None else _name(tokenizer, eos)}): "
            "generation stops there only if eos_token_id of the model's generation_config.json "
            "lists it."
        )
        yield TokenFault(kind="EOS", text=text)
    if num_open:
        text = (
            f"{tokens.write_all(num_open)} end without a token that says so: the model does not "
            "learn to stop there. Set 'data.append_eos' to true, or write {{ eos_token }} after "
            "the assistant's turns in the chat template."
        )
        yield TokenFault(kind="EOS", text=text)


def _find_unlabelled(tokens: Tokens, data: DataConfig) -> Iterator[TokenFault]:
    """Yield a fault if documents are cut so that pieces of them train nothing."""
    num_documents = num_pieces = 0
    # Of plain texts every token is supervised, and a whole reply has a label.
    for index in np.flatnonzero(~tokens.is_text & (tokens.lengths > data.seq_len)):
        start = tokens.offsets[index]
        points = [0, *split_points(int(tokens.lengths[index]), data.seq_len)]
        # The first token of a piece has nothing before it that could predict it.
        num_without = sum(
            not tokens.supervised[start + begin + 1 : start + end].any()
            for begin, end in pairwise(points)
        )
        num_pieces += num_without
        num_documents += num_without > 0
    if num_pieces:
        text = (
            f"{tokens.write_all(num_documents)} have pieces in which no token receives loss "
            f"({num_pieces:,} in all): prompts longer than a row, cut from what they prompt; raise "
            "'data.seq_len'."
        )
        yield TokenFault(kind="labels", text=text)


def _find_vocabulary(tokenizer: Any, model_config: Any) -> Iterator[TokenFault]:
    size = len(tokenizer)
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and size > vocab_size:
        text = (
            f"The tokenizer has {size:,} tokens, the model embeddings for {vocab_size:,}: a text "
            "with one of the others is refused; take the tokenizer that belongs to the model."
        )
        yield TokenFault(kind="vocabulary", text=text)


def _is_cut(tokens: Tokens, data: DataConfig) -> NDArray[np.bool_]:
    """Return ``[N]`` which documents are as long as they may be, so most likely cut off."""
    return np.asarray(tokens.lengths == (data.max_document_tokens or -1))


def _name(tokenizer: Any, token_id: int) -> str:
    """Write a token of the vocabulary."""
    return f"'{tokenizer.convert_ids_to_tokens(token_id)}'"


def _name_first(tokenizer: Any, counts: Counter[int]) -> str:
    return ", ".join(_name(tokenizer, token_id) for token_id, _ in counts.most_common(3))
