"""Masks of labels: as an attacker computes them, and in copies of a text.

The mask of a goldfish is a function of the text without any secret: an attacker who knows k, h and
mode can compute for every guess which tokens had no loss. Mode ``hash`` depends on the h tokens
before a label, ``hash_reference`` on the h that end with it, ``static`` on its index in the
document; the mask of mode ``random`` cannot be known.

Copies of a passage may be masked at other words:

    original    The| cat| sat| on| the| mat| ...        dropped: " cat", " the"
    copy        >| The| cat| sat| on| the| mat| ...     dropped: " cat", " on"
                                                        the copy teaches " the": one of two leaks

Goldfish hashes the tokens before a label. A copy with different formatting has different tokens
there, so other labels are dropped, and tokens that are dropped in one copy receive loss in the
other. Apertus (its report, §5.4) found such copies of widely printed texts memorized in spite of
the mask. How often this affects given documents can be counted before training, without a model.

Tokens of the two texts are matched by their non-whitespace characters, ignoring case and the shape
of quotation marks, in common runs too long to be accidental. Only tokens that a mask decides on are
counted: no special or whitespace-only tokens, and not the first one, which is not predicted.

The rewritings imitate common differences in formatting; all are deterministic:

    a text                  A “fine” day. It rained.

    leading_space           ␣A “fine” day. It rained.
    wrapped_60              paragraphs broken at 60 columns
    single_line             every run of white space one space

All of them preserve the result of `fold_text`: everything but white space, case and the shape of
quotation marks. Near-duplicates may differ in more.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein

from memguard.errors import ModelError
from memguard.mitigation import Goldfish
from memguard.mitigation.goldfish import LETTERS_PER_TOKEN
from memguard.records import IGNORE_LABEL
from memguard.seeds import derive_generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from memguard.mitigation import Mitigations


def drops_next(
    goldfish: Goldfish,
    ids_RT: NDArray[np.integer],
    candidates_RC: NDArray[np.integer],
    first_position: int = 0,
) -> NDArray[np.bool_]:
    """Return ``[R, C]`` whether training would have dropped each candidate as the next label.

    Args:
        goldfish: the goldfish used in training, of any mode except ``random``.
        ids_RT: ``[R, T]`` tokens of R texts.
        candidates_RC: ``[R, C]`` candidates for the next token of each text.
        first_position: number of unknown tokens of the document before these. If the mask depends
            on them, the result is False.
    """
    num_rows, num_candidates = candidates_RC.shape
    # With letters all tokens are needed, because a token may have no letters.
    needed = ids_RT.shape[1] if goldfish.letters else goldfish.config.context_width
    skipped = max(0, ids_RT.shape[1] - needed)
    before = np.repeat(ids_RT[:, skipped:], num_candidates, axis=0)
    rows = np.concatenate([before, candidates_RC.reshape(-1, 1)], axis=1)
    dropped = find_dropped(goldfish, rows, first_position + skipped)[:, -1]
    return dropped.reshape(num_rows, num_candidates)


def find_dropped(
    goldfish: Goldfish, ids_RT: NDArray[np.integer], first_position: int = 0
) -> NDArray[np.bool_]:
    """Return ``[R, T]`` whether training dropped each token of R texts as a label.

    The arguments are those of `drops_next`.
    """
    config = goldfish.config
    assert config.mode != "random", "the mask of mode random cannot be known"
    # These modes draw no random numbers.
    generator = derive_generator(0, "goldfish")
    num_tokens = ids_RT.shape[1]
    if config.mode == "static":
        places = np.zeros((1, first_position + num_tokens), dtype=np.int64)
        dropped = goldfish.drop_mask(places, None, generator)[:, first_position:]
        return np.broadcast_to(dropped, ids_RT.shape)
    if first_position == 0:
        return goldfish.drop_mask(ids_RT, None, generator)
    # One arbitrary token replaces the unknown ones, so that the first known token is not treated as
    # the document's first.
    unknown = np.zeros((len(ids_RT), 1), dtype=ids_RT.dtype)
    dropped = goldfish.drop_mask(np.concatenate([unknown, ids_RT], axis=1), None, generator)[:, 1:]
    if goldfish.letters is not None:
        start = np.repeat(np.arange(len(ids_RT)) * num_tokens, num_tokens)
        begins = goldfish.letters.spell(ids_RT.reshape(-1), start)[1][:-1]
        num_before_RT = (begins - begins[start]).reshape(ids_RT.shape)
        dropped &= num_before_RT >= LETTERS_PER_TOKEN * config.context_width
        return dropped
    # Mode hash reads the h tokens before the label, hash_reference the h that end with it.
    width = config.context_width - (config.mode == "hash_reference")
    return dropped & (np.arange(num_tokens) >= width)


_COLUMNS = 60
_PARAGRAPHS = re.compile(r"\n\s*\n")
_STRAIGHT = str.maketrans({**dict.fromkeys("“”„‟", '"'), **dict.fromkeys("‘’‚‛", "'")})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FoldedText:
    """The part of a text that does not depend on its formatting."""

    characters: str
    """F characters: no white space, no upper case, straight quotation marks."""
    places_F: NDArray[np.int64]
    """Index of each in the text; one character may become several (ß, ss)."""


def fold_text(text: str) -> FoldedText:
    """Remove white space, case and the shape of quotation marks."""
    words = "".join(text.translate(_STRAIGHT).split())
    places = np.flatnonzero([not character.isspace() for character in text])
    widths = [len(character.casefold()) for character in words]
    return FoldedText(characters=words.casefold(), places_F=np.repeat(places, widths))


def _wrap(text: str) -> str:
    return "\n\n".join(
        textwrap.fill(paragraph, _COLUMNS, break_long_words=False, break_on_hyphens=False)
        for paragraph in _PARAGRAPHS.split(text)
    )


REWRITINGS: Mapping[str, Callable[[str], str]] = {
    "leading_space": lambda text: f" {text}",
    "wrapped_60": _wrap,
    "single_line": lambda text: " ".join(text.split()),
}
"""Rewritings by name. A text that a rewriting does not change has no such copy."""
NEAR_DUPLICATES = "near-duplicates"
"""Name of the copies that are near-duplicates of a text."""

PASSAGE_CHARACTERS = 4096
"""Length of the compared start of a text (characters); the cost of alignment is quadratic in it."""
SHARED_CHARACTERS = 20
"""Shorter common runs are ignored as accidental (non-whitespace characters)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskedText:
    """The T tokens of a text, and which of them receive no loss."""

    folded: FoldedText
    spans_T2: NDArray[np.int64]
    """Begin and end of each token in the text (characters); equal for special tokens."""
    dropped_T: NDArray[np.bool_]

    def __post_init__(self) -> None:
        assert len(self.spans_T2) == len(self.dropped_T), "one decision for each token"


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskComparison:
    """Tokens dropped in one text that receive loss in another."""

    num_dropped: int
    """Tokens dropped in the original that also occur in the copy."""
    num_leaked: int
    """The number of these that receive loss in the copy, at least in part."""

    @property
    def leak_share(self) -> float | None:
        """Share of the dropped tokens that leak; None if none was dropped."""
        return self.num_leaked / self.num_dropped if self.num_dropped else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskChange:
    """How one rewriting of texts changes their masks."""

    rewriting: str
    """Name in `REWRITINGS`, or `NEAR_DUPLICATES`."""
    num_passages: int
    """Texts with a dropped token that occurs in the copy."""
    num_changed: int
    """Of these, texts of which such a token receives loss in the copy."""
    mean_leaked_share: float | None
    """Mean share of a text's dropped tokens that receive loss; None without texts."""


