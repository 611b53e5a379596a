"""Cells of the grid: their order, what they leave out, and that sharing a pass changes nothing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from audit_examples import Scripted, build_tiny_layer, cut, run_probes, say_by_context, say_known
from probe_examples import make_evidence, to_tables
from pydantic import ValidationError
from record_examples import make_document

from memguard.audit.passages import Passage, TokenResult
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.grid import GridCell, GridProbe
from memguard.audit.probes.window_scores import IN_A_WINDOW
from memguard.audit.scoring import ModelScorer
from memguard.audit.windows import Window


class Counting(ModelScorer):
    """Remembers how many passages and tokens it scored."""

    num_passages = num_tokens = 0

    def score(self, passages: Sequence[Passage], *more: Any, **fields: Any) -> list[TokenResult]:
        self.num_passages += len(passages)
        self.num_tokens += sum(len(passage.input_ids) for passage in passages)
        return super().score(passages, *more, **fields)


def _score(probes: Sequence[Any], scorer: ModelScorer, window: Window) -> dict[str, float]:
    """Return the numbers of one window by name; those of the main window without a prefix."""
    return {
        name if probe == "extraction" else f"{probe}.{name}": float(measured.columns[name][0])
        for probe, measured in run_probes(probes, scorer, [window]).items()
        for name in measured.columns.names
    }


def test_cells_are_all_combinations_offsets_outermost() -> None:
    probe = GridProbe(offsets=(0, 7), prefix_tokens=(1, 2), continuation_tokens=(3, 4))
    found = [(c.offset, c.prefix_tokens, c.continuation_tokens) for c in probe.cells]
    assert found == [(o, p, s) for o in (0, 7) for p in (1, 2) for s in (3, 4)]


@pytest.mark.parametrize(
    "fields", [{"offsets": (-1,)}, {"offsets": ()}, {"prefix_tokens": (0,)}, {"prefix_tokens": ()}]
)
def test_wrong_grids_are_refused(fields: dict) -> None:
    with pytest.raises(ValidationError):
        GridProbe(**fields)


def test_cells_reach_the_whole_of_a_text_longer_than_the_context() -> None:
    """The main window is that of the last context; cells lie anywhere, alone or in its pass."""
    layer = build_tiny_layer()
    ids = np.random.default_rng(0).integers(0, 61, 200).astype(np.int32)
    part = make_document(
        ids[-64:], first_position=136, whole_ids=ids, part="context", num_tokens=200
    )
    probe = ExtractionProbe(continuation_tokens=10)
    grid = GridProbe(offsets=(0, 136, 170, 195), prefix_tokens=(8, 60), continuation_tokens=(4,))
    (window,) = cut(probe, [part])
    scorer = Counting(layer, 512)
    found = _score([probe, grid], scorer, window)
    # The passes start at 0, at 136 with the main window's, and at 170.
    assert scorer.num_passages == 3
    for name, value in _score([probe], scorer, window).items():
        # fp32 sums in batches of another shape.
        assert found[name] == pytest.approx(value, abs=1e-4, nan_ok=True), name
    for index, cell in enumerate(grid.cells):
        end = cell.offset + cell.prefix_tokens + cell.continuation_tokens
        if end > 200:
            assert np.isnan(found[f"grid.{index}.logprob"])
            assert cell.window(part) is None
            continue
        text = make_document(ids[cell.offset : end])
        ask = ExtractionProbe(continuation_tokens=4, min_prefix_tokens=1)
        expected = _score([ask], scorer, *cut(ask, [text]))
        for name in IN_A_WINDOW:
            assert found[f"grid.{index}.{name}"] == pytest.approx(expected[name], abs=1e-4)
    longer = GridCell(offset=0, prefix_tokens=60, continuation_tokens=5)
    assert longer.window(part) is None, "65 tokens are more than the context"


def test_a_cell_fits_or_is_left_out() -> None:
    cell = GridCell(offset=3, prefix_tokens=4, continuation_tokens=5)
    window = cell.window(make_document(np.arange(12)))
    assert window.input_ids.tolist() == list(range(3, 12))
    assert window.continuation_ids.tolist() == list(range(7, 12))
    assert cell.window(make_document(np.arange(11))) is None
    # Where a conversation's answer begins is not for a grid to say.
    assert cell.window(make_document(np.arange(12), format="messages")) is None


def test_sharing_a_pass_changes_nothing() -> None:
    """Each cell as its own audit's window, against all of them in one."""
    draw = np.random.default_rng(3)
    documents = [make_document(draw.integers(0, 61, size)) for size in (64, 40, 33)]
    grid = GridProbe(offsets=(0, 9), prefix_tokens=(5, 16), continuation_tokens=(4, 15))
    scorer = ModelScorer(build_tiny_layer(), 256)
    probe = ExtractionProbe(continuation_tokens=8)
    for document in documents:
        found = _score([probe, grid], scorer, *cut(probe, [document]))
        for index, cell in enumerate(grid.cells):
            own = cell.window(document)
            if own is None:
                assert all(np.isnan(found[f"grid.{index}.{name}"]) for name in IN_A_WINDOW)
                continue
            alone = _score([probe], scorer, own)
            for name in IN_A_WINDOW:
                # Sums of 15 fp32 log-probabilities, each good to about 1e-6.
                assert found[f"grid.{index}.{name}"] == pytest.approx(alone[name], abs=1e-4)


