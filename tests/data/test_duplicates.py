import math
import unicodedata
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard.data import duplicates
from memguard.data.duplicates import WordGrams

pytestmark = pytest.mark.slow


def split_naively(text):
    """Return words by the categories of their characters; Han and Kana one by one."""
    words = [""]
    for c in unicodedata.normalize("NFKC", text).casefold():
        if "\u3040" <= c <= "\u9fff":
            words += [c, ""]
        elif c.isalnum() or unicodedata.category(c)[0] == "M":
            words[-1] += c
        elif unicodedata.category(c) != "Cf":
            words.append("")
    return [word for word in words if word]


def list_runs(words, size):
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


def find_grams(text, num_words):
    words = split_naively(text)
    if len(words) < num_words:
        return {tuple(words)} if words else {text}
    return set(list_runs(words, num_words))


def cluster_naively(texts, num_words):
    """Compare sharers of a run with the one before and the first; no hashes, no arrays."""
    words = [split_naively(text) for text in texts]
    grams = [list_runs(one, num_words) for one in words]
    size = min(5, num_words)
    sharers = defaultdict(list)
    for number, own in enumerate(grams):
        for run in set(own):
            sharers[run].append(number)
    pairs = {
        pair
        for numbers in sharers.values()
        for place in range(1, len(numbers))
        for pair in ((numbers[place - 1], numbers[place]), (numbers[0], numbers[place]))
        if words[pair[0]] != words[pair[1]]
    }
    compared = sorted({number for pair in pairs for number in pair})
    runs = {number: list_runs(words[number], size) for number in compared}
    shared_by = Counter(run for number in compared for run in set(runs[number]))

    def is_copy(i, j):
        if len(words[i]) > len(words[j]):
            i, j = j, i
        weights = [math.log(len(texts) + 1)] * len(words[i])
        held = [False] * len(words[i])
        for start, run in enumerate(runs[i]):
            for place in range(start, start + size):
                weight = math.log((len(texts) + 1) / shared_by[run])
                weights[place] = min(weights[place], weight)
                held[place] |= run in runs[j]
        covered = sum(weight for weight, shared in zip(weights, held, strict=True) if shared)
        return covered >= 0.6 * sum(weights) - 1e-9

    cluster = list(range(len(texts)))
    same = [(i, j) for j in range(len(texts)) for i in range(j) if is_same(texts, words, i, j)]
    for i, j in [pair for pair in pairs if is_copy(*pair)] + same:
        old, new = cluster[i], cluster[j]
        cluster = [new if c == old else c for c in cluster]
    names = {number: rank for rank, number in enumerate(dict.fromkeys(cluster))}
    return [names[number] for number in cluster]


def is_same(texts, words, i, j):
    return words[i] == words[j] if words[i] or words[j] else texts[i] == texts[j]


# Few words and few letters, so that runs are shared often.
WORDS = [
    "ab",
    "Ba",
    "aB,",
    "c1",
    "é",
    "É",
    "ß",
    "SS",
    "_",
    "-",
    "日本",
    "कि",
    "की",
    "a\u00adb",
    "e\u0301",
]
texts = st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), max_size=12)