def compare_masks(original: MaskedText, copy: MaskedText) -> MaskComparison:
    """Count the tokens dropped in the original that receive loss in the copy.

    If a token of the original is one token of the copy, that token decides. If the copy splits it,
    or joins it to others, it leaks if any token of the copy that shares a character with it
    receives loss.
    """
    ours, theirs = original.folded.characters, copy.folded.characters
    partner_F = _find_partners(ours, theirs)
    num_absent = _count_before(partner_F < 0)
    in_copy = list(_place_tokens(copy))
    taught_F = np.zeros(len(theirs), dtype=bool)
    for token in in_copy:
        taught_F[token.start : token.end] |= token.receives_loss
    num_taught = _count_before(taught_F)
    receives_loss = {token[:4]: token.receives_loss for token in in_copy}
    leaks = []
    for token in _place_tokens(original):
        if not token.is_withheld or num_absent[token.end] > num_absent[token.start]:
            continue
        start, end = int(partner_F[token.start]), int(partner_F[token.end - 1]) + 1
        counterpart = (start, end, token.place, token.num_same_range)
        leaks.append(receives_loss.get(counterpart, num_taught[end] > num_taught[start]))
    return MaskComparison(num_dropped=len(leaks), num_leaked=int(sum(leaks)))


def measure_mask_consistency(
    texts: Iterable[str],
    tokenizer: "PreTrainedTokenizerBase",
    mitigations: "Mitigations",
    *,
    pairs: Iterable[tuple[str, str]] = (),
    seed: int = 0,
    max_passages: int = 100,
) -> list[MaskChange]:
    """Compare the masks of passages with those of their rewritings, and of near-duplicates.

    The first `PASSAGE_CHARACTERS` of each text are used, encoded as training encodes plain text. Of
    a pair, tokens that the first drops are searched in the second. A passage counts if a token that
    it drops occurs in its copy. Mitigations with random masks have a random stream for each text.

    Returns:
        One row for each rewriting; the last one is of the near-duplicates, if there are pairs.

    Raises:
        ModelError: the tokenizer is not a fast one.
    """
    mask = _build_masker(tokenizer, mitigations, seed)
    passages = [text[:PASSAGE_CHARACTERS] for text in islice(texts, max_passages)]
    masked = [mask(passage) for passage in passages]
    changes = []
    for name, rewrite in REWRITINGS.items():
        copies = [rewrite(passage) for passage in passages]
        comparisons = [
            compare_masks(original, mask(copy))
            for passage, original, copy in zip(passages, masked, copies, strict=True)
            if copy != passage
        ]
        changes.append(_summarise(name, comparisons))
    cut = [[text[:PASSAGE_CHARACTERS] for text in pair] for pair in islice(pairs, max_passages)]
    if cut:
        compared = [compare_masks(mask(one), mask(other)) for one, other in cut]
        changes.append(_summarise(NEAR_DUPLICATES, compared))
    return changes