def test_rows_of_each_cell_are_those_of_its_windows() -> None:
    draw = np.random.default_rng(0)
    main = ExtractionProbe(continuation_tokens=6)
    windows = [main.window(make_document(draw.integers(0, 90, size))) for size in range(14, 22)]
    grid = GridProbe(offsets=(0, 6), prefix_tokens=(3, 8), continuation_tokens=(4,))
    trained = run_probes([grid], Scripted(say_by_context), windows)
    base = run_probes([grid], Scripted(say_known(lambda ids: True)), windows)
    summary = grid.tabulate(make_evidence(windows, trained, base))
    tables = to_tables(summary)
    for cell in grid.cells:
        own = [window for w in windows if (window := cell.window(w.document))]
        logprobs, num_verbatim = [], 0
        for window in own:
            ids = window.input_ids
            said = [say_by_context(ids[: place + 1]) for place in range(len(ids))][-4:]
            logprobs.append(sum(each.logprob for each in said) / 4)
            num_verbatim += all(each.right for each in said)
        key = {
            "parameters": f"continuation_tokens=4, offset={cell.offset}, "
            f"prefix_tokens={cell.prefix_tokens}"
        }
        verbatim = tables.find("grid", "verbatim", "trained", **key)
        assert (verbatim.num_matched, verbatim.num_documents) == (num_verbatim, len(own))
        assert verbatim.num_missing == len(windows) - len(own)
        assert tables.find("grid", "logprob", "trained", **key).value == pytest.approx(
            np.mean(logprobs)
        )
        of_base = tables.find("grid", "verbatim", "trained", model="base", **key)
        assert of_base.num_matched == len(own)
        change = tables.find("grid", "verbatim", "trained", against="base", **key)
        assert change.value == pytest.approx((num_verbatim - len(own)) / len(own))
        assert tables.find_metric("grid", "verbatim", **key).settings == cell.model_dump()
    # The same metrics as those of the main window, but none is a risk.
    assert tables.risks("trained") == summary.matched == {}
    assert summary.num_items == len(windows)
    late = GridProbe(offsets=(90,))
    numbers = run_probes([late], Scripted(say_by_context), windows)
    summary = late.tabulate(make_evidence(windows, numbers))
    assert summary.num_items == 0
    assert summary.reason == "every document is an answer, or too short for its windows"


def test_cells_of_one_offset_are_one_passage() -> None:
    grid = GridProbe(offsets=(0, 9), prefix_tokens=(5, 16), continuation_tokens=(4, 15))
    main = ExtractionProbe(continuation_tokens=8)
    draw = np.random.default_rng(0)
    windows = [main.window(make_document(draw.integers(0, 61, size))) for size in (64, 40, 64)]
    scorer = Counting(build_tiny_layer(), 256)
    run_probes([grid], scorer, windows)
    # Two offsets of three texts, 31 tokens each.
    assert (scorer.num_passages, scorer.num_tokens) == (6, 186)
