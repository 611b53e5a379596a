import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.data.words import split_words

STRAIGHT = "Straße, naïve_x; ÉCOLE 1st"
UNITS = ["strasse", "naïve", "x", "école", "1st"]


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("Plain ASCII, it's 2_x", ["plain", "ascii", "it", "s", "2", "x"]),
        (STRAIGHT, UNITS),
        (unicodedata.normalize("NFD", STRAIGHT.upper()), UNITS),
        ("\u200bStra\u00adße\u2060, na\ufeffïve x > école\n> 1\u200dst", UNITS),
        ("ＡＢＣ１ ﬁn ｶﾞ", ["abc1", "fin", "ガ"]),
        # Vowel signs belong to their word: cut there, words of Hindi are single letters.
        ("हिन्दी में, বাংলা", ["हिन्दी", "में", "বাংলা"]),
        ("日本語、カナ", ["日", "本", "語", "カ", "ナ"]),
        ("ที่", ["ท", "ี", "่"]),
        ("人々", ["人", "々"]),
        ("cafe\u200b\u0301", ["café"]),
        ("don´t ❤️ !\u0301", ["don", "t"]),
        ("—", []),
    ],
)
def test_units(text: str, units: list[str]) -> None:
    assert split_words(text) == units


@given(st.text(), st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
def test_encoding_and_invisible_characters_do_not_count(text: str, form: str) -> None:
    units = split_words(text)
    assert split_words(unicodedata.normalize(form, text)) == units
    assert split_words("\u200b".join(text)) == units
    assert split_words(" ".join(units)) == units
