"""Turns documents into token ids and marks the supervised positions.

    "a b"                    input_ids    a b </s>
                             supervised   1 1 1
    user: a, assistant: b    input_ids    <user> a <end> <assistant> b <end>
                             supervised   0      0 0     0           1 1

`supervised` is at the label's own position (Hugging Face's unshifted labels).
"""

import hashlib
import hmac
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memguard.data.chat import ChatTemplate, UnusableDocument, render_turns
from memguard.data.documents import Document, Format, name_ids
from memguard.data.encoding import (
    Change,
    Encoded,
    Shortener,
    check_lengths,
    count_characters,
    count_more_bos,
    encode_pair,
    encode_rendered,
    end_with,
    find_bos,
    find_special_ids,
    find_unknown,
    without_dropout,
)
from memguard.data.table_files import END_OF_TEXT
from memguard.errors import DataError
from memguard.runtime.children import call_interruptibly

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_BATCH_DOCUMENTS = 1000
_BATCH_CHARACTERS = 2**21
"""Of a batch, for each core: a few seconds even for text without spaces, which takes longest."""
_LONG_CHARACTERS = 100_000
"""Texts together longer than this are encoded in a thread, so that Ctrl-C takes effect at once."""
Tick = Callable[[], None] | None
_NUM_REASONS_SHOWN = 3
_NOT_HASHED = ("id", "source", "has_own_id", "format")
"""Fields of a document that are not its content."""
_ITSELF = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _ITSELF]
_LEVEL = [chr(b if b in _ITSELF else 0x100 + _OTHERS.index(b)) for b in range(256)]
"""The character of each byte in the vocabulary of byte-level BPE."""
_UNSUPERVISED = "without a supervised token (there is no assistant text)"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedDocument:
    """One document of N tokens."""

    id: str
    source: str
    format: Format
    input_ids: NDArray[np.int32]
    """[N]"""
    supervised: NDArray[np.bool_]
    """[N], True where this token is predicted and trained; the first token cannot be."""
    num_content_tokens: int
    """N without trailing special tokens and markup of the chat template."""
    changes: tuple[Change, ...] = ()
    unknown_id: int | None = None
    """The token of text that the tokenizer does not know; None if there is none."""


