"""Named random streams."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memguard.seeds import derive_generator, derive_secret_generator, derive_seed

seeds = st.integers(0, 2**63 - 1)


@given(seed=seeds, purpose=st.text(max_size=20), index=st.integers(0, 2**40))
def test_a_stream_repeats_and_fits_every_library(seed: int, purpose: str, index: int) -> None:
    value = derive_seed(seed, purpose, index)
    assert value == derive_seed(seed, purpose, index)
    # torch.manual_seed takes 64 bits with sign.
    assert 0 <= value < 2**63
    numbers = [derive_generator(seed, purpose, index).random() for _ in range(2)]
    assert numbers[0] == numbers[1]


@given(
    one=st.tuples(seeds, st.sampled_from(["a", "b", "ab"]), st.integers(0, 99)),
    other=st.tuples(seeds, st.sampled_from(["a", "b", "ab"]), st.integers(0, 99)),
)
def test_different_owners_have_different_streams(
    one: tuple[int, str, int], other: tuple[int, str, int]
) -> None:
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)


def test_streams_never_change_between_versions() -> None:
    # A changed stream changes every run's control; that needs a line in the change log.
    assert derive_seed(0, "control") == 5_062_201_577_163_777_048
    assert derive_generator(1, "row order", 2).integers(0, 1000, 4).tolist() == [314, 844, 279, 488]


def test_a_numpy_integer_is_the_same_seed() -> None:
    assert derive_seed(int(np.int64(3)), "x") == derive_seed(np.int64(3), "x", np.int32(0))


def test_a_secret_has_128_bits_of_which_each_hangs_on_the_whole_key() -> None:
    def key_of(secret: int, index: int = 0) -> int:
        state = derive_secret_generator(secret, "x", index).bit_generator.state["state"]
        low, high = state["key"].tolist()
        return low + 2**64 * high

    keys = [key_of(0), key_of(0, 1), *(key_of(2**bit) for bit in range(256))]
    # Of random numbers of 128 bits any two differ in about 64; below 24 once in 1e12 pairs.
    differing = [(a ^ b).bit_count() for a, b in itertools.combinations(keys, 2)]
    assert min(differing) > 24
    assert max(keys) >= 2**127
    one, same = (derive_secret_generator(7, "x").standard_normal(4) for _ in range(2))
    assert one.tolist() == same.tolist()
