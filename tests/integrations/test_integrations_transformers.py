"""Collator and losses in transformers' Trainer against memguard's own step, on the same rows."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trainer_program as program
import transformers
from plain_losses import reduce_plainly
from ranks import RankPool
from step_examples import make_batch, make_step

from memguard.config.mitigations import FocalConfig, GoldfishConfig
from memguard.data.loader import Batch
from memguard.errors import ConfigError
from memguard.integrations.transformers import GoldfishCollator, MitigatedLoss, goldfish_loss_func
from memguard.mitigation import build_mitigations
from memguard.model.checks import build_causal_lm
from memguard.records import IGNORE_LABEL

ROOT = Path(__file__).resolve().parents[2]
# fp32: two libraries sum in other orders; AdamW magnifies what differs from the second step on.
_SAME = 1e-5


def mask_rows(texts: list[list[int]], goldfish: Any) -> Batch:
    """The rows as memguard's loader makes them: padded on the right, position 0 without loss."""
    width = max(map(len, texts))
    input_ids = np.zeros((len(texts), width), dtype=np.int64)
    labels = np.full((len(texts), width), IGNORE_LABEL)
    document_ids = np.zeros((len(texts), width), dtype=np.int64)
    for row, text in enumerate(texts):
        ids = np.array(text)
        input_ids[row, : len(ids)] = ids
        masked = goldfish.mask_labels(ids, ids, generator=np.random.default_rng(0))
        labels[row, 1 : len(ids)] = masked[1:]
        document_ids[row, len(ids) :] = 1
    return make_batch(input_ids, labels, document_ids=document_ids)


def train_ourselves(*losses: Any) -> list[float]:
    layer = build_causal_lm(program.build_model())
    layer.model.train()
    goldfish = GoldfishConfig(name="goldfish", **program.GOLDFISH)
    step = make_step(layer, losses, optim=program.OPTIM, batch_size=program.NUM_ROWS)
    found, texts = [], program.draw_texts()
    masks = build_mitigations([goldfish], special_ids=[0, 1])
    for number in range(program.NUM_STEPS):
        rows = texts[number * program.NUM_ROWS : (number + 1) * program.NUM_ROWS]
        batch = mask_rows(rows, masks)
        result = step.run(batch, lr=program.OPTIM.lr, step=number + 1, first_sample=0)
        assert result.loss is not None
        found.append(result.loss)
    return found


@pytest.mark.parametrize(
    ("loss", "micro_batch", "accumulation"),
    [("model", 8, 1), ("model", 2, 4), ("function", 8, 1), ("function", 2, 4), ("focal", 2, 4)],
)
def test_the_trainer_has_our_losses(
    tmp_path: Path, loss: str, micro_batch: int, accumulation: int
) -> None:
    settings = [FocalConfig(name="focal", gamma=1.5)] if loss == "focal" else []
    theirs = program.train(tmp_path, micro_batch, accumulation, loss)
    assert theirs == pytest.approx(train_ourselves(*settings), rel=_SAME)


@pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("loss", "micro_batch", "accumulation"),
    [
        pytest.param("model", 8, 1, marks=pytest.mark.long),
        pytest.param("model", 2, 4, marks=pytest.mark.long),
        pytest.param("function", 8, 1, marks=pytest.mark.long),
        ("function", 2, 4),
    ],
)
def test_trl_has_our_losses(tmp_path: Path, loss: str, micro_batch: int, accumulation: int) -> None:
    theirs = program.train_by_trl(tmp_path, micro_batch, accumulation, loss)
    assert theirs == pytest.approx(train_ourselves(), rel=_SAME)


def train_on_a_rank(output: Path, micro_batch: int, accumulation: int) -> list[float]:
    """Train as one of the processes that torchrun starts, by what it leaves in the environment."""
    program.act_as_rank()
    return program.train(output, micro_batch, accumulation, "function")


def test_two_processes_have_our_losses(tmp_path: Path, ranks: RankPool) -> None:
    theirs = ranks(train_on_a_rank, 2, tmp_path, 1, 4)
    assert theirs[0] == theirs[1] == pytest.approx(train_ourselves(), rel=_SAME)