def tokenize_documents(
    documents: Sequence[Document],
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    append_eos: bool,
    max_tokens: int | None,
    setting: str,
    vocab_size: int | None = None,
    day: date | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[TokenizedDocument]:
    """Yield one tokenised document for each document, in order.

    A document whose supervised tokens are all beyond ``max_tokens`` is yielded without any.

    Supervised is every token of a plain text and of given token ids; of a conversation, which the
    chat template renders, what the assistant says; of a prompt with a completion, the completion,
    with white space at the end of a plain prompt. Token ids are used unchanged. Other documents
    begin with one BOS, and the tokenizer drops no merges at random.

    ``tokenizer`` is a fast one; for conversations it needs a chat template; None if all documents
    are token ids. ``append_eos`` appends the EOS token to plain text and plain completions, if
    there is one and the tokenizer has not added it; conversations end as their template defines.
    ``max_tokens`` None keeps all. Token ids must be below ``vocab_size`` (rows of the model's
    embedding); None: not checked. ``day`` is what a chat template writes as today; None: today.
    ``progress`` is called with the number of documents done since the last call, and with 0 every
    second during a long call of the tokenizer.

    Raises:
        DataError: token ids beyond the vocabulary; no chat template; a document is too long to be
            encoded as a whole; or, with their count and after the last document, conversations
            that the template cannot render or documents without a supervised token.
    """
    tokenizer = without_dropout(tokenizer)
    check_lengths(documents, max_tokens=max_tokens, setting=setting)
    _check_template(documents, tokenizer, setting)
    shortener = None
    if tokenizer is not None and max_tokens is not None:
        shortener = Shortener(tokenizer, max_tokens)
    special = set() if tokenizer is None else find_special_ids(tokenizer)
    special_ids = np.array(sorted(special), dtype=np.int32)
    bos, unknown_id = find_bos(tokenizer), find_unknown(tokenizer)
    template = None
    if any(map(_is_rendered, documents)):
        template = ChatTemplate(tokenizer, day or date.today())
    eos = tokenizer.eos_token_id if append_eos and tokenizer is not None else None
    unusable: dict[str, list[str]] = {}
    tick = None if progress is None else lambda: progress(0)
    for batch in _cut_batches(documents):
        own = _encode_batch(batch, tokenizer, template, special, eos, unusable, shortener, tick)
        for document, encoded in zip(batch, own, strict=True):
            is_given = document.input_ids is not None
            first = 0 if is_given else count_more_bos(encoded.input_ids, bos)
            changes: tuple[Change, ...] = (*encoded.changes, "BOS") if first else encoded.changes
            cut = slice(first, None if max_tokens is None else first + max_tokens)
            ids = np.array(encoded.input_ids[cut], dtype=np.int32)
            if is_given and vocab_size is not None:
                highest = max(encoded.input_ids)
                if highest >= vocab_size:
                    raise DataError(
                        f"'{setting}': '{document.source}', row {name_ids([document.id])}, holds "
                        f"token id {highest}; the model's vocabulary has {vocab_size} (0 to "
                        f"{vocab_size - 1}). Use ids of the model's tokenizer."
                    )
            mask = np.array(encoded.supervised[cut], dtype=bool)
            content = np.flatnonzero(mask & ~np.isin(ids, special_ids))
            if _is_rendered(document) and tokenizer is not None:
                # The end may be only line breaks of the chat template.
                while len(content) and not tokenizer.decode([int(ids[content[-1]])]).strip():
                    content = content[:-1]
            if document.format != "text" and len(ids) and not any(encoded.supervised[first + 1 :]):
                unusable.setdefault(_UNSUPERVISED, []).append(document.id)
            yield TokenizedDocument(
                id=document.id,
                source=document.source,
                format=document.format,
                input_ids=ids,
                supervised=mask,
                num_content_tokens=int(content[-1]) + 1 if len(content) else 0,
                changes=changes,
                unknown_id=unknown_id,
            )
        if progress is not None:
            progress(len(batch))
    if unusable:
        reasons = "; ".join(
            f"{len(ids)} of {len(documents)} documents {reason}: {name_ids(ids)}"
            for reason, ids in list(unusable.items())[:_NUM_REASONS_SHOWN]
        )
        if (num_more := len(unusable) - _NUM_REASONS_SHOWN) > 0:
            reasons += f"; and others for {num_more:,} more reason{'s' * (num_more > 1)}"
        raise DataError(f"'{setting}' has {reasons}.")


def _cut_batches(documents: Sequence[Document]) -> Iterator[Sequence[Document]]:
    """Yield the documents in batches that take seconds, however long the documents are."""
    limit = _BATCH_CHARACTERS * len(os.sched_getaffinity(0))
    start, num_characters = 0, 0
    for index, document in enumerate(documents):
        length = count_characters(document)
        is_full = index - start == _BATCH_DOCUMENTS or num_characters + length > limit
        if is_full and index > start:
            yield documents[start:index]
            start, num_characters = index, 0
        num_characters += length
    if start < len(documents):
        yield documents[start:]


def _is_rendered(document: Document) -> bool:
    """Return whether the chat template makes the text of a document."""
    return document.format != "text" and not isinstance(document.completion, str)


def hash_tokens(input_ids: NDArray[np.int32]) -> str:
    """Return the SHA-256 of the ids as little-endian 32-bit integers, in hexadecimal."""
    return hashlib.sha256(np.asarray(input_ids, dtype="<i4").tobytes()).hexdigest()


def hmac_text(key: bytes, document: Document) -> str:
    """Return the HMAC-SHA256 of a document's content as it was read, without id and source.

    It is of the JSON of its text, messages, or prompt and completion. Without the identity key a
    hash cannot be tested against guessed texts.
    """
    content = {
        name: value.tolist() if isinstance(value, array) else value
        for name, value in asdict(document).items()
        if name not in _NOT_HASHED and value is not None
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return hmac.new(key, canonical, hashlib.sha256).hexdigest()


def _encode_batch(
    batch: Sequence[Document],
    tokenizer: Any,
    template: ChatTemplate | None,
    special: set[int],
    eos: int | None,
    unusable: dict[str, list[str]],
    shortener: Shortener | None,
    tick: Tick,
) -> Iterator[Encoded]:
    """Encode documents in order; those that the chat template cannot render get no tokens."""
    texts = [_list_texts(document, shortener) for document in batch]
    plain = iter(_encode_plain([text for own in texts for text in own], tokenizer, tick))

    def encode(document: Document, own: Sequence[str]) -> Encoded:
        ids: Sequence[int] | None = document.input_ids
        if document.text is not None:
            ids = end_with(eos, next(plain))
        if ids is not None:
            return Encoded(input_ids=ids, supervised=[True] * len(ids))
        if own:
            prompt, whole = own
            return encode_pair(next(plain), whole[len(prompt) :], next(plain), tokenizer, eos)
        assert template is not None, "the documents have one to be rendered"
        prompted = document.prompt or ()
        messages: Any = document.messages or (*prompted, *(document.completion or ()))
        rendered = render_turns(messages, template, len(prompted) or None)
        return encode_rendered(rendered, tokenizer, special)

    for document, own in zip(batch, texts, strict=True):
        try:
            yield _call(partial(encode, document, own), count_characters(document), tick)
        except UnusableDocument as failure:
            unusable.setdefault(str(failure), []).append(document.id)
            yield Encoded(input_ids=(), supervised=())


def _list_texts(document: Document, shortener: Shortener | None) -> list[str]:
    """Return what is encoded as plain text: a text, or a prompt, and it with its completion.

    White space at the end of a prompt belongs to the completion.
    """
    whole, prompt = document.text, ""
    if isinstance(document.prompt, str) and isinstance(document.completion, str):
        whole, prompt = document.prompt + document.completion, document.prompt.rstrip()
    if whole is not None and shortener is not None:
        whole = prompt + shortener.shorten(whole[len(prompt) :], prompt)
    if whole is None:
        return []
    return [whole] if document.text is not None else [prompt, whole]


def _encode_plain(texts: Sequence[str], tokenizer: Any, tick: Tick) -> list[list[int]]:
    if not texts:
        return []
    # verbose=False: a document may be longer than the model's context; it is cut into rows later.
    how = partial(tokenizer, list(texts), return_attention_mask=False, verbose=False)
    ids: list[list[int]] = _call(how, sum(map(len, texts)), tick)["input_ids"]
    return ids


def _call(how: Callable[[], Any], num_characters: int, tick: Tick) -> Any:
    return call_interruptibly(how, tick) if num_characters > _LONG_CHARACTERS else how()


def _check_template(documents: Sequence[Document], tokenizer: Any, setting: str) -> None:
    if not any(map(_is_rendered, documents)):
        return
    lack = "" if tokenizer.is_fast else "is a slow one: they need a fast one (tokenizer.json)"
    if not tokenizer.chat_template:
        lack = "has no chat template: take an instruction-tuned model's, or add chat_template.jinja"
    elif isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        lack = "has no chat template named 'default', only others: save it as chat_template.jinja"
    if lack:
        raise DataError(f"'{setting}' holds conversations, but the tokenizer {lack}.")


def list_token_texts(tokenizer: Any) -> list[str]:
    """Return the text of each token decoded alone ``[V]``; empty for special tokens.

    Bytes of a character that tokens share are lone surrogates, as of Python's ``surrogateescape``.
    """
    special_ids = find_special_ids(tokenizer)
    ids = range(len(tokenizer))
    decoded = tokenizer.batch_decode([[id] for id in ids], clean_up_tokenization_spaces=False)
    names = tokenizer.convert_ids_to_tokens(list(ids))
    return [
        "" if id in special_ids else text if "\ufffd" not in text else _read_bytes(name, text)
        for id, text, name in zip(ids, decoded, names, strict=True)
    ]


def _read_bytes(name: str, text: str) -> str:
    """Return the text of a token that is not whole characters, by its name in the vocabulary."""
    try:
        is_fallback = name.startswith("<0x")
        raw = bytes.fromhex(name[3:5]) if is_fallback else bytes(map(_LEVEL.index, name))
        return raw.decode("utf-8", "surrogateescape")
    except ValueError:
        return text.replace("\ufffd", "")


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Any:
    """Train a byte-level BPE on ``texts`` and return it as a transformers tokenizer.

    Every string can be encoded: the 256 bytes are in the vocabulary. BOS, EOS and padding are the
    same token, which the tokenizer never adds automatically and ``vocab_size`` includes.
    """
    # Imported here: reading a corpus does not need transformers.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The trainer of a large corpus runs for minutes.
    call_interruptibly(lambda: tokenizer.train_from_iterator(texts, trainer))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
