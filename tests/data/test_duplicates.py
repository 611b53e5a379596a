import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard.data import duplicates
from memguard.data.duplicates import WordGrams

pytestmark = pytest.mark.slow


def find_grams(text, num_words):
    words = "".join(c if c.isalnum() else " " for c in text.casefold()).split()
    if len(words) < num_words:
        return {tuple(words)} if words else {text}
    return {tuple(words[i : i + num_words]) for i in range(len(words) - num_words + 1)}


def cluster_naively(texts, num_words):
    """Join pairs until nothing changes; no hashes, no trees."""
    grams = [find_grams(text, num_words) for text in texts]
    cluster = list(range(len(texts)))
    for i in range(len(texts)):
        for j in range(i):
            if grams[i] & grams[j] and cluster[i] != cluster[j]:
                old, new = cluster[i], cluster[j]
                cluster = [new if c == old else c for c in cluster]
    names = {number: rank for rank, number in enumerate(dict.fromkeys(cluster))}
    return [names[number] for number in cluster]


# Few words and few letters, so that runs are shared often.
WORDS = ["ab", "Ba", "aB,", "c1", "é", "É", "ß", "SS", "_", "-", "日本"]
texts = st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), max_size=12)


@given(texts, st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_clusters_equal_the_naive_ones(documents, num_words):
    grams = WordGrams(documents, num_words=num_words)
    assert grams.cluster().cluster.tolist() == cluster_naively(documents, num_words)


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
        parts = WordGrams(documents, num_words=num_words)
        cluster, overlap = parts.cluster(), parts.count_overlap(half, ~half)
    np.testing.assert_array_equal(cluster.cluster, whole.cluster().cluster)
    assert overlap == whole.count_overlap(half, ~half)


@pytest.mark.quick
def test_thirteen_words_join_and_twelve_do_not():
    words = [f"w{i}" for i in range(40)]
    first = " ".join(words[:20])
    documents = [first, "x " + " ".join(words[7:20]) + " y", "z " + " ".join(words[8:20]) + " z"]
    assert WordGrams(documents).cluster().cluster.tolist() == [0, 0, 1]
    shouted = first.upper().replace(" ", "\n-- ")
    assert WordGrams([first, shouted]).cluster().cluster.tolist() == [0, 0]


def test_order_of_words_matters():
    documents = ["a b c d", "d c b a", "b a c d"]
    assert WordGrams(documents, num_words=4).cluster().cluster.tolist() == [0, 1, 2]


def test_boilerplate_joins_nothing_but_is_counted_and_copies_still_join():
    licence = " ".join(f"licence{i}" for i in range(15))
    documents = [f"{licence} own{i} words{i}" for i in range(51)] + ["x " + licence]
    documents += documents[:1] * 60
    clusters = WordGrams(documents, num_words=13).cluster()
    assert len(set(clusters.cluster.tolist())) == 52
    assert set(clusters.cluster[52:].tolist()) == {0}
    # Three windows of the licence; two that end in the words of document 0, now in 61 documents.
    assert clusters.num_boilerplate_grams == 5
    control = np.arange(len(documents)) == 51
    assert WordGrams(documents).count_overlap(control, ~control) == 1

    few = WordGrams(documents[:50], num_words=13).cluster()
    assert (set(few.cluster.tolist()), few.num_boilerplate_grams) == ({0}, 0)


def test_many_documents_may_share_half_a_percent():
    documents = [f"{'shared ' * 13 if i < 100 else ''}alone{i} " * 2 for i in range(20_000)]
    cluster = WordGrams(documents, num_words=13).cluster().cluster
    assert cluster[:100].max() == 0
    assert len(np.unique(cluster)) == 19_901
    documents[100] = "shared " * 13
    clusters = WordGrams(documents, num_words=13).cluster()
    assert clusters.num_boilerplate_grams == 1
    assert len(np.unique(clusters.cluster)) == 20_000


def test_no_documents_and_no_words():
    assert WordGrams([]).cluster().cluster.tolist() == []
    assert WordGrams(["", "!", "", "?"]).cluster().cluster.tolist() == [0, 1, 0, 2]
    nobody = np.zeros(0, dtype=bool)
    assert WordGrams([]).count_overlap(nobody, nobody) == 0


def test_a_million_words_take_seconds():
    words = np.random.default_rng(0).integers(0, 50_000, size=(2_000, 500))
    documents = [" ".join(f"w{w}" for w in row) for row in words]
    clusters = WordGrams(iter(documents)).cluster()
    np.testing.assert_array_equal(clusters.cluster, np.arange(2_000))


def test_real_documents(shared_data):
    from memguard.data.documents import document_text, load_documents

    file = shared_data / "text" / "documents.jsonl"
    loaded = load_documents([str(file)], setting="data.train", cache_dir=file.parent)
    documents = [document_text(document) for document in loaded.documents[:120]]
    documents.append("Quote: " + documents[5][300:900])
    cluster = WordGrams(documents).cluster().cluster
    assert cluster[-1] == cluster[5]
    assert cluster.tolist() == cluster_naively(documents, 13)
