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
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memguard.data.documents import Decode, Document, Format, name_ids
from memguard.data.encoding import (
    Encoded,
    Shortener,
    TemplateFailure,
    check_lengths,
    encode_conversation,
    encode_reply,
    find_special_ids,
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


def tokenize_documents(
    documents: Sequence[Document],
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    append_eos: bool,
    max_tokens: int | None,
    setting: str,
    vocab_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[TokenizedDocument]:
    """Yield one tokenised document for each document, in order.

    A document whose supervised tokens are all beyond ``max_tokens`` is yielded without any.

    Plain text is encoded with ``tokenizer(text)``, and every token is supervised. Conversations are
    rendered with the chat template, and assistant turns are supervised. For a prompt with a
    completion, the completion is supervised. Token ids are used unchanged, without added BOS or
    EOS, and every one is supervised.

    ``tokenizer`` is a fast one; for conversations it needs a chat template; None if all documents
    are token ids. ``append_eos`` appends the EOS token to plain text and plain completions, if
    there is one and the tokenizer has not added it; conversations end as their template defines.
    ``max_tokens`` None keeps all. Token ids must be below ``vocab_size`` (rows of the model's
    embedding); None: not checked. ``progress`` is called with the number of documents done since
    the last call, and with 0 every second during a long call of the tokenizer.

    Raises:
        DataError: token ids beyond the vocabulary; no chat template; a document is too long to be
            encoded as a whole; or, with their count and after the last document, conversations
            that the template cannot render or documents without a supervised token.
    """
    check_lengths(documents, max_tokens=max_tokens, setting=setting)
    _check_template(documents, tokenizer, setting)
    shortener = None
    if tokenizer is not None and max_tokens is not None:
        shortener = Shortener(tokenizer, max_tokens)
    special = set() if tokenizer is None else find_special_ids(tokenizer)
    special_ids = np.array(sorted(special), dtype=np.int32)
    eos = tokenizer.eos_token_id if append_eos and tokenizer is not None else None
    unusable: dict[str, list[str]] = {}
    tick = None if progress is None else lambda: progress(0)
    for batch in _cut_batches(documents):
        encoded_batch = _encode_batch(batch, tokenizer, special, eos, unusable, shortener, tick)
        for document, encoded in zip(batch, encoded_batch, strict=True):
            ids = np.array(encoded.input_ids[:max_tokens], dtype=np.int32)
            if document.input_ids is not None and vocab_size is not None:
                highest = max(document.input_ids)
                if highest >= vocab_size:
                    raise DataError(
                        f"'{setting}': '{document.source}', row {name_ids([document.id])}, holds "
                        f"token id {highest}; the model's vocabulary has {vocab_size} (0 to "
                        f"{vocab_size - 1}). Use ids of the model's tokenizer."
                    )
            mask = np.array(encoded.supervised[:max_tokens], dtype=bool)
            content = np.flatnonzero(mask & ~np.isin(ids, special_ids))
            is_rendered = document.format != "text" and not isinstance(document.completion, str)
            if is_rendered and tokenizer is not None:
                # The end may be only line breaks of the chat template.
                while len(content) and not tokenizer.decode([int(ids[content[-1]])]).strip():
                    content = content[:-1]
            if document.format != "text" and len(ids) and not any(encoded.supervised[1:]):
                unusable.setdefault(_UNSUPERVISED, []).append(document.id)
            yield TokenizedDocument(
                id=document.id,
                source=document.source,
                format=document.format,
                input_ids=ids,
                supervised=mask,
                num_content_tokens=int(content[-1]) + 1 if len(content) else 0,
            )
        if progress is not None:
            progress(len(batch))
    if unusable:
        reasons = "; ".join(
            f"{len(ids)} of {len(documents)} documents {reason}: {name_ids(ids)}"
            for reason, ids in unusable.items()
        )
        raise DataError(f"'{setting}' has {reasons}.")


def _cut_batches(documents: Sequence[Document]) -> Iterator[Sequence[Document]]:
    """Yield the documents in batches that take seconds, however long the documents are."""
    limit = _BATCH_CHARACTERS * len(os.sched_getaffinity(0))
    start, num_characters = 0, 0
    for index, document in enumerate(documents):
        length = _count_characters(document)
        is_full = index - start == _BATCH_DOCUMENTS or num_characters + length > limit
        if is_full and index > start:
            yield documents[start:index]
            start, num_characters = index, 0
        num_characters += length
    if start < len(documents):
        yield documents[start:]


def _count_characters(document: Document) -> int:
    parts = (document.text, document.messages, document.prompt, document.completion)
    return sum(
        len(part) if isinstance(part, str) else sum(len(turn.content) for turn in part)
        for part in parts
        if part is not None
    )


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
    special: set[int],
    eos: int | None,
    unusable: dict[str, list[str]],
    shortener: Shortener | None,
    tick: Callable[[], None] | None,
) -> Iterator[Encoded]:
    """Encode documents in order; those that the chat template cannot render get no tokens."""

    def shorten(text: str, before: str = "") -> str:
        return text if shortener is None else shortener.shorten(text, before)

    plain = [shorten(document.text) for document in batch if document.text is not None]
    texts = iter(_encode_plain(plain, tokenizer, tick))
    pairs = _encode_pairs(
        [
            (d.prompt, shorten(d.completion, d.prompt))
            for d in batch
            if isinstance(d.prompt, str) and isinstance(d.completion, str)
        ],
        tokenizer,
        eos,
        tick,
    )
    for document in batch:
        if document.input_ids is not None:
            ids = document.input_ids
            yield Encoded(input_ids=ids, supervised=[True] * len(ids))
        elif document.text is not None:
            ended = _end_with(eos, next(texts))
            yield Encoded(input_ids=ended, supervised=[True] * len(ended))
        elif isinstance(document.prompt, str):
            yield next(pairs)
        else:
            encode = partial(_encode_turns, document, tokenizer, special)
            try:
                if _count_characters(document) > _LONG_CHARACTERS:
                    yield call_interruptibly(encode, tick)
                else:
                    yield encode()
            except TemplateFailure as failure:
                unusable.setdefault(str(failure), []).append(document.id)
                yield Encoded(input_ids=(), supervised=())


def _encode_turns(document: Document, tokenizer: Any, special: set[int]) -> Encoded:
    if document.messages is not None:
        return encode_conversation(document.messages, tokenizer, special)
    assert isinstance(document.prompt, tuple), "the remaining format"
    assert isinstance(document.completion, tuple), "of the prompt's kind"
    return encode_reply(document.prompt, document.completion, tokenizer, special)


def _encode_pairs(
    pairs: Sequence[tuple[str, str]],
    tokenizer: Any,
    eos: int | None,
    tick: Callable[[], None] | None,
) -> Iterator[Encoded]:
    prompts = _encode_plain([prompt for prompt, _ in pairs], tokenizer, tick)
    wholes = _encode_plain([prompt + completion for prompt, completion in pairs], tokenizer, tick)
    for (_, completion), prompt_ids, ids in zip(pairs, prompts, wholes, strict=True):
        if len(prompt_ids) > 1 and prompt_ids[-1] == tokenizer.eos_token_id:
            # Added by the tokenizer, which treats the prompt as a complete text.
            prompt_ids = prompt_ids[:-1]
        if ids[: len(prompt_ids)] != prompt_ids:
            # A token would span prompt and completion. At inference the prompt is encoded alone,
            # so the completion must be trained after those ids.
            (rest,) = _encode_plain([completion], tokenizer, tick, add_special_tokens=False)
            ids = prompt_ids + rest
        ids = _end_with(eos, ids)
        mask = [False] * len(prompt_ids) + [True] * (len(ids) - len(prompt_ids))
        yield Encoded(input_ids=ids, supervised=mask)


def _encode_plain(
    texts: Sequence[str], tokenizer: Any, tick: Callable[[], None] | None, **options: bool
) -> list[list[int]]:
    if not texts:
        return []

    def encode() -> list[list[int]]:
        # verbose=False: a document may be longer than the model's context; it is cut into rows
        # later.
        encoded = tokenizer(list(texts), return_attention_mask=False, verbose=False, **options)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    is_long = sum(map(len, texts)) > _LONG_CHARACTERS
    return call_interruptibly(encode, tick) if is_long else encode()


def _end_with(eos: int | None, ids: list[int]) -> list[int]:
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _check_template(documents: Sequence[Document], tokenizer: Any, setting: str) -> None:
    if all(d.format == "text" or isinstance(d.prompt, str) for d in documents):
        return
    try:
        tokenizer.get_chat_template()
        lack = "" if tokenizer.is_fast else "is a slow one: they need a fast one (tokenizer.json)"
    except ValueError:
        lack = "has no chat template: take an instruction-tuned model's, or add chat_template.jinja"
    if lack:
        raise DataError(f"'{setting}' holds conversations, but the tokenizer {lack}.")


def build_decoder(tokenizer: Any) -> Decode:
    """Return a function that decodes token ids to text, without special tokens."""

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    return decode


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
