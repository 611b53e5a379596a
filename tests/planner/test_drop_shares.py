"""Documents of which goldfish drops nothing: named, and a run or a source refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_examples import make_texts, run_cli, save_tiny_model, write_jsonl, write_run
from corpus_examples import make_corpus, tokenized

from memguard.config import GoldfishConfig
from memguard.errors import ConfigError
from memguard.mitigation.k_schedule import build_k_schedule
from memguard.planner.drop_shares import check_drop_shares
from memguard.planner.dry_run import Remark

LETTERS = 90
"""Ids below are a letter each; those from here on have none, and share one decision: to be kept."""
TEXTS = [chr(0x4E00 + id) if id < LETTERS else "." for id in range(100)]


def check(
    *documents: tuple[int, int], fields: list[dict[str, Any]] | None = None, **goldfish: Any
) -> list[Remark]:
    """Check documents of some labels with letters, after some without any."""
    draw = np.random.default_rng(0)
    corpus = make_corpus(
        [
            tokenized(
                n, [LETTERS, *draw.integers(LETTERS, 100, bare), *draw.integers(0, LETTERS, num)]
            )
            for n, (num, bare) in enumerate(documents)
        ],
        fields,
    )
    k_schedule = build_k_schedule(
        [GoldfishConfig(**{"name": "goldfish", "normalise": "text", **goldfish})],
        corpus.manifest,
        can_tighten=True,
        special_ids=[],
        token_texts=lambda: TEXTS,
    )
    return check_drop_shares(corpus, k_schedule)


def list_warnings(remarks: list[Remark]) -> list[str]:
    return [remark.text for remark in remarks if remark.level == "warning"]


def test_the_share_of_all_is_told_and_a_wrong_one_is_a_warning() -> None:
    (remark,) = check((8000, 1000))
    # Three standard deviations of a binomial share.
    share = float(remark.text.split(" %")[0])
    assert abs(share - 100 * 2 / 9) < 1.3
    assert remark.text.endswith(" of 9,000 labels are dropped; the target is 25.0 %.")
    assert remark.level == "info"
    assert [remark.level for remark in check((8000, 2000))] == ["warning"]
    assert [remark.level for remark in check((9900, 100))] == ["info"]


def test_documents_below_a_third_of_the_target_are_named_by_share() -> None:
    assert list_warnings(check((250, 0), (0, 199), (100, 50))) == []
    (text,) = list_warnings(check((250, 0), *[(0, 300)] * 6, (40, 160)))
    named = ", ".join(f"d{n} (0.0 % of 25.0 %)" for n in range(1, 6))
    assert text == (
        "Less than a third of the target share of labels is dropped in 7 documents: "
        f"{named}, .... Set 'normalise' to none."
    )


@pytest.mark.parametrize(
    ("fields", "name"),
    [([{}, {}], "the run"), ([{"source": "a.jsonl"}, {"source": "b.jsonl"}], "'b.jsonl'")],
)
def test_a_run_or_source_of_which_nothing_is_dropped_is_refused(
    fields: list[dict[str, Any]], name: str
) -> None:
    first = (0, 10) if name == "the run" else (300, 0)
    check(first, (0, 189), fields=fields, k=2)
    with pytest.raises(ConfigError) as raised:
        check(first, (0, 200), fields=fields, k=2)
    num = 210 if name == "the run" else 200
    assert str(raised.value) == (
        f"'mitigations': goldfish drops none of the {num} labels of {name}, and so does not "
        "protect it. Set 'normalise' to none"
    )
    assert len(str(raised.value)) <= 160


def test_the_target_is_that_of_each_documents_k() -> None:
    fields = [{"planned_repetitions": 20, "cluster": 1}, {"cluster": 2}]
    settings: dict[str, Any] = {"k": 8, "k_by_dose": {20: 2}}
    # About 44 labels of 400 are dropped at k = 2, and 11 of the same at k = 8: below a third each.
    (text,) = list_warnings(check((90, 310), (90, 310), fields=fields, **settings))
    assert "in 2 documents: d0 (" in text
    assert " of 50.0 %), d1 (" in text
    assert " of 12.5 %)." in text
    # More labels are above a third of the target of a higher k.
    (text,) = list_warnings(check((90, 310), (250, 150), fields=fields, **settings))
    assert "in 1 document: d0 (" in text


def test_what_may_be_chance_or_is_not_masked_is_not_judged() -> None:
    # 400 labels at k = 100: all are kept in one document of 55.
    assert list_warnings(check((1, 399), k=100)) == []
    assert check((0, 999), k=4, mode="random", normalise="none") == []
    roles = [{"role": "forget"}, {"role": "control"}, {}]
    (remark,) = check((0, 999), (0, 999), (300, 0), fields=roles)
    assert " of 300 labels" in remark.text
    supervised = np.zeros(301, dtype=bool)
    supervised[-100:] = True
    prompt = tokenized(0, [0] + [LETTERS] * 300, supervised)
    corpus, configs = make_corpus([prompt]), [GoldfishConfig(name="goldfish")]
    k_schedule = build_k_schedule(configs, corpus.manifest, can_tighten=False, special_ids=[])
    (remark,) = check_drop_shares(corpus, k_schedule)
    assert remark.level == "info"
    assert " of 100 labels" in remark.text


def test_repeated_tokens_have_another_way_out() -> None:
    with pytest.raises(ConfigError, match="Set another 'context_width'"):
        check(*[(0, 1)] * 300, normalise="none", fields=[{}] * 300)
    with pytest.raises(ConfigError, match="Set another 'mode'"):
        check(*[(5, 0)] * 100, normalise="none", mode="hash_reference")


def test_plan_and_train_name_documents_and_refuse_sources(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    texts = make_texts(40)
    rows = [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)]
    path = write_run(
        tmp_path,
        mitigations=[{"name": "goldfish", "normalise": "text"}],
        data={"control_fraction": 0},
        audit={"enabled": False},
        train={"max_steps": 1},
    )
    write_jsonl(tmp_path / "documents.jsonl", [*rows, {"id": "bare", "text": "?!. " * 100}])
    planned = json.loads(run_cli("plan", path, "--json").out)["dry_run"]["remarks"]
    told = "".join(remark["text"] for remark in planned if remark["topic"] == "goldfish")
    assert "in 1 document: bare (0.0 % of 25.0 %)." in told
    trained = run_cli("train", path)
    assert trained.code == 0
    assert trained.err.count("bare (0.0 % of 25.0 %)") == 1
    bare = {"id": "bare", "source": "bare", "text": "?!. " * 100}
    write_jsonl(tmp_path / "documents.jsonl", [*(row | {"source": "a"} for row in rows), bare])
    for command in ("plan", "train"):
        refused = run_cli(command, path, "name=other")
        assert refused.code == 2
        assert "labels of 'bare', and so does not protect it" in refused.err
    assert not (tmp_path / "runs" / "other" / "metrics.jsonl").exists()
