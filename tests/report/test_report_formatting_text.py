"""Hostile strings are neutralised before they are escaped."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.report import formatting as fmt

ANYTHING = st.text(st.characters(codec=None, categories=None) | st.characters(categories=["Cs"]))


@given(ANYTHING, st.integers(4, 60))
def test_cleaned_text_is_utf8_one_line_and_short(text: str, limit: int) -> None:
    cleaned = fmt.clean_text(text, limit)
    cleaned.encode()
    assert len(cleaned) <= 10 * limit  # a spelled-out character takes at most ten
    steering = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert not {c for c in cleaned if unicodedata.category(c) in steering}
    assert fmt.clean_text(cleaned, len(cleaned) + 1) == cleaned


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("a\u202eb", "a[U+202E]b"),
        ("\x00\x1b[31m", "[U+0000][U+001B][31m"),
        ("\ud800", "[U+D800]"),
        ("a\nb\tc", "a b c"),
        ("\u2028\ufeff\ufffe", "[U+2028][U+FEFF][U+FFFE]"),
        ("עברית 語 é", "עברית 語 é"),
    ],
)
def test_steering_characters_are_spelled_out(hostile: str, shown: str) -> None:
    assert fmt.clean_text(hostile) == shown


def test_long_text_keeps_both_ends() -> None:
    assert fmt.clean_text("a" * 500_000 + "b" * 500_000, 31) == "a" * 20 + "…" + "b" * 10


def test_an_empty_name_is_visible() -> None:
    assert fmt.clean_name("") == "(empty)"


@pytest.mark.parametrize(
    "path",
    [
        "/home/alice/secret.jsonl",
        "~/secret.jsonl",
        "../secret/x",
        "./secret",
        "C:\\Users\\alice\\secret",
        "c:\\users\\alice\\secret",
        "d:/data/secret",
        "file:///srv/secret",
        "\\\\server\\secret",
        "~alice/secret",
    ],
)
@pytest.mark.parametrize("sentence", ["{}", "from {} to", "path={}", "('{}')", "jsonl:{}"])
def test_local_paths_are_hidden(path: str, sentence: str) -> None:
    hidden = fmt.hide_paths(sentence.format(path))
    assert "secret" not in hidden
    assert "(local path)" in hidden


@pytest.mark.parametrize(
    "text",
    ["meta-llama/Llama-3.1-8B", "3 of 40, 7.5 %", "https://hub/x", "and/or", "~10 / 20", "a: b"],
)
def test_what_is_no_local_path_stays(text: str) -> None:
    assert fmt.hide_paths(text) == text


def test_hub_ids_are_told_from_paths() -> None:
    assert fmt.is_hub_id("gpt2")
    assert fmt.is_hub_id("meta-llama/Llama-3.1-8B")
    for path in ("/abs/x", "./x", "../x", "~/x", "a/b/c", "a\\b", "", "a/..", "a b", "x\n"):
        assert not fmt.is_hub_id(path)


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("runs/base/model", "runs/base/model"),
        ("/scratch/me/runs/base/model", "…/runs/base/model"),
        ("C:\\Users\\me\\base\\model", "…/me/base/model"),
        ("", ""),
    ],
)
def test_of_a_long_path_the_end_is_shown(place: str, shown: str) -> None:
    assert fmt.shorten_place(place) == shown