@pytest.mark.long
@pytest.mark.parametrize(("micro_batch", "accumulation"), [(4, 1), (1, 4)])
def test_two_processes_of_torchrun_have_our_losses(
    tmp_path: Path, micro_batch: int, accumulation: int
) -> None:
    result = tmp_path / "losses.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    requested = [program.__file__, str(result), str(micro_batch), str(accumulation), "function"]
    done = subprocess.run(
        [*command, *requested], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(result.read_text()) == pytest.approx(train_ourselves(), rel=_SAME)


def test_labels_are_dropped_wherever_a_text_stands() -> None:
    """Padded on either side, packed or alone, in any batch: the same labels are dropped."""
    texts = program.draw_texts()[:4]
    tokenizer = program.build_tokenizer()
    collator = GoldfishCollator(tokenizer, **program.GOLDFISH)
    goldfish = build_mitigations(
        [GoldfishConfig(name="goldfish", **program.GOLDFISH)], special_ids=[0, 1]
    )
    alone = []
    for text in texts:
        ids = np.array(text)
        labels = goldfish.mask_labels(ids, ids, generator=np.random.default_rng(0))
        labels[0] = IGNORE_LABEL
        alone.append(labels.tolist())
    assert any(IGNORE_LABEL in labels[1:] for labels in alone)
    for side in ("right", "left"):
        tokenizer.padding_side = side
        batch = collator([{"input_ids": text} for text in texts])
        for labels, mask, expected in zip(
            batch["labels"], batch["attention_mask"], alone, strict=True
        ):
            assert labels[mask == 1].tolist() == expected
            assert (labels[mask == 0] == IGNORE_LABEL).all()
    flat = transformers.DataCollatorWithFlattening()
    packed = GoldfishCollator(tokenizer, flat, **program.GOLDFISH)(
        [{"input_ids": text} for text in texts]
    )
    assert packed["labels"].tolist() == [[label for labels in alone for label in labels]]


def test_prompts_that_have_no_loss_keep_none() -> None:
    text = program.draw_texts()[0]
    labels = [IGNORE_LABEL] * 8 + text[8:]
    plain, part = (
        GoldfishCollator(program.build_tokenizer(), k=2, context_width=2)([features])["labels"][0]
        for features in ({"input_ids": text}, {"input_ids": text, "labels": labels})
    )
    # The mask is made of the tokens, whatever has loss.
    assert part[:8].tolist() == [IGNORE_LABEL] * 8
    assert part[8:].tolist() == plain[8:].tolist()


def test_eos_keeps_its_loss_where_it_is_padding_too() -> None:
    tokenizer = program.build_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    batch = GoldfishCollator(tokenizer, k=2)([{"input_ids": [5, 6, 1]}, {"input_ids": [5, 1]}])
    assert batch["labels"][0, 2] == 1
    assert batch["labels"][1].tolist() == [IGNORE_LABEL, 1, IGNORE_LABEL]


def test_batches_of_which_nothing_is_dropped_are_refused() -> None:
    tokenizer, rows = program.build_tokenizer(), [[{"input_ids": [id] * 21}] for id in range(2, 20)]

    def collate(row: Any, times: int) -> Any:
        collator = GoldfishCollator(tokenizer, k=2, context_width=2)
        return [collator(row) for _ in range(times)][-1]["labels"][0, 1:]

    # A text of one token has two contexts, which may both be kept.
    kept = next(row for row in rows if (collate(row, 1) == row[0]["input_ids"][0]).all())
    collate(kept, 9)
    with pytest.raises(ConfigError, match="drops none of the 200 labels of the documents"):
        collate(kept, 10)


def test_wrong_settings_are_told_by_name() -> None:
    tokenizer = program.build_tokenizer()
    with pytest.raises(ConfigError, match=r"goldfish\.k.: Input should be greater than"):
        GoldfishCollator(tokenizer, k=1)
    with pytest.raises(ConfigError, match=r"goldfish\.kk"):
        GoldfishCollator(tokenizer, kk=4)
    with pytest.raises(ConfigError, match="'k_by_dose' needs the number of repetitions"):
        GoldfishCollator(tokenizer, k_by_dose={16: 2})
    tokenizer.pad_token = None
    with pytest.raises(ConfigError, match="no padding token"):
        GoldfishCollator(tokenizer)
    with pytest.raises(ConfigError, match="returns no 'labels'"):
        GoldfishCollator(tokenizer, lambda _: {"input_ids": [[1, 2]]})([])
    with pytest.raises(ConfigError, match="Use GoldfishCollator"):
        MitigatedLoss([{"name": "goldfish"}])
    with pytest.raises(ConfigError, match="'neftune_noise_alpha'"):
        MitigatedLoss([{"name": "neftune"}])
    for name in ("ngram_penalty", "npo", "gradient_ascent"):
        with pytest.raises(ConfigError, match=f"'{name}' .* before training"):
            MitigatedLoss([{"name": name}])


@pytest.mark.parametrize(
    ("mitigations", "told"),
    [
        (
            [{"name": "focal"}, {"name": "label_smoothing"}],
            "focal and label_smoothing cannot be combined",
        ),
        (
            [{"name": "flooding"}, {"name": "loss_clipping"}],
            "flooding and loss_clipping cannot be combined",
        ),
        ([{"name": "focal"}, {"name": "focal", "gamma": 1}], "contains an entry twice"),
    ],
)
def test_what_a_run_refuses_together_is_refused_here(
    mitigations: list[dict[str, Any]], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        MitigatedLoss(mitigations)


@pytest.mark.parametrize("num_items", [None, 100, torch.tensor(100)])
def test_loss_and_gradient_equal_torch(num_items: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.randint(0, 11, (3, 7), generator=generator)
    labels[0, 2:5] = labels[2] = IGNORE_LABEL
    outputs = SimpleNamespace(logits=logits)
    loss = goldfish_loss_func(outputs, labels, num_items)
    (gradient,) = torch.autograd.grad(loss, logits)
    kept = int((labels[:, 1:] != IGNORE_LABEL).sum())
    expected = reduce_plainly(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), [])
    if num_items is not None:
        expected = expected * kept / 100
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)


def test_a_batch_without_labels_teaches_nothing() -> None:
    logits = torch.randn(2, 4, 5, requires_grad=True)
    labels = torch.full((2, 4), IGNORE_LABEL)
    loss = goldfish_loss_func(SimpleNamespace(logits=logits), labels)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()
