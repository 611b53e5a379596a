"""Finds mistakes in the tokens of documents that make training or an audit silently wrong.

    BOS         twice at the start of documents, or missing there
    EOS         missing at their end, or not supervised: the model does not learn to stop
    labels      pieces of documents in which no token receives loss
    vocabulary  tokens without an embedding, text without a token, special tokens in a user's turn

Every count is over all documents. Turns that a chat template leaves out are refused earlier, when
the conversation is rendered (chat.py).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memguard.config import DataConfig
from memguard.data.corpus import FORMATS, Corpus
from memguard.data.encoding import find_dropout, find_special_ids, find_unknown
from memguard.data.packing import split_points
from memguard.data.tokenization import TokenizedDocument
from memguard.errors import ModelError
from memguard.records.tables import MOSTLY_UNKNOWN
from memguard.records.texts import format_percent

_UNKNOWN_SHARE = 0.01


@dataclass(frozen=True, slots=True)
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
    changes: Mapping[str, int]
    """Documents without all of their tokens (`encoding.Change`)."""

    @classmethod
    def of_corpus(cls, corpus: Corpus) -> "Tokens":
        """Return the tokens of a run's own documents, without canaries."""
        given = corpus.without_canaries()
        return cls(
            input_ids=given.input_ids,
            supervised=given.supervised,
            offsets=given.offsets,
            is_text=np.asarray(given.format == FORMATS.index("text")),
            changes=corpus.summary.changes,
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
            changes=Counter(change for document in documents for change in document.changes),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``[N]`` tokens of each document."""
        return np.diff(self.offsets)

    def say(self, count: int) -> str:
        """Write how many of the documents, as the start of a sentence."""
        of = len(self.is_text)
        return f"All {count:,} documents" if count == of > 1 else f"{count:,} of {of:,} documents"


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
    """Return mistakes in the documents of an audit, of any model."""
    stop_ids = _list_stop_ids(tokenizer, model_config)
    return [
        *_find_changes(tokens, tokenizer),
        *_find_bos(tokens, tokenizer, stop_ids),
        *_find_unknown(tokens, tokenizer),
        *_find_vocabulary(tokenizer, model_config),
    ]


def find_training_faults(
    tokens: Tokens, tokenizer: Any, model_config: Any, data: DataConfig
) -> list[TokenFault]:
    """Return mistakes in the documents of a run, for its training and its audit.

    `max_document_tokens` and `seq_len` of ``data`` cut documents.
    """
    stop_ids = _list_stop_ids(tokenizer, model_config)
    # Documents as long as they may be are most likely cut off, and have no end to miss.
    may_end = tokens.lengths != (data.max_document_tokens or -1)
    return [
        *find_audit_faults(tokens, tokenizer, model_config),
        *_find_open_texts(tokens, tokenizer, stop_ids, may_end),
        *_find_open_replies(tokens, tokenizer, stop_ids, may_end),
        *_find_unlabelled(tokens, data.seq_len),
    ]


def _list_stop_ids(tokenizer: Any, model_config: Any) -> list[int]:
    """Return EOS, and other ids that end a text according to the model's configuration."""
    ids = getattr(model_config.get_text_config(), "eos_token_id", None)
    ids = [ids] if isinstance(ids, int) else list(ids or ())
    return [id_ for id_ in (*ids, tokenizer.eos_token_id) if id_ is not None]


def _find_changes(tokens: Tokens, tokenizer: Any) -> Iterator[TokenFault]:
    if num_two := tokens.changes.get("BOS", 0):
        yield TokenFault(
            "BOS",
            f"{tokens.say(num_two)} would begin with two {_name(tokenizer, tokenizer.bos_token_id)}"
            ", and one is left out: take it out of the texts, or out of the chat template.",
        )
    if num := tokens.changes.get("marks", 0):
        yield TokenFault(
            "vocabulary",
            f"{tokens.say(num)} have words in turns of others than the assistant that are special "
            "tokens: the model may read them as the end of a turn; take them out of the texts.",
        )
    if num := tokens.changes.get("reasoning", 0):
        yield TokenFault(
            "labels",
            f"{tokens.say(num)} have answers before the last one whose reasoning the chat template "
            "leaves out: it is neither trained nor audited.",
        )


def _find_unknown(tokens: Tokens, tokenizer: Any) -> Iterator[TokenFault]:
    if dropout := find_dropout(tokenizer):
        yield TokenFault(
            "vocabulary",
            f"The tokenizer drops merges at random (dropout {dropout:g}): switched off, so that "
            "equal texts have equal tokens.",
        )
    if (unknown := find_unknown(tokenizer)) is None:
        return
    is_unknown = (tokens.input_ids == unknown).astype(np.int64)
    shares = np.add.reduceat(is_unknown, tokens.offsets[:-1]) / tokens.lengths
    num_mostly = int((shares > MOSTLY_UNKNOWN).sum())
    share = float(is_unknown.mean())
    if share >= _UNKNOWN_SHARE or num_mostly:
        mostly = f"{tokens.say(num_mostly)} are mostly that and not audited. " if num_mostly else ""
        yield TokenFault(
            "vocabulary",
            f"{format_percent(share)} of the tokens are {_name(tokenizer, unknown)}: their text is "
            f"lost. {mostly}Take a tokenizer that has these letters.",
        )


def _find_bos(tokens: Tokens, tokenizer: Any, stop_ids: Sequence[int]) -> Iterator[TokenFault]:
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    starts = tokens.offsets[:-1]
    has_one = tokens.input_ids[starts] == bos
    seconds = np.append(tokens.input_ids, -1)[starts + 1]
    has_two = has_one & (tokens.lengths > 1) & (seconds == bos)
    num_two, num_without, name = int(has_two.sum()), int((~has_one).sum()), _name(tokenizer, bos)
    begin = f"{tokens.say(num_without)} begin without {name}"
    if num_two:
        text = (
            f"{tokens.say(num_two)} begin with two {name}: take one out of the texts or token ids."
        )
        yield TokenFault("BOS", text)
    elif num_without and tokenizer("a")["input_ids"][:1] == [bos]:
        yield TokenFault(
            "BOS",
            f"{begin}, which the tokenizer puts before plain text: write {{{{ bos_token }}}} at "
            "the start of the chat template, and its id at the start of given token ids.",
        )
    elif num_without and bos not in stop_ids:  # One token for both is right for GPT-2.
        yield TokenFault(
            "BOS",
            f"{begin}, which the tokenizer has but does not add: right only if the model was "
            "trained so, else set add_bos_token to true in its tokenizer_config.json.",
        )


def _find_open_texts(
    tokens: Tokens, tokenizer: Any, stop_ids: Sequence[int], may_end: NDArray[np.bool_]
) -> Iterator[TokenFault]:
    """Yield a fault if plain texts have no end; all their tokens are supervised."""
    eos = tokenizer.eos_token_id
    last = tokens.input_ids[tokens.offsets[1:] - 1]
    num_open = int((tokens.is_text & ~np.isin(last, stop_ids) & may_end).sum())
    if eos is None and tokens.is_text.any():
        yield TokenFault(
            "EOS",
            "The tokenizer has no EOS: documents end without it, and the model never learns to "
            "stop; set eos_token in its tokenizer_config.json.",
        )
    elif num_open:
        yield TokenFault(
            "EOS",
            f"{tokens.say(num_open)} end without {_name(tokenizer, eos)}: the model does not "
            "learn to stop there; set 'data.append_eos' to true, or end given token ids with it.",
        )


def _find_open_replies(
    tokens: Tokens, tokenizer: Any, stop_ids: Sequence[int], may_end: NDArray[np.bool_]
) -> Iterator[TokenFault]:
    """Yield faults in how completions and the assistant's last turns end."""
    ends = {*stop_ids, *find_special_ids(tokenizer)}
    num_open = 0
    unsupervised: Counter[int] = Counter()
    others: Counter[int] = Counter()
    for index in np.flatnonzero(~tokens.is_text):
        ids = tokens.input_ids[tokens.offsets[index] : tokens.offsets[index + 1]]
        supervised = tokens.supervised[tokens.offsets[index] : tokens.offsets[index + 1]]
        last = int(np.flatnonzero(supervised)[-1])
        after = [int(token) for token in ids[last + 1 : last + 2]]
        if int(ids[last]) in stop_ids:
            continue
        if int(ids[last]) in ends:
            others[int(ids[last])] += 1
        elif ends.intersection(after):
            unsupervised.update(after)
        else:
            num_open += bool(may_end[index])
    if unsupervised:
        yield TokenFault(
            "EOS",
            f"{tokens.say(unsupervised.total())} end the assistant's turn with a token "
            f"({_name(tokenizer, *unsupervised)}) that is not supervised: the model never learns "
            "to stop. Move it before {% endgeneration %} in the chat template.",
        )
    if others:
        yield TokenFault(
            "EOS",
            f"{tokens.say(others.total())} end with {_name(tokenizer, *others)}, which is not the "
            "tokenizer's EOS: generation stops there only if eos_token_id of the model's "
            "generation_config.json lists it.",
        )
    if num_open:
        yield TokenFault(
            "EOS",
            f"{tokens.say(num_open)} end without a token that says so: the model does not learn to "
            "stop there. Set 'data.append_eos' to true, or write {{ eos_token }} after the "
            "assistant's turns in the chat template.",
        )


def _find_unlabelled(tokens: Tokens, seq_len: int) -> Iterator[TokenFault]:
    """Yield a fault if documents are cut so that pieces of them train nothing."""
    num_documents = num_pieces = 0
    # Of plain texts every token is supervised, and a whole reply has a label.
    for index in np.flatnonzero(~tokens.is_text & (tokens.lengths > seq_len)):
        start, points = tokens.offsets[index], split_points(int(tokens.lengths[index]), seq_len)
        # The first token of a piece has nothing before it that could predict it.
        num_without = sum(
            not tokens.supervised[start + begin + 1 : start + end].any()
            for begin, end in pairwise((0, *points))
        )
        num_pieces += num_without
        num_documents += num_without > 0
    if num_pieces:
        yield TokenFault(
            "labels",
            f"{tokens.say(num_documents)} have pieces in which no token receives loss "
            f"({num_pieces:,} in all): prompts longer than a row, cut from what they prompt; raise "
            "'data.seq_len'.",
        )


def _find_vocabulary(tokenizer: Any, model_config: Any) -> Iterator[TokenFault]:
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and len(tokenizer) > vocab_size:
        yield TokenFault(
            "vocabulary",
            f"The tokenizer has {len(tokenizer):,} tokens, the model embeddings for "
            f"{vocab_size:,}: a text with one of the others is refused; take the tokenizer that "
            "belongs to the model.",
        )


def _name(tokenizer: Any, *token_ids: int) -> str:
    """Write the first tokens of a list."""
    return ", ".join(f"'{tokenizer.convert_ids_to_tokens(token)}'" for token in token_ids[:3])
