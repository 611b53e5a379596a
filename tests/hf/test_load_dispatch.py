"""A model that is spread over memory and disk says what it says in one place."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_families import build

from memguard.audit.passages import Passage, ScoreSelection
from memguard.audit.scoring import ModelScorer
from memguard.config.settings import SamplingScheme
from memguard.errors import ModelError
from memguard.hf.load import load_model, plan_devices
from memguard.model.checks import build_causal_lm

ASKED = ScoreSelection(
    needs=frozenset({"entropy", "variance_logprob"}), schemes=(SamplingScheme(top_k=5),)
)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    fields = {"num_hidden_layers": 4, "num_key_value_heads": 4, "pad_token_id": None}
    model = build("llama", vocab_size=61, tie_word_embeddings=request.param, **fields)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("folder", [False, True], indirect=True, ids=["untied", "tied"])
def test_blocks_on_disk_score_as_in_memory(folder: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    # Of about 190 kB, the embedding, the head and a block or two.
    places = plan_devices(config, dtype=torch.float32, max_memory={"cpu": "90KB"})
    assert "disk" in places.values()
    assert places["lm_head"] == "cpu"
    spread = load_model(str(folder), devices=places, offload_folder=str(tmp_path / "offload"))
    assert any(p.device.type == "meta" for p in spread.parameters())
    draw = np.random.default_rng(0)
    passages = [
        Passage(
            input_ids=draw.integers(0, 61, size).astype(np.int32),
            first_label=1,
            first_choice=size // 2,
        )
        for size in draw.integers(4, 64, 9)
    ]
    scorers = [
        ModelScorer(build_causal_lm(model), 128) for model in (load_model(str(folder)), spread)
    ]
    whole, parted = (scorer.score(passages, ASKED) for scorer in scorers)
    for one, other in zip(whole, parted, strict=True):
        # The same operations on the same numbers: exact.
        for name in ("logprob", "argmax", "margin", "entropy", "variance_logprob", "sampled"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("folder", [False], indirect=True)
def test_a_head_without_room_is_refused(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    with pytest.raises(ModelError, match="output embedding alone does not fit"):
        plan_devices(config, dtype=torch.float32, max_memory={"cpu": "1KB"})
