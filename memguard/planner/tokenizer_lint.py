"""Checks tokenizer, chat template and documents against each other, on the tokens.

BOS         at the start of documents, once
EOS         at their end, and supervised: else the model never learns to stop
padding     what fills rows, and whether it occurs in documents
template    whether it marks what the assistant writes
unknown     tokens whose text is lost
vocabulary  tokenizer against embeddings
lengths     documents cut off or cut into pieces

Every count is over all prepared documents.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.config import DataConfig
from memguard.data.chat import find_special_ids, marks_generation
from memguard.data.corpus import FORMATS, Corpus
from memguard.planner.dry_run import Remark, note, warn
from memguard.records.percent import format_percent

_MANY_UNKNOWN = 0.001
_MANY_CUT = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """The documents of a run and their tokenizer."""

    corpus: Corpus
    tokenizer: Any
    data: DataConfig
    stop_ids: frozenset[int]
    """EOS, and other ids that end a text according to the model's configuration."""

    @property
    def num_documents(self) -> int:
        return self.corpus.num_documents

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.corpus.offsets)

    @property
    def is_text(self) -> NDArray[np.bool_]:
        """Which documents are plain text."""
        return np.asarray(self.corpus.format == FORMATS.index("text"))

    @property
    def is_full(self) -> NDArray[np.bool_]:
        """Which documents are as long as they may be, so most likely cut off."""
        return np.asarray(self.lengths == (self.data.max_document_tokens or -1))

    def name(self, token_id: int) -> str:
        """Write a token of the vocabulary."""
        return f"'{self.tokenizer.convert_ids_to_tokens(token_id)}'"

    def of_all(self, count: int) -> str:
        """Write how many documents."""
        if count == self.num_documents > 1:
            return f"all {count:,} documents"
        return f"{count:,} of {self.num_documents:,} documents"

    def none_of(self, count: int, verb: str) -> str:
        """Write that so many documents do not do it."""
        if count == self.num_documents:
            return f"No document {verb}s"
        return f"{count:,} of {self.num_documents:,} documents do not {verb}"


def lint_tokenizer(
    corpus: Corpus,
    tokenizer: Any,
    *,
    data: DataConfig,
    vocab_size: int,
    stop_ids: Collection[int] = (),
) -> list[Remark]:
    """Return remarks on the tokens of a run's documents.

    Args:
        corpus: all prepared documents.
        tokenizer: what made their tokens.
        data: `append_eos`, `max_document_tokens`, `seq_len`.
        vocab_size: rows of the model's embedding.
        stop_ids: ids that end a text by the model's configuration; EOS is added.
    """
    eos = tokenizer.eos_token_id
    prepared = _Prepared(
        corpus=corpus,
        tokenizer=tokenizer,
        data=data,
        stop_ids=frozenset(stop_ids) | (frozenset() if eos is None else {eos}),
    )
    return [
        *_lint_bos(prepared),
        *_lint_ends_of_texts(prepared),
        *_lint_ends_of_replies(prepared),
        *_lint_padding(prepared),
        *_lint_template(prepared),
        *_lint_unknown(prepared),
        *_lint_vocabulary(prepared, vocab_size),
        *_lint_lengths(prepared),
    ]


def _lint_bos(prepared: _Prepared) -> Iterator[Remark]:
    tokenizer, corpus = prepared.tokenizer, prepared.corpus
    bos = tokenizer.bos_token_id
    if bos is None:
        yield note("BOS", "The tokenizer has none; documents begin with their own first token.")
        return
    starts = corpus.offsets[:-1]
    has_one = corpus.input_ids[starts] == bos
    has_two = has_one & (prepared.lengths > 1)
    has_two[has_two] = corpus.input_ids[starts[has_two] + 1] == bos
    num_one, num_two = int(has_one.sum()), int(has_two.sum())
    name = prepared.name(bos)
    if num_two:
        where = (
            "the documents begin with one that the tokenizer adds again: take it out of the texts"
            if prepared.is_text[has_two].any()
            else "take one of them out of the chat template, or out of the messages"
        )
        yield warn("BOS", f"{_upper(prepared.of_all(num_two))} begin with two {name}: {where}.")
        return
    num_without = prepared.num_documents - num_one
    if not num_without:
        yield note("BOS", f"{_upper(prepared.of_all(num_one))} begin with {name}, once.")
    elif tokenizer("a")["input_ids"][:1] == [bos]:
        yield warn(
            "BOS",
            f"{prepared.none_of(num_without, 'begin')} with {name}, which the tokenizer "
            "puts before plain text: the chat template leaves it out; write {{ bos_token }} at "
            "its start.",
        )
    elif bos in prepared.stop_ids:
        yield note(
            "BOS",
            f"{name} is EOS as well, and the tokenizer does not put it before documents: right "
            "for the family of GPT-2.",
        )
    else:
        yield warn(
            "BOS",
            f"{prepared.none_of(num_without, 'begin')} with {name}, which the tokenizer "
            "has but does not add: right only if the model was trained so, else set "
            "add_bos_token to true in its tokenizer_config.json.",
        )


