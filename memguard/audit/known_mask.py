"""What an attacker knows of a goldfish's mask.

The mask is a function of the text without any secret: an attacker who knows k, h and mode can
compute for every text, and so for every guess, which tokens had no loss. Mode ``hash`` depends on
the h tokens before a label, ``hash_reference`` on the h that end with it, ``static`` on its index
in the document; the mask of mode ``random`` cannot be known.
"""

import numpy as np
from numpy.typing import NDArray

from memguard.mitigation import Goldfish
from memguard.mitigation.goldfish import LETTERS_PER_TOKEN
from memguard.seeds import derive_generator


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

    Args:
        goldfish: the goldfish used in training, of any mode except ``random``.
        ids_RT: ``[R, T]`` tokens.
        first_position: as in `drops_next`.
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
        num_before_RT = np.cumsum(goldfish.letters.count(ids_RT), axis=1)
        num_before_RT = np.pad(num_before_RT, ((0, 0), (1, 0)))[:, :-1]
        return dropped & (num_before_RT >= LETTERS_PER_TOKEN * config.context_width)
    # Mode hash reads the h tokens before the label, hash_reference the h that end with it.
    width = config.context_width - (config.mode == "hash_reference")
    return dropped & (np.arange(num_tokens) >= width)
