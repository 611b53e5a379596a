"""Canaries: random secrets, a fair coin for each, trained or never.

    canary-0007   The canary code of qhzkmwbtra is| 31 90 44 07 82 65
                  unsupervised                      supervised, never seen anywhere else

As in Carlini et al., "The Secret Sharer" (arXiv 1802.08232), random secrets are compared with other
secrets of the same form. Here a canary is a document with a prompt and a completion, so that only
the secret receives loss whatever the format of the training data, and no chat template is needed.
The references were drawn in the same way; only the coin kept them from training.

NLL can be compared only over the same number of tokens, so all secrets of a run have the same
length. Digits are written in pairs because a pair is one token of GPT-2's tokenizer, and a fixed
number of tokens for tokenizers that split digits (GPT-2 encodes four groups of three digits as four
to eight tokens). A tokenizer trained on other text may merge only some pairs; a secret whose length
differs from the most common one is then drawn again until it has that length
(`draw_of_one_length`). Every secret is therefore a uniform draw from the secrets of that length,
whether it is trained or a reference; the coin has no influence.

With 12 digits a secret has 40 bits, minus the few lost by fixing the length: it cannot be guessed,
and more bits would not strengthen the result for any number of references.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from memguard.config import DataConfig
from memguard.config.data import MIN_CANARIES
from memguard.data.buckets import Placement, place_canaries
from memguard.data.documents import Document
from memguard.data.tokenization import TokenizedDocument, tokenize_documents
from memguard.runtime import Console
from memguard.seeds import derive_generator

SOURCE = "canaries"
"""`source` of every canary in the manifest."""
_DOCUMENTS_PER_CANARY = 20
_PROMPT = "The canary code of {key} is"
_KEY_LETTERS, _KEY_LENGTH = "abcdefghijklmnopqrstuvwxyz", 10
_GROUP_DIGITS = 2
_LENGTH_SAMPLE = 64
"""Number of canaries that determine the most common length; does not depend on `count`."""
_MOST_DRAWS = 1000
"""Draws of one secret. If one in 20 has the length, all draws miss it with probability 10^-22."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """One secret, and whether it is trained."""

    document: Document
    is_in: bool


def prepare_canaries(
    data: DataConfig,
    tokenizer: Any,
    *,
    epochs: int,
    seed: int,
    texts_sha256: str,
    num_trained: int,
    console: Console,
) -> list[tuple[Document, TokenizedDocument, Placement]]:
    """Draw, tokenise and place a run's canaries; say on the console if there can be none.

    `num_trained` documents are trained, background included.
    """
    settings = data.canaries
    if not settings.count:
        return []

    def tokenize(canaries: Sequence[Canary]) -> list[TokenizedDocument]:
        # Never cut: 'data.max_document_tokens' does not apply to canaries.
        documents = tokenize_documents(
            [canary.document for canary in canaries],
            tokenizer,
            append_eos=data.append_eos,
            max_tokens=None,
            setting="data.canaries",
        )
        return list(documents)

    canaries, tokenized = draw_of_one_length(
        count_canaries(settings.count, num_trained=num_trained),
        tokenize,
        num_digits=settings.secret_digits,
        seed=seed,
        texts_sha256=texts_sha256,
    )
    why = explain_absence(canaries, tokenized, num_trained=num_trained, seq_len=data.seq_len)
    if why is not None:
        console.info(f"documents: no canaries, {why}")
        return []
    is_in = [canary.is_in for canary in canaries]
    placements = place_canaries(is_in, repetitions=choose_repetitions(data, epochs))
    documents = [canary.document for canary in canaries]
    return list(zip(documents, tokenized, placements, strict=True))


def count_canaries(wanted: int, *, num_trained: int) -> int:
    """Return the number of canaries: at most one per 20 trained documents, background included.

    So they hardly affect training. 0 if that leaves too few for a statistical test.
    """
    count = min(wanted, num_trained // _DOCUMENTS_PER_CANARY)
    return count if count >= MIN_CANARIES else 0


def choose_repetitions(data: DataConfig, epochs: int) -> int:
    """Return the repetitions of a trained canary: by default those of the other documents."""
    if data.canaries.num_repetitions is not None:
        return data.canaries.num_repetitions
    return epochs if data.study is None else max(data.study.num_repetitions)


def draw_of_one_length(
    count: int,
    tokenize: Callable[[Sequence[Canary]], list[TokenizedDocument]],
    *,
    num_digits: int,
    seed: int,
    texts_sha256: str,
) -> tuple[list[Canary], list[TokenizedDocument]]:
    """Draw canaries whose secrets have the same number of tokens; see `draw_canary`.

    The length is the most common one among the first 64 canaries. Secrets of another length are
    drawn again; keys and coins do not change. A secret keeps another length only if 1,000 draws did
    not produce the common one, see `explain_absence`.
    """
    if not count:
        return [], []
    drawn = partial(draw_canary, num_digits=num_digits, seed=seed, texts_sha256=texts_sha256)
    canaries = list(map(drawn, range(max(count, _LENGTH_SAMPLE))))
    tokenized = tokenize(canaries)
    lengths = Counter(_count_secret(tokens) for tokens in tokenized[:_LENGTH_SAMPLE])
    wanted = max(lengths, key=lambda length: (lengths[length], length))
    del canaries[count:], tokenized[count:]
    for draw in range(1, _MOST_DRAWS):
        others = [at for at, tokens in enumerate(tokenized) if _count_secret(tokens) != wanted]
        if not others:
            break
        again = [drawn(at, draw) for at in others]
        for at, canary, tokens in zip(others, again, tokenize(again), strict=True):
            canaries[at], tokenized[at] = canary, tokens
    return canaries, tokenized


def _count_secret(tokens: TokenizedDocument) -> int:
    """Return the number of tokens of the secret, without an EOS."""
    return int(tokens.supervised[: tokens.num_content_tokens].sum())


def draw_canary(
    index: int, draw: int = 0, *, num_digits: int, seed: int, texts_sha256: str
) -> Canary:
    """Return one canary of any length; only its secret depends on ``draw``.

    Runs on the same documents have the same canaries. A run with the same seed on other documents
    has others, so that none of its trained secrets can be a reference here.
    """

    def generator(what: str) -> np.random.Generator:
        return derive_generator(seed, f"canary {what} {texts_sha256}", index)

    key = "".join(generator("key").choice(list(_KEY_LETTERS), _KEY_LENGTH))
    secret = generator(f"secret {draw}" if draw else "secret")
    digits = "".join(str(digit) for digit in secret.integers(0, 10, num_digits))
    groups = [digits[at : at + _GROUP_DIGITS] for at in range(0, num_digits, _GROUP_DIGITS)]
    return Canary(
        document=Document(
            id=f"canary-{index:04d}",
            source=SOURCE,
            format="prompt_completion",
            prompt=_PROMPT.format(key=key),
            completion="".join(f" {group}" for group in groups),
        ),
        is_in=bool(generator("coin").integers(2)),
    )


def explain_absence(
    canaries: Sequence[Canary],
    tokenized: Sequence[TokenizedDocument],
    *,
    num_trained: int,
    seq_len: int,
) -> str | None:
    """Return why the canaries that `count_canaries` allows cannot be used; None if they can."""
    if not canaries:
        needed = MIN_CANARIES * _DOCUMENTS_PER_CANARY
        return f"which need at least {needed} trained documents: there are {num_trained:,}"
    longest = max(len(tokens.input_ids) for tokens in tokenized)
    if longest > seq_len:
        # A secret in another row than its key is not learned together with it.
        return f"which have up to {longest} tokens: 'data.seq_len' is {seq_len}"
    secrets = {canary.document.completion for canary in canaries}
    distinct = {tokens.input_ids[tokens.supervised].tobytes() for tokens in tokenized}
    if len(distinct) < len(secrets):
        return "whose digits the tokenizer does not distinguish"
    lengths = {_count_secret(tokens) for tokens in tokenized}
    if len(lengths) > 1:
        return (
            f"whose secrets have {min(lengths)} to {max(lengths)} tokens: only those of one length "
            "can be compared"
        )
    return None