def _lint_ends_of_texts(prepared: _Prepared) -> Iterator[Remark]:
    """Say how plain texts end; all their tokens are supervised."""
    tokenizer, corpus, is_text = prepared.tokenizer, prepared.corpus, prepared.is_text
    if not is_text.any():
        return
    if tokenizer.eos_token_id is None:
        yield warn(
            "EOS",
            "The tokenizer has none: documents end without it, and the model never learns to "
            "stop; set eos_token in its tokenizer_config.json.",
        )
        return
    last = corpus.input_ids[corpus.offsets[1:] - 1]
    ends = is_text & np.isin(last, list(prepared.stop_ids))
    is_cut = is_text & ~ends & prepared.is_full
    num_ends, num_cut = int(ends.sum()), int(is_cut.sum())
    num_open = int(is_text.sum()) - num_ends - num_cut
    name = prepared.name(tokenizer.eos_token_id)
    if num_open:
        yield warn(
            "EOS",
            f"{prepared.none_of(num_open, 'end')} with {name}, so that the model does "
            "not learn to stop there; set 'data.append_eos' to true, or end given token ids "
            "with it.",
        )
    if num_ends:
        yield note(
            "EOS", f"{_upper(prepared.of_all(num_ends))} end with {name}, and it is supervised."
        )
    elif num_cut and not num_open:
        yield note(
            "EOS",
            f"{_upper(prepared.of_all(num_cut))} are cut off before {name}: the model does not "
            "learn where a text ends.",
        )


def _lint_ends_of_replies(prepared: _Prepared) -> Iterator[Remark]:
    """Say how completions and the assistant's last turns end."""
    corpus = prepared.corpus
    special = find_special_ids(prepared.tokenizer)
    replies = np.flatnonzero(~prepared.is_text)
    num_stops = num_open = 0
    unsupervised: Counter[int] = Counter()
    others: Counter[int] = Counter()
    is_full = prepared.is_full
    for index in replies:
        document = corpus.document(int(index))
        ids, last = document.input_ids, int(np.flatnonzero(document.supervised)[-1])
        after = int(ids[last + 1]) if last + 1 < len(ids) else None
        if int(ids[last]) in prepared.stop_ids:
            num_stops += 1
        elif int(ids[last]) in special:
            others[int(ids[last])] += 1
        elif after is not None and (after in prepared.stop_ids or after in special):
            unsupervised[after] += 1
        elif not is_full[index]:
            num_open += 1
    if unsupervised:
        names = ", ".join(prepared.name(token) for token, _ in unsupervised.most_common(3))
        yield warn(
            "EOS",
            f"In {prepared.of_all(unsupervised.total())} the token that ends the assistant's turn "
            f"({names}) is not supervised: the model never learns to stop. Move it before "
            "{% endgeneration %} in the chat template.",
        )
    if others:
        names = ", ".join(prepared.name(token) for token, _ in others.most_common(3))
        eos = prepared.tokenizer.eos_token_id
        yield warn(
            "EOS",
            f"{_upper(prepared.of_all(others.total()))} end with {names}, which is not the "
            f"tokenizer's EOS ({'none' if eos is None else prepared.name(eos)}): generation stops "
            "there only if eos_token_id of the model's generation_config.json lists it.",
        )
    if num_open:
        yield warn(
            "EOS",
            f"{_upper(prepared.of_all(num_open))} end without a token that says so: the model "
            "does not learn to stop there. Set 'data.append_eos' to true, or write "
            "{{ eos_token }} after the assistant's turns in the chat template.",
        )
    if num_stops:
        yield note(
            "EOS",
            f"In {prepared.of_all(num_stops)} the last reply ends with EOS, and it is supervised.",
        )


def _lint_padding(prepared: _Prepared) -> Iterator[Remark]:
    tokenizer = prepared.tokenizer
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is None:
        filler = "id 0" if eos is None else f"EOS ({prepared.name(eos)})"
        yield note(
            "padding",
            f"The tokenizer has no padding token: rows are filled with {filler}. Harmless here: "
            "padding is left out of the loss by its place, not by its id.",
        )
    elif pad == eos:
        yield note(
            "padding",
            f"{prepared.name(pad)} is EOS as well. Harmless here: padding is left out of the loss "
            "by its place, not by its id.",
        )
    elif pad in (tokenizer.bos_token_id, tokenizer.unk_token_id):
        yield note("padding", f"{prepared.name(pad)} has another meaning besides; harmless here.")
    else:
        num_tokens, num_documents = _count_token(prepared.corpus, pad)
        if num_tokens:
            yield warn(
                "padding",
                f"{prepared.name(pad)} occurs {num_tokens:,} times in "
                f"{prepared.of_all(num_documents)} and is trained there like any other "
                "token: take it out of the texts, or give the tokenizer another pad_token.",
            )
        else:
            yield note("padding", f"{prepared.name(pad)}, which occurs in no document.")


