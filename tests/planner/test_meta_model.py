"""Models known by their configuration: against real ones, and by hand."""

from pathlib import Path

import pytest
from tiny_llama import TINY_LLAMA
from transformers import AutoConfig

from memguard.errors import ModelError
from memguard.hf.from_config import build_scratch_model, make_scratch_config
from memguard.hf.load import count_parameters
from memguard.planner.meta_model import describe_model, may_share_rows


def test_a_configuration_alone_has_the_parameters_of_its_model() -> None:
    for tied in (True, False):
        config = {**TINY_LLAMA, "tie_word_embeddings": tied}
        model = build_scratch_model(config, vocab_size=300, tokenizer=None, seed=0, attn=None)
        outline = describe_model(model.config, name="m")
        assert outline.num_parameters == count_parameters(model)
        assert outline.vocab_size == 300


def test_large_models_are_outlined_without_memory(shared_data: Path) -> None:
    path = shared_data / "hf_configs" / "meta-llama--Meta-Llama-3.1-405B_config.json"
    config = AutoConfig.from_pretrained(path)
    # By hand: q and o, k and v of 8 of 128 heads, three of the FFN, two norms; 126 blocks.
    width, ffn, lm = 16_384, 53_248, 128_256
    block = 2 * width**2 + 2 * width * width // 16 + 3 * width * ffn + 2 * width
    num_parameters = 126 * block + 2 * lm * width + width
    assert describe_model(config, name="m").num_parameters == num_parameters
    assert may_share_rows(config, None) is True


@pytest.mark.parametrize("is_tied", [True, False])
def test_large_matrices_without_the_embedding_are_quantised(is_tied: bool) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 512}
    config = AutoConfig.for_model(
        "llama", **sizes, num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=is_tied
    )
    # q and o, gate and up, the head; not k and v, which are small, and down of 96 columns.
    expected = 2 * 64 * 64 + 2 * 96 * 64 + (0 if is_tied else 512 * 64)
    assert describe_model(config, name="m").num_quantised == expected


def test_families_that_mix_documents_of_a_row_are_known_without_weights() -> None:
    llama = make_scratch_config(TINY_LLAMA, vocab_size=300, tokenizer=None)
    assert may_share_rows(llama, None) is True
    assert may_share_rows(AutoConfig.for_model("opt"), None) is False


def test_what_is_no_causal_model_is_refused() -> None:
    with pytest.raises(ModelError, match="'m' cannot be loaded as a causal language model"):
        describe_model(AutoConfig.for_model("clip"), name="m")
    with pytest.raises(ModelError, match="not a causal language model"):
        may_share_rows(AutoConfig.for_model("bert"), None)