@given(texts, st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_clusters_equal_the_naive_ones(documents, num_words):
    grams = WordGrams(documents, num_words=num_words)
    assert grams.cluster().tolist() == cluster_naively(documents, num_words)


@given(texts, st.integers(1, 5), st.data())
@settings(max_examples=100, deadline=None)
def test_overlap_equals_the_naive_one(documents, num_words, data):
    role = st.sampled_from(["control", "trained", ""])
    roles = np.array(data.draw(st.lists(role, min_size=len(documents), max_size=len(documents))))
    found = [find_grams(text, num_words) for text in documents]
    trained = set().union(*(g for g, r in zip(found, roles, strict=True) if r == "trained"))
    expected = sum(bool(g & trained) for g, r in zip(found, roles, strict=True) if r == "control")
    grams = WordGrams(documents, num_words=num_words)
    assert grams.count_overlap(roles == "control", roles == "trained") == expected


@given(texts, st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_parts_and_chunks_change_nothing(documents, num_words):
    whole = WordGrams(documents, num_words=num_words)
    half = np.arange(len(documents)) % 2 == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_MAX_GRAMS", 3)
        patch.setattr(duplicates, "_CHUNK_WORDS", 5)
        patch.setattr(duplicates, "_CACHED_DOCUMENTS", 1)
        parts = WordGrams(documents, num_words=num_words)
        cluster, overlap = parts.cluster(), parts.count_overlap(half, ~half)
    np.testing.assert_array_equal(cluster, whole.cluster())
    assert overlap == whole.count_overlap(half, ~half)


def draw_words(count, seed):
    return " ".join(f"w{n}" for n in np.random.default_rng(seed).integers(0, 5_000, count))


def count_copies(trained, others):
    cluster = WordGrams([*trained, *others]).cluster().tolist()
    return sum(number in cluster[: len(trained)] for number in cluster[len(trained) :])


@pytest.mark.quick
def test_chats_of_one_prompt_are_no_copies_and_edited_texts_are():
    prompt = draw_words(150, 1)
    chats = [f"{prompt} {draw_words(60, 10 + n)}" for n in range(40)]
    assert count_copies(chats[:25], chats[25:]) == 0
    texts = [draw_words(60, 100 + n) for n in range(30)]
    edited = [
        " ".join("new" if n in (7, 30) else w for n, w in enumerate(t.split())) for t in texts
    ]
    assert count_copies(texts[:20], edited[:10]) == 10
    assert count_copies(texts[:20], texts[20:]) == 0
    # A quotation of a third is no copy.
    quoting = [f"{draw_words(40, 200 + n)} {' '.join(texts[n].split()[:20])}" for n in range(10)]
    assert count_copies(texts, quoting) == 0


@pytest.mark.quick
def test_the_same_words_in_another_form_are_one_text():
    text = "Der Bär fraß die Äpfel, café für alle Gäste und noch dreizehn Wörter für später."
    forms = [
        text,
        unicodedata.normalize("NFD", text),
        "\u200b".join(text),
        "\u00ad".join(text),
        text.upper(),
        "> " + text.replace(" ", "\n> "),
        "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
    ]
    assert WordGrams(forms).cluster().tolist() == [0] * len(forms)
    # Different words, but the tokenizer has no others for them.
    assert WordGrams(["one", "two", "one"]).cluster(["7", "7", "8"]).tolist() == [0, 0, 0]


@pytest.mark.quick
def test_scripts_without_spaces_and_with_combining_marks():
    for first in (0x4E00, 0x3041, 0x0E01):
        clauses = np.random.default_rng(first).integers(first, first + 0x2D, (24, 10, 14))
        changed = clauses[:10].copy()
        changed[:, :, 5] = first + 0x2D  # One character of every clause.
        one, other = (
            ["，".join("".join(map(chr, clause)) for clause in text) for text in texts]
            for texts in (clauses, changed)
        )
        assert count_copies(one[:20], other) == 10
        assert count_copies(one[:20], one[20:]) == 0
    # Words that differ in vowel signs only.
    syllables = np.array(["कि", "की", "कु", "के", "कै", "को", "कौ", "मा", "मि", "मी", "मु", "मे", "नो"])
    draw = np.random.default_rng(0)
    letters = ["".join(draw.choice(syllables, 3)) for _ in range(45 * 20)]
    closing = " ".join("".join(draw.choice(syllables, 3)) for _ in range(12))
    texts = [" ".join([*letters[20 * n : 20 * n + 20], closing]) for n in range(45)]
    assert len(set(WordGrams(texts).cluster().tolist())) == 45


@pytest.mark.quick
def test_thirteen_words_join_and_twelve_do_not():
    others = [draw_words(30, 300 + n) for n in range(40)]
    words = draw_words(18, 2).split()
    for shared, copies in ((13, 1), (12, 0)):
        changed = " ".join(words[:shared] + [f"new{n}" for n in range(18 - shared)])
        assert count_copies([" ".join(words), *others], [changed]) == copies


def test_order_of_words_matters():
    documents = ["a b c d", "d c b a", "b a c d"]
    assert WordGrams(documents, num_words=4).cluster().tolist() == [0, 1, 2]


def test_no_documents_and_no_words():
    assert WordGrams([]).cluster().tolist() == []
    assert WordGrams(["", "!", "", "?"]).cluster().tolist() == [0, 1, 0, 2]
    nobody = np.zeros(0, dtype=bool)
    assert WordGrams([]).count_overlap(nobody, nobody) == 0


def test_a_million_words_take_seconds():
    words = np.random.default_rng(0).integers(0, 50_000, size=(2_000, 500))
    documents = [" ".join(f"w{w}" for w in row) for row in words]
    cluster = WordGrams(iter(documents)).cluster()
    np.testing.assert_array_equal(cluster, np.arange(2_000))


def test_real_documents(shared_data):
    from memguard.data.documents import document_text, load_documents

    file = shared_data / "text" / "documents.jsonl"
    loaded = load_documents([str(file)], setting="data.train", cache_dir=file.parent)
    documents = [document_text(document) for document in loaded.documents[:120]]
    documents.append("Quote: " + documents[5])
    cluster = WordGrams(documents).cluster()
    assert cluster[-1] == cluster[5]
    assert cluster.tolist() == cluster_naively(documents, 13)
