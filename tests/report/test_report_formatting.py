"""Each kind of number has one spelling; hostile strings are neutralised before they are escaped."""

import unicodedata

import pytest
import report_examples as examples
from hypothesis import given
from hypothesis import strategies as st

from memguard.pages import formatting as fmt
from memguard.records import Interval, Rate, Texts


def plain(text: str) -> str:
    return text.replace("\u00a0", " ").replace("\u2212", "-")


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.015, "1.5 %"),
        (0.0015, "0.15 %"),
        (0.00001, "< 0.01 %"),
        (0.99999, "> 99.99 %"),
        (0.9996, "99.96 %"),
        (0.9995, "99.95 %"),
        (0.42, "42.0 %"),
    ],
)
def test_percentages_never_round_to_certainty(share: float | None, words: str) -> None:
    assert plain(fmt.percent(share)) == words


def test_rates_carry_counts_and_interval() -> None:
    rate = Rate(num_documents=200, num_matched=3, rate=0.015, ci=(0.0031, 0.0432))
    assert plain(fmt.rate(rate)) == "3 of 200, 1.5 %, 95 % CI 0.31–4.3 %"
    assert fmt.rate(examples.make_rate(0, 0)) == "no documents"
    assert plain(fmt.rate(examples.make_rate(1, 1))) == "1 of 1, 100 %, no interval"
    texts = Texts(num_texts=33, num_matched=20, num_effective=24.1)
    copied = Rate(num_documents=39, num_matched=26, rate=26 / 39, ci=(0.447, 0.843), texts=texts)
    assert plain(fmt.rate(copied)) == "26 of 39 (20 of 33 texts), 66.7 %, 95 % CI 44.7–84.3 %"


@pytest.mark.parametrize(
    ("p_value", "words"), [(1.0, "1.000"), (0.0625, "0.062"), (0.001, "0.001"), (1e-9, "< 0.001")]
)
def test_p_values_are_never_zero(p_value: float, words: str) -> None:
    assert plain(fmt.p(p_value)) == words


def test_shares_carry_their_interval() -> None:
    share = fmt.share(Interval(value=0.333, ci=(0.298, 0.368)))
    assert (plain(share.value), plain(share.interval)) == ("33.3 %", "29.8–36.8 %")
    assert fmt.share(None).interval == ""


def test_durations() -> None:
    spoken = [plain(fmt.duration(s)) for s in (0.42, 52.4, 59.7, 252, 3900, 3599.6)]
    assert spoken == ["0.4 s", "52 s", "1 min 00 s", "4 min 12 s", "1 h 05 min", "1 h 00 min"]


def test_numbers_far_out_stay_short() -> None:
    assert len(fmt.number(1.7e308)) < 12
    assert plain(fmt.number(-1e-9)) == "-1.00e-09"
    assert plain(fmt.signed(-0.5)) == "-0.500"
    assert fmt.number(None) == "–"


def test_intervals() -> None:
    both = fmt.interval(Interval(value=-1.5, ci=(-2.0, -1.0)))
    assert plain(both.interval) == "-2.000 to -1.000"
    assert fmt.interval(Interval(value=1.0, ci=None)).interval == "no interval"
    points = fmt.points(Interval(value=0.425, ci=(-0.01, 0.5)))
    assert (plain(points.value), plain(points.interval)) == ("+42.5 pp", "-1.0 to +50.0")


def test_settings_read_as_words() -> None:
    goldfish = {"name": "goldfish", "k": 4, "table": None, "on": True, "x": [1e-4, "a"]}
    assert fmt.settings(goldfish) == "goldfish (k 4, table not set, on yes, x [0.0001, a])"
    assert fmt.settings({"optim.lr": 0.001}) == "optim.lr 0.001"
    assert fmt.settings({}) == "none"


@pytest.mark.parametrize(
    ("share", "words"),
    [(None, "–"), (0.0484, "+4.8 %"), (-0.052, "-5.2 %"), (0.0003, "0.0 %"), (-0.0003, "0.0 %")],
)
def test_a_change_too_small_to_show_is_none(share: float | None, words: str) -> None:
    assert plain(fmt.change(share)) == words


def test_a_changes_interval_has_the_signs_of_both_ends() -> None:
    change = Interval(value=0.01, ci=(-0.0121, 0.0339))
    assert plain(fmt.change_range(change)) == "-1.2 to +3.4 %"
    assert fmt.change_range(Interval(value=0.01, ci=None)) == ""
    assert fmt.change_range(None) == ""


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
