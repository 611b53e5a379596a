"""Canaries: random secrets, a fair coin for each, trained or never.

    canary-0007   The canary code of qhzkmwbtra is| 31 90 44 07 82 65
                  unsupervised                      supervised, never seen anywhere else

Carlini et al., "The Secret Sharer" (arXiv 1802.08232), insert random secrets and ask how far the
model prefers them to others of the same form. Ours are documents of a prompt and a completion, so
that in any kind of training data the secret alone receives loss, and no chat template is needed.
The references are canaries too, drawn and placed in the same way, whose coin fell on "out": nothing
but training tells the two groups apart.

Only the nll of equally many tokens can be compared, so all secrets of a run have one length. Digits
are in pairs because a pair is one token of GPT-2's tokenizer, and always equally many of those that
take digits one by one (of four groups of three digits GPT-2's makes four to eight). A tokenizer
trained on other text merges some pairs and not others; there a secret of another length than most
is drawn again until it has that length (`draw_of_one_length`). Every secret is then a uniform draw
from the secrets of that length, whether it is trained or a reference, and no coin is looked at.

With 12 digits a secret has 40 bits, less the few that one length costs: it cannot be guessed, and
no number of references could show more.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""Canaries among which the commonest length is looked for, however many are wanted."""
_MOST_DRAWS = 1000
"""Of one secret. A length that one in 20 has is missed by all of them once in 10^22 times."""


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
    """Draw a run's canaries, tokenise and place them; say so where there can be none.

    Args:
        data: `canaries`, and what they depend on.
        tokenizer: the run's.
        epochs: see `choose_repetitions`.
        seed: see `draw_canaries`.
        texts_sha256: see `draw_canaries`.
        num_trained: documents that are trained, background included.
        console: told why there are none.
    """
    settings = data.canaries
    if not settings.count:
        return []

    def tokenize(canaries: Sequence[Canary]) -> list[TokenizedDocument]:
        # Whole, whatever 'data.max_document_tokens' leaves of others.
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
    """Return how many canaries go with so many trained documents, background included.

    One in 20 at most, so that they stay a side matter; 0 where too few are left to show anything.
    """
    count = min(wanted, num_trained // _DOCUMENTS_PER_CANARY)
    return count if count >= MIN_CANARIES else 0


def choose_repetitions(data: DataConfig, epochs: int) -> int:
    """Return how often a trained canary is trained: by default as often as any other document."""
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
    """Draw canaries whose secrets have equally many tokens; the first are the same for any count.

    The length is the commonest of the first 64 canaries. Secrets of another length are drawn again;
    keys and coins stay. Where all have one length, these are the canaries of `draw_canaries`.
    Secrets keep another length only where 1,000 draws did not find one, see `explain_absence`.

    Args:
        count: how many (documents).
        tokenize: returns the tokens of canaries, in order.
        num_digits: see `draw_canaries`.
        seed: see `draw_canaries`.
        texts_sha256: see `draw_canaries`.
    """
    if not count:
        return [], []
    settings: dict[str, Any] = {
        "num_digits": num_digits,
        "seed": seed,
        "texts_sha256": texts_sha256,
    }
    canaries = draw_canaries(max(count, _LENGTH_SAMPLE), **settings)
    tokenized = tokenize(canaries)
    lengths = Counter(_count_secret(tokens) for tokens in tokenized[:_LENGTH_SAMPLE])
    wanted = max(lengths, key=lambda length: (lengths[length], length))
    del canaries[count:], tokenized[count:]
    for draw in range(1, _MOST_DRAWS):
        others = [at for at, tokens in enumerate(tokenized) if _count_secret(tokens) != wanted]
        if not others:
            break
        again = [_draw(at, draw, **settings) for at in others]
        for at, canary, tokens in zip(others, again, tokenize(again), strict=True):
            canaries[at], tokenized[at] = canary, tokens
    return canaries, tokenized


def _count_secret(tokens: TokenizedDocument) -> int:
    """Return the tokens of the secret, without an EOS."""
    return int(tokens.supervised[: tokens.num_content_tokens].sum())


def draw_canaries(count: int, *, num_digits: int, seed: int, texts_sha256: str) -> list[Canary]:
    """Draw canaries of any length; the first ones are the same however many are drawn.

    Args:
        count: how many (documents).
        num_digits: digits of a secret.
        seed: the run's.
        texts_sha256: of all training texts. Runs on the same documents have the same canaries. A
            model that another run with this seed has trained on other documents has seen other
            ones: none of its secrets can be a reference here.
    """
    return [
        _draw(index, 0, num_digits=num_digits, seed=seed, texts_sha256=texts_sha256)
        for index in range(count)
    ]


def _draw(index: int, draw: int, *, num_digits: int, seed: int, texts_sha256: str) -> Canary:
    """Return one canary; only its secret depends on how often it was drawn before."""

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
    """Say why a run has no canaries after all; None where these will do.

    Args:
        canaries: what was drawn, as many as `count_canaries` allows.
        tokenized: their tokens, in the same order.
        num_trained: documents that are trained, background included.
        seq_len: length of a row (tokens).
    """
    if not canaries:
        needed = MIN_CANARIES * _DOCUMENTS_PER_CANARY
        return f"which take {needed} trained documents or more: there are {num_trained:,}"
    longest = max(len(tokens.input_ids) for tokens in tokenized)
    if longest > seq_len:
        # A secret cut off from its key is not learnt with it.
        return f"which have up to {longest} tokens: 'data.seq_len' is {seq_len}"
    secrets = {canary.document.completion for canary in canaries}
    distinct = {tokens.input_ids[tokens.supervised].tobytes() for tokens in tokenized}
    if len(distinct) < len(secrets):
        return "whose digits the tokenizer does not tell apart"
    lengths = {_count_secret(tokens) for tokens in tokenized}
    if len(lengths) > 1:
        return (
            f"whose secrets have {min(lengths)} to {max(lengths)} tokens: only those of one length "
            "can be compared"
        )
    return None
