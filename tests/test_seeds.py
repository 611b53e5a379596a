"""Every draw has an owner, and the same owner draws the same numbers for ever."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from memguard.seeds import derive_generator, derive_seed

OWNERS = st.tuples(st.integers(0, 2**63 - 1), st.text(max_size=20), st.integers(0, 2**40))


@given(OWNERS, OWNERS)
def test_other_owners_get_other_seeds(
    one: tuple[int, str, int], other: tuple[int, str, int]
) -> None:
    assume(one != other and "\0" not in one[1] + other[1])
    assert derive_seed(*one) != derive_seed(*other)


@given(OWNERS)
def test_seeds_fit_into_a_signed_integer(owner: tuple[int, str, int]) -> None:
    assert 0 <= derive_seed(*owner) < 2**63


def test_seeds_never_change() -> None:
    # Golden: a run must draw the same control with every later version.
    assert derive_seed(0, "control") == 5062201577163777048
    assert derive_generator(0, "control", 3).integers(1000, size=4).tolist() == [439, 537, 55, 908]


def test_streams_are_their_own() -> None:
    one, again = derive_generator(1, "a"), derive_generator(1, "a")
    first = one.random(3)
    derive_generator(1, "b").random(3)
    np.testing.assert_array_equal(first, again.random(3))
    assert not np.array_equal(first, one.random(3))