def _build_masker(
    tokenizer: Any, mitigations: "Mitigations", seed: int
) -> Callable[[str], MaskedText]:
    if not tokenizer.is_fast:
        raise ModelError(
            "'mask_consistency' needs a fast tokenizer (tokenizer.json); got a slow one. Save it "
            "as a fast tokenizer, or omit the probe"
        )
    num_masked = 0

    def mask(text: str) -> MaskedText:
        nonlocal num_masked
        generator = derive_generator(seed, "mask consistency", num_masked)
        num_masked += 1
        encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
        input_ids = np.array(encoded["input_ids"], dtype=np.int64)
        labels = mitigations.mask_labels(input_ids, input_ids, generator=generator)
        return MaskedText(
            folded=fold_text(text),
            spans_T2=np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2),
            dropped_T=labels == IGNORE_LABEL,
        )

    return mask


def _summarise(name: str, comparisons: Sequence[MaskComparison]) -> MaskChange:
    """Count the passages with a dropped token that occurs in the copy."""
    shares = [share for c in comparisons if (share := c.leak_share) is not None]
    return MaskChange(
        rewriting=name,
        num_passages=len(shares),
        num_changed=sum(share > 0 for share in shares),
        mean_leaked_share=math.fsum(shares) / len(shares) if shares else None,
    )


def _find_partners(ours: str, theirs: str) -> NDArray[np.int64]:
    """Return for each character of ours the index of its match in theirs; -1 without a match."""
    if ours == theirs:
        return np.arange(len(ours))
    partner_F = np.full(len(ours), -1, dtype=np.int64)
    for block in Levenshtein.opcodes(ours, theirs):
        if block.tag == "equal" and block.src_end - block.src_start >= SHARED_CHARACTERS:
            partner_F[block.src_start : block.src_end] = np.arange(block.dest_start, block.dest_end)
    return partner_F


class _Token(NamedTuple):
    """A token that is not only white space, by its range of folded characters."""

    start: int
    end: int
    place: int
    """Index among the tokens with this range; several share it if each has some bytes of it."""
    num_same_range: int
    """Number of tokens with this range."""
    receives_loss: bool
    is_withheld: bool
    """Whether the mask dropped a token that would have received loss."""


def _place_tokens(masked: MaskedText) -> Iterator[_Token]:
    spans = np.searchsorted(masked.folded.places_F, masked.spans_T2)
    num_with_range = Counter(map(tuple, spans.tolist()))
    seen: Counter[tuple[int, ...]] = Counter()
    for index, ((start, end), dropped) in enumerate(
        zip(spans.tolist(), masked.dropped_T.tolist(), strict=True)
    ):
        if start < end:
            yield _Token(
                start=start,
                end=end,
                place=seen[start, end],
                num_same_range=num_with_range[start, end],
                receives_loss=index > 0 and not dropped,
                is_withheld=index > 0 and dropped,
            )
            seen[start, end] += 1


def _count_before(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of true flags before each index, and before the end."""
    return np.concatenate([[0], np.cumsum(flags)])
