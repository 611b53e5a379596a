"""The vocabulary layer: the model's own loss, gradients and scores, a few tokens at a time."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from tiny_families import FAMILIES, VOCAB_SIZE, build
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from memguard.errors import ModelError
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm

pytestmark = pytest.mark.slow


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, shape, generator=generator)


def gradients(model: Any) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(grad.abs().max()) for grad in theirs.values())
    for name, grad in theirs.items():
        # fp32: other chunks mean another order of summation, so the last bits of the largest
        # gradient differ; a wrong term differs by tenths of it.
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=2e-6 * scale)


# HyperCLOVA X multiplies its logits by the field by which Granite divides.
@pytest.mark.parametrize("family", [*FAMILIES, "hyperclovax", "recurrent_gemma", "xlstm"])
def test_loss_and_gradients_are_those_of_the_models_own_logits(family: str) -> None:
    model = build(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = build_causal_lm(model, chunk_tokens=3)
    assert layer.own_head
    assert layer.vocab_size == model.config.vocab_size
    ids = random_ids(2, 9)
    kept = torch.rand(2, 8, generator=torch.Generator().manual_seed(1)) < 0.8
    labels_N = ids[:, 1:][kept]
    # use_cache=False, as we have it: with a cache, a window of 4 is another computation.
    logits = model(input_ids=ids, use_cache=False).logits
    theirs = functional.cross_entropy(logits[:, :-1][kept], labels_N, reduction="none")
    theirs.sum().backward()
    expected = gradients(model)
    for chunk_tokens in (3, 4096):
        layer.chunk_tokens = chunk_tokens
        ours = layer.token_terms(layer.hidden_states(ids)[:, :-1][kept], labels_N).nll_N
        # fp32: the head sees other shapes, so sums may be rounded otherwise.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert ours.dtype == torch.float32
        ours.sum().backward()
        assert_same_gradients(gradients(model), expected)
        total = layer.sum_nll(layer.hidden_states(ids)[:, :-1][kept], labels_N)
        torch.testing.assert_close(total, theirs.sum(), rtol=1e-5, atol=1e-5)
        total.backward()
        assert_same_gradients(gradients(model), expected)


def test_the_steps_after_the_head_are_visible_in_these_tests() -> None:
    # Else a family whose step is forgotten would pass.
    for family in ("gemma2", "cohere", "granite"):
        layer = build_causal_lm(build(family))
        hidden = layer.hidden_states(random_ids(1, 5))[0]
        raw = layer.model.get_output_embeddings()(hidden)
        assert (layer.logits(hidden) - raw).abs().max() > 0.3 * raw.abs().max()


@pytest.mark.parametrize("loss", ["sum_nll", "token_terms"])
def test_no_label_left_is_no_loss(loss: str) -> None:
    layer = build_causal_lm(build("llama"))
    hidden = layer.hidden_states(random_ids(1, 5))[0][:0]
    if loss == "sum_nll":
        total = layer.sum_nll(hidden, random_ids(0))
    else:
        total = layer.token_terms(hidden, random_ids(0)).nll_N.sum()
    total.backward()
    assert total.item() == 0
    assert all(
        not gradient.any() for name, gradient in gradients(layer.model).items() if "head" in name
    )
    scores = layer.token_scores(hidden, random_ids(0))
    assert scores.logprob_N.shape == scores.argmax_N.shape == scores.margin_N.shape == (0,)
    assert scores.argmax_N.dtype == torch.int64


@pytest.mark.parametrize("loss", ["sum_nll", "token_terms"])
def test_no_logits_are_kept_for_backward(loss: str) -> None:
    layer = build_causal_lm(build("llama"), chunk_tokens=4)
    hidden = layer.hidden_states(random_ids(1, 40))[0].detach().requires_grad_()
    saved = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        getattr(layer, loss)(hidden, random_ids(40))
    assert not [shape for shape in saved if VOCAB_SIZE in shape and len(shape) == 2]


class ScaledLlama(LlamaForCausalLM):
    """Multiplies its logits without saying so in its configuration."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


