"""Rewritings against examples by hand; whatever the text, its words stay."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.audit.mask_consistency import REWRITINGS, fold_text

_TEXT = 'He said "it\'s \'fine\' ("no")".  And? Yes.\n  So it was.\n\nThe end, my friend.'

EXPECTED = {
    "leading_space": " " + _TEXT,
    "windows_lines": _TEXT.replace("\n", "\r\n"),
    "wrapped_60": 'He said "it\'s \'fine\' ("no")".  And? Yes.   So it was.\n\nThe end, my friend.',
    "single_line": 'He said "it\'s \'fine\' ("no")". And? Yes. So it was. The end, my friend.',
    "indented": '    He said "it\'s \'fine\' ("no")".  And? Yes.\n      So it was.\n\n'
    "    The end, my friend.",
    "quoted": '> He said "it\'s \'fine\' ("no")".  And? Yes.\n>   So it was.\n>\n'
    "> The end, my friend.",
    "double_spaces": 'He said "it\'s \'fine\' ("no")".  And?  Yes.\n  So it was.\n\n'
    "The end, my friend.",
    "single_spaces": 'He said "it\'s \'fine\' ("no")". And? Yes.\n So it was.\n\n'
    "The end, my friend.",
    "curly_quotes": "He said “it’s ‘fine’ (“no”)”.  And? Yes.\n  So it was.\n\nThe end, my friend.",
    "straight_quotes": _TEXT,
    "lower_case": _TEXT.lower(),
    "lower_case_first": "h" + _TEXT[1:],
}


@pytest.mark.parametrize("name", REWRITINGS)
def test_rewritings_by_hand(name: str) -> None:
    assert REWRITINGS[name](_TEXT) == EXPECTED[name]


def test_straight_quotes_undo_curly_ones() -> None:
    assert REWRITINGS["straight_quotes"](REWRITINGS["curly_quotes"](_TEXT)) == _TEXT


def test_wrapped_lines_are_as_long_as_words_allow() -> None:
    text = "words and well-known ones, " * 20 + "x" * 80
    lines = REWRITINGS["wrapped_60"](text).split("\n")
    assert max(map(len, lines[:-1])) <= 60
    assert lines[-1] == "x" * 80
    assert all(len(line) + 1 + len(after.split()[0]) > 60 for line, after in pairwise(lines))


# Whatever has case, is white space or a quotation mark, and what surrounds it.
_texts = st.one_of(st.text(), st.text(st.sampled_from("aA ß İΣ.?!\"'“”‘’(-\n\r\t\u2028\u00a0>—")))


@given(text=_texts)
def test_rewritings_keep_the_words(text: str) -> None:
    words = fold_text(text).characters
    for name, rewrite in REWRITINGS.items():
        folded = fold_text(rewrite(text)).characters
        if name == "quoted":
            assert folded.replace(">", "") == words.replace(">", "")
        else:
            assert folded == words, name


@given(text=_texts)
def test_folded_characters_know_their_places(text: str) -> None:
    folded = fold_text(text)
    assert len(folded.characters) == len(folded.places_F)
    assert (folded.places_F[1:] >= folded.places_F[:-1]).all()
    kept = set(folded.places_F.tolist())
    assert kept == {place for place, character in enumerate(text) if not character.isspace()}


def test_fold_by_hand() -> None:
    folded = fold_text("Er  aß\n“Ä”")
    assert folded.characters == 'erass"ä"'
    assert folded.places_F.tolist() == [0, 1, 4, 5, 5, 7, 8, 9]