def _lint_template(prepared: _Prepared) -> Iterator[Remark]:
    template = getattr(prepared.tokenizer, "chat_template", None)
    is_chat = np.asarray(prepared.corpus.format == FORMATS.index("messages"))
    if not is_chat.any():
        if template is not None and not prepared.is_text.all():
            text = "Prompts and completions that are messages go through it."
        elif template is None:
            text = "None, and none is needed: the documents are no conversations."
        else:
            text = "Not used: the documents are no conversations, and are trained as they are."
        yield note("template", text)
        return
    marks = marks_generation(str(prepared.tokenizer.get_chat_template()))
    if marks:
        yield note("template", "It marks itself, with {% generation %}, what the assistant writes.")
    else:
        yield note(
            "template",
            "It has no {% generation %} marks: the assistant's turns are found by rendering the "
            "conversation turn by turn. See that the first row has the right tokens supervised.",
        )


def _lint_unknown(prepared: _Prepared) -> Iterator[Remark]:
    unknown = prepared.tokenizer.unk_token_id
    if unknown is None or unknown in (*prepared.stop_ids, prepared.tokenizer.bos_token_id):
        yield note("unknown", "The tokenizer has no token for unknown text.")
        return
    num_tokens, num_documents = _count_token(prepared.corpus, unknown)
    if not num_tokens:
        yield note("unknown", f"No {prepared.name(unknown)} in any document.")
        return
    share = num_tokens / len(prepared.corpus.input_ids)
    text = (
        f"{num_tokens:,} tokens ({format_percent(share, 2)}) of {prepared.of_all(num_documents)} "
        f"are {prepared.name(unknown)}: their text is lost"
    )
    if share > _MANY_UNKNOWN:
        yield warn("unknown", f"{text}. Take a model whose tokenizer knows this script.")
    else:
        yield note("unknown", f"{text}.")


def _lint_vocabulary(prepared: _Prepared, vocab_size: int) -> Iterator[Remark]:
    size = len(prepared.tokenizer)
    if size > vocab_size:
        yield warn(
            "vocabulary",
            f"The tokenizer has {size:,} tokens, the model embeddings for {vocab_size:,}: a text "
            "with one of the others ends training; take the tokenizer that belongs to the model.",
        )
    elif size < vocab_size:
        yield note(
            "vocabulary",
            f"{size:,} tokens; {vocab_size - size:,} of the model's {vocab_size:,} embeddings are "
            "not used.",
        )
    else:
        yield note("vocabulary", f"{size:,} tokens, as many as the model has embeddings.")


def _lint_lengths(prepared: _Prepared) -> Iterator[Remark]:
    lengths, data = prepared.lengths, prepared.data
    yield note(
        "lengths",
        f"Documents have {lengths.min():,} to {lengths.max():,} tokens, the median "
        f"{round(float(np.median(lengths))):,}.",
    )
    last = prepared.corpus.input_ids[prepared.corpus.offsets[1:] - 1]
    num_cut = int((prepared.is_full & ~np.isin(last, list(prepared.stop_ids))).sum())
    if num_cut:
        text = f"{_upper(prepared.of_all(num_cut))} are cut off at 'data.max_document_tokens' = "
        yield note("lengths", f"{text}{data.max_document_tokens:,}.")
    pieces = -(-lengths // data.seq_len)
    num_split = int((pieces > 1).sum())
    if num_split:
        text = (
            f"{_upper(prepared.of_all(num_split))} are longer than 'data.seq_len' = "
            f"{data.seq_len:,} and cut into {int(pieces[pieces > 1].sum()):,} pieces, none of "
            "which sees another"
        )
        if num_split > _MANY_CUT * prepared.num_documents:
            yield warn("lengths", f"{text}; raise 'data.seq_len' where the model allows it.")
        else:
            yield note("lengths", f"{text}.")


def _count_token(corpus: Corpus, token_id: int) -> tuple[int, int]:
    """Return how often a token occurs in the documents, and in how many of them."""
    places = np.flatnonzero(corpus.input_ids == token_id)
    documents = np.searchsorted(corpus.offsets, places, side="right")
    return len(places), len(np.unique(documents))


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