@pytest.mark.parametrize("scale", [0.2, 0.02])
def test_an_unknown_step_after_the_head_falls_back_and_is_right(scale: float) -> None:
    config = {**FAMILIES["llama"], "initializer_range": scale}
    torch.manual_seed(0)
    model = ScaledLlama(LlamaConfig(**config)).eval()
    with pytest.warns(UserWarning, match="ScaledLlama has an operation after its head"):
        layer = build_causal_lm(model, chunk_tokens=3)
    assert not layer.own_head
    ids = random_ids(2, 9)
    logits = model(input_ids=ids, use_cache=False).logits
    labels_N = ids[:, 1:].reshape(-1)
    theirs = functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB_SIZE), labels_N)
    theirs.backward()
    expected = gradients(model)
    hidden_N = layer.hidden_states(ids)[:, :-1].reshape(-1, VOCAB_SIZE)
    ours = layer.token_terms(hidden_N, labels_N).nll_N.mean()
    torch.testing.assert_close(
        layer.sum_nll(hidden_N, labels_N), theirs * len(labels_N), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    ours.backward()
    assert_same_gradients(gradients(model), expected)
    scores = layer.token_scores(layer.hidden_states(ids)[:, :-1].reshape(-1, VOCAB_SIZE), labels_N)
    torch.testing.assert_close(-scores.logprob_N.mean(), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_a_model_that_sees_ahead_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    with pytest.raises(ModelError, match=r"BertLMHeadModel is not a causal language model"):
        build_causal_lm(transformers.BertLMHeadModel(config))
    config.is_decoder = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its head is another story
        build_causal_lm(transformers.BertLMHeadModel(config))


def test_damaged_weights_are_not_taken_for_an_unknown_head() -> None:
    model = build("llama").eval()
    with torch.no_grad():
        model.base_model.norm.weight[0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build_causal_lm(model).own_head


@pytest.mark.parametrize("training", [False, True])
def test_building_leaves_mode_and_random_state_alone(training: bool) -> None:
    model = build("llama").train(training)
    state = torch.random.get_rng_state()
    build_causal_lm(model)
    assert model.training is training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_bf16_models_keep_their_own_head() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for family in ("llama", "gemma2", "cohere", "gpt2"):
            assert build_causal_lm(build(family).bfloat16()).own_head


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "gpt_neox"])
@pytest.mark.parametrize("chunk_tokens", [3, 4096])
def test_scores_are_those_of_the_logits(family: str, chunk_tokens: int) -> None:
    model = build(family)
    layer = build_causal_lm(model, chunk_tokens=chunk_tokens)
    ids = random_ids(3, 7)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].reshape(-1, VOCAB_SIZE)
        hidden = layer.hidden_states(ids)[:, :-1].reshape(len(logits), -1)
    labels = ids[:, 1:].reshape(-1)
    labels[::4] = logits[::4].argmax(1)
    scores = layer.token_scores(hidden, labels)
    logprobs = logits.double().log_softmax(1)
    expected = logprobs.gather(1, labels[:, None])[:, 0]
    # fp32 against fp64; log-probabilities are below 20 here.
    torch.testing.assert_close(scores.logprob_N.double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(scores.argmax_N, logits.argmax(1))
    ranked = logits.topk(2).values
    label_logit = logits.gather(1, labels[:, None])[:, 0]
    other = torch.where(labels == logits.argmax(1), ranked[:, 1], ranked[:, 0])
    torch.testing.assert_close(scores.margin_N, label_logit - other, rtol=0, atol=1e-5)
    assert ((scores.margin_N > 0) == (scores.argmax_N == labels)).all()
    assert not scores.logprob_N.requires_grad


class FixedHead(torch.nn.Module):
    """A head whose hidden states are the logits; enough of a model for `CausalLM`."""

    dtype = torch.float32

    def __init__(self, num: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(num, num, bias=False)
        self.head.weight.data = torch.eye(num)
        self.config = LlamaConfig(vocab_size=num)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head


@pytest.mark.quick
def test_ties_go_to_the_lowest_id_with_margin_zero() -> None:
    layer = CausalLM(FixedHead(4))
    logits = torch.tensor([[1.0, 3, 3, 0], [1, 3, 3, 0], [2, 2, 2, 2], [0, 1, 2, 3]])
    scores = layer.token_scores(logits, torch.tensor([1, 2, 3, 0]))
    assert scores.argmax_N.tolist() == [1, 1, 0, 3]
    assert scores.margin_N.tolist() == [0, 0, 0, -3]
    torch.testing.assert_close(
        scores.logprob_N, logits.log_softmax(1)[range(4), [1, 2, 3, 0]], rtol=0, atol=1e-6
    )


@pytest.mark.quick
def test_tied_and_end_of_text_tokens_are_not_above_a_label() -> None:
    layer = CausalLM(FixedHead(6))
    layer.model.config.eos_token_id = [5]
    # Of the ties none is above; in the third row the margin decides; the last has NaN.
    logits = torch.tensor(
        [
            [1.0, 1, 1, 0, 2, 9],
            [1, 1, 1, 1, 1, 1],
            [1.25, 1, 1.5, 1.25, 0, 0],
            [2, torch.nan, 1, 3, 4, 5],
        ]
    )
    labels, needs = torch.tensor([1, 5, 1, 2]), frozenset({"rank"})
    for choices in (True, False):
        for margin, third in ((0.0, 4), (0.25, 2)):
            scores = layer.token_scores(logits, labels, needs, choices=choices, rank_margin=margin)
            assert scores.rank_N.tolist() == [2, 1, third, 1]


def test_scores_of_bf16_hidden_states_use_an_fp32_head() -> None:
    layer = build_causal_lm(build("gpt_neox").bfloat16())
    hidden = layer.hidden_states(random_ids(1, 20))[0].detach()
    assert hidden.dtype == torch.bfloat16
    labels = random_ids(20, seed=3)
    head = layer.model.get_output_embeddings()
    logits = hidden.double() @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    # Autocast, which training uses, must not reach the scores.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = layer.token_scores(hidden, labels)
    expected = logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
    # fp32 sums of 32 products; a head in bf16 is off by hundredths.
    torch.testing.assert_close(scores.logprob_N.double(), expected, rtol=0, atol=1e-5)
    bf16 = layer.logits(hidden).double().log_softmax(1).gather(1, labels[:, None])[:, 0]
    assert (bf16 - expected).abs().max() > 1e-3


def test_a_body_that_is_not_under_its_prefix() -> None:
    model = build("llama4_text")
    assert model.base_model is model
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        layer = build_causal_lm(model)
    assert layer.own_head
