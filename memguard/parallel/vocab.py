"""The vocabulary layer: per-token loss and scores without a [tokens, vocabulary] tensor.

hidden_BTD [B, T, D]   last hidden states of B packed rows of T tokens
hidden_ND  [N, D]      the rows that count: positions whose label is ignored never get here
labels_N   [N]         the token that follows each of them

forward    logits_CV = steps(hidden_CD @ W.T + b)  for chunks of C tokens;  V = vocabulary
           nll_C = logsumexp(logits_CV) - logits_CV[label]      (natural log, fp32)
backward   each chunk's logits are computed again, so at most [C, V] exists at a time
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memguard.errors import ModelError
from memguard.seeds import derive_generator

_PROBE_ROWS, _PROBE_TOKENS = 2, 16

# What some families do between the head and the loss, by the configuration field that says so.
# Gemma 2/3 cap the logits, Cohere multiplies, Granite divides.
_AFTER_HEAD: dict[str, Callable[[Tensor, float], Tensor]] = {
    "final_logit_softcapping": lambda logits, cap: torch.tanh(logits / cap) * cap,
    "logit_scale": lambda logits, scale: logits * scale,
    "logits_scaling": lambda logits, scale: logits / scale,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """What the model says of N tokens, computed in fp32."""

    logprob_N: Tensor
    """Log-probability of the label (nats)."""
    argmax_N: Tensor
    """Most likely token, the lowest id where several tie."""
    margin_N: Tensor
    """Logit of the label minus that of the best other token; 0 where they tie."""


class VocabLayer:
    """A causal LM seen as hidden states plus a head that is applied to chosen tokens only."""

    def __init__(self, model: Any, *, chunk_tokens: int = 4096, own_head: bool = True) -> None:
        """Wrap ``model``; use `build_vocab_layer`, which checks that the result is right.

        Args:
            model: a Hugging Face causal LM.
            chunk_tokens: tokens whose logits exist at a time.
            own_head: False runs the model's own forward and treats its logits as hidden states.
        """
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.own_head = own_head
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._steps = [
            (step, float(getattr(config, field)))
            for field, step in _AFTER_HEAD.items()
            if getattr(config, field, None) is not None
        ]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.get_output_embeddings().weight.device
        return device

    def hidden_states(self, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
        """Return the last hidden states [B, T, D].

        Rows go in without an attention mask and without a cache, and with positions that start
        again at each document: the only form in which transformers keeps documents of a packed
        row apart exactly (a mask of ones or the default cache lets them see each other).
        """
        body = self.model.base_model if self.own_head else self.model
        output = body(
            input_ids=input_ids_BT,
            position_ids=position_ids_BT,
            attention_mask=None,
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state if self.own_head else output.logits
        return hidden

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return the logits [N, V] of a few tokens; callers keep N small."""
        if not self.own_head:
            return hidden_ND
        head: nn.Linear = self.model.get_output_embeddings()
        logits: Tensor = head(hidden_ND)
        for step, value in self._steps:
            logits = step(logits, value)
        return logits

    def token_nll(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        """Return -log p(label) [N] (nats, fp32), differentiable in ``hidden_ND`` and the head."""

        def chunk_nll(hidden_CD: Tensor, labels_C: Tensor) -> Tensor:
            return functional.cross_entropy(
                self.logits(hidden_CD).float(), labels_C, reduction="none"
            )

        if len(labels_N) <= self.chunk_tokens:
            return chunk_nll(hidden_ND, labels_N)
        pieces = [
            checkpoint(chunk_nll, hidden_CD, labels_C, use_reentrant=False)
            for hidden_CD, labels_C in zip(
                torch.split(hidden_ND, self.chunk_tokens),
                torch.split(labels_N, self.chunk_tokens),
                strict=True,
            )
        ]
        return torch.cat(pieces)

    @torch.no_grad()
    def token_scores(self, hidden_ND: Tensor, labels_N: Tensor) -> TokenScores:
        """Return log-probability, argmax and margin of N labels; the head runs in fp32."""
        device_type = hidden_ND.device.type
        parts = []
        with torch.autocast(device_type, enabled=False):
            for hidden_CD, labels_C in zip(
                torch.split(hidden_ND, self.chunk_tokens),
                torch.split(labels_N, self.chunk_tokens),
                strict=True,
            ):
                logits_CV = self._logits_fp32(hidden_CD)
                label_logit_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
                logprob_C = label_logit_C - logits_CV.logsumexp(1)
                # CUDA's argmax picks any of several equal maxima; the lowest id is the same
                # everywhere.
                best_C = logits_CV.amax(1, keepdim=True)
                argmax_C = (logits_CV == best_C).int().argmax(1)
                others_CV = logits_CV.scatter(1, labels_C[:, None], -torch.inf)
                parts.append((logprob_C, argmax_C, label_logit_C - others_CV.amax(1)))
        if not parts:
            empty = torch.empty(0, device=hidden_ND.device)
            return TokenScores(logprob_N=empty, argmax_N=empty.long(), margin_N=empty)
        logprob, argmax, margin = (torch.cat(column) for column in zip(*parts, strict=True))
        return TokenScores(logprob_N=logprob, argmax_N=argmax, margin_N=margin)

    def _logits_fp32(self, hidden_CD: Tensor) -> Tensor:
        if not self.own_head:
            return hidden_CD.float()
        head = self.model.get_output_embeddings()
        bias = None if head.bias is None else head.bias.float()
        logits: Tensor = functional.linear(hidden_CD.float(), head.weight.float(), bias)
        for step, value in self._steps:
            logits = step(logits, value)
        return logits


def build_vocab_layer(model: Any, *, chunk_tokens: int = 4096) -> VocabLayer:
    """Wrap a model after comparing our logits with its own forward on 2 x 16 random tokens.

    A family that does something between head and loss that `_AFTER_HEAD` does not know falls back
    to its own forward (all logits at once), with a warning.
    """
    layer = VocabLayer(model, chunk_tokens=chunk_tokens)
    ids = _probe_ids(layer)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits.float()
            try:
                ours = layer.logits(layer.hidden_states(ids)).float()
                same = ours.shape == expected.shape and torch.allclose(
                    # The same operations on the same numbers: only a head that sees other shapes
                    # may round differently, by the last bits of the model's dtype.
                    ours,
                    expected,
                    rtol=1e-2 if model.dtype != torch.float32 else 1e-4,
                    atol=1e-2 * float(expected.abs().max())
                    if model.dtype != torch.float32
                    else 1e-4,
                    # Damaged weights are told where a loss is measured.
                    equal_nan=True,
                )
            except (AttributeError, TypeError):
                same = False
        if not same:
            layer = VocabLayer(model, chunk_tokens=chunk_tokens, own_head=False)
        _check_causal(layer, ids)
    finally:
        model.train(training)
    if same:
        return layer
    warnings.warn(
        f"{type(model).__name__} does something after its head that memguard does not know: using "
        "its own forward, which needs memory for all logits at once.",
        stacklevel=2,
    )
    return layer


@torch.no_grad()
def _check_causal(layer: VocabLayer, ids_BT: Tensor) -> None:
    """Refuse a model that sees the tokens it is asked for: it would recite anything."""
    half = ids_BT.shape[1] // 2
    other_BT = ids_BT.clone()
    other_BT[:, half:] = (other_BT[:, half:] + 1) % layer.vocab_size
    before, after = (layer.hidden_states(ids)[:, :half].float() for ids in (ids_BT, other_BT))
    # The median: an expert chosen by a hair may change at single tokens, sight ahead changes all.
    change = float((before - after).abs().amax(-1).median())
    if change >= _tolerance(before, layer):
        raise ModelError(
            f"{type(layer.model).__name__} is no causal language model: what it says of a token "
            "depends on later ones. Encoders (BERT and the like) can be neither fine-tuned nor "
            "audited here."
        )


def _tolerance(hidden: Tensor, layer: VocabLayer) -> float:
    """Return what hidden states differ by at most where nothing leaks.

    Leaks change them by tenths; another order of summation by the dtype's last bits.
    """
    scale = float(hidden.abs().max()) or 1.0
    return scale * (1e-4 if layer.model.dtype == torch.float32 else 3e-2)


@torch.no_grad()
def keeps_documents_apart(layer: VocabLayer) -> bool:
    """Tell whether this model, as it is, keeps two documents of one packed row apart.

    Compares the hidden states of two documents packed into one row with those of each alone.
    """
    ids = _probe_ids(layer)
    training = layer.model.training
    layer.model.eval()
    try:
        alone = layer.hidden_states(ids).float()
        positions = torch.arange(_PROBE_TOKENS, device=ids.device).repeat(_PROBE_ROWS)[None]
        packed = layer.hidden_states(ids.reshape(1, -1), positions).reshape(alone.shape).float()
    finally:
        layer.model.train(training)
    return float((alone - packed).abs().max()) < _tolerance(alone, layer)


def _probe_ids(layer: VocabLayer) -> Tensor:
    draw = derive_generator(0, "probe tokens")
    ids = draw.integers(0, layer.vocab_size, (_PROBE_ROWS, _PROBE_TOKENS))
    return torch.from_numpy(ids).to(layer.device)
