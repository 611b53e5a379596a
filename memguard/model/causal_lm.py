"""A causal LM as hidden states plus a head that is applied to selected tokens only.

hidden_BTD [B, T, D/y]   last hidden states of B packed rows of T tokens
hidden_ND  [N, D/y]      the selected positions, whose label is not ignored
labels_N   [N]           the token that follows each position

On a mesh, `CausalLM` is the root of the FSDP units. Code that reads hidden states or the head runs
inside one call of it, ``lm(work)``, around which weights are gathered. Collectives: see `loss` and
`linear`. A model that another program trains has no mesh: ranks may each have a copy of it, or its
shards, which its own root gathers (see `fsdp_root`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from memguard.config.settings import SamplingScheme
from memguard.mitigation import TokenTerms
from memguard.model.fsdp_root import FsdpRoot
from memguard.model.lm_head import Head, Step, WideWeight, apply_logit_transforms, count_free_bytes
from memguard.model.loss import sum_nll, token_terms
from memguard.model.next_token import BestTokens, DrawnTokens, draw_tokens, find_best
from memguard.model.router_loss import (
    FLAG,
    RouterLoss,
    check_recorded,
    find_router_loss,
    has_flag,
    takes_flag,
)
from memguard.model.token_scores import TokenScores, score_tokens
from memguard.parallel.attention import prepare_attention
from memguard.parallel.attention_pieces import Packing
from memguard.parallel.collectives import all_reduce
from memguard.parallel.layout import ShardSlice, cut
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Axis, Mesh4D
from memguard.parallel.shard import HeadLinear
from memguard.runtime import Runtime

Result = TypeVar("Result")
Item = TypeVar("Item")

# Operations of some families between head and loss, by the configuration field that sets them.
# Gemma 2/3, RecurrentGemma and xLSTM cap the logits, Cohere multiplies them, Granite divides them.
_CAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_AFTER_HEAD: dict[str, Callable[[Tensor, float], Tensor]] = {
    **dict.fromkeys(_CAP_FIELDS, lambda logits, cap: torch.tanh(logits / cap) * cap),
    "logit_scale": lambda logits, scale: logits * scale,
    "logits_scaling": lambda logits, scale: logits / scale,
}
# Families in which a field of this name is another operation.
_AFTER_HEAD_OF_FAMILY: dict[str, dict[str, Callable[[Tensor, float], Tensor]]] = {
    "hyperclovax": {"logits_scaling": lambda logits, scale: logits * scale}
}

# Share of free memory that gathered weights may use; the rest is for keys, values and logits.
_GATHERED_SHARE = 0.7


class CausalLM(nn.Module):
    """A causal LM as hidden states plus a head, on one process or on a mesh."""

    def __init__(
        self,
        model: Any,
        *,
        chunk_tokens: int = 1024,
        own_head: bool = True,
        mesh: Mesh4D | None = None,
        compute_dtype: torch.dtype | None = None,
        device_type: str | None = None,
        peers: Runtime | None = None,
        root: FsdpRoot | None = None,
    ) -> None:
        """Wrap ``model``; use `build_causal_lm`, which checks that the result is correct.

        Args:
            model: a Hugging Face causal LM, plain or sharded.
            chunk_tokens: tokens whose logits exist at a time.
            own_head: False runs the model's own forward and treats its logits as hidden states.
            mesh: the mesh over which the model is sharded; None for a plain model.
            compute_dtype: dtype of its matmuls; None uses the weights' dtype.
            device_type: type of the device on which it will run, which chooses its attention
                kernel; None: that of its weights.
            peers: this rank, of several that have the model without a mesh and split each batch;
                None for one process.
            root: gathers the weights that another program has sharded.
        """
        super().__init__()
        self.model = model
        self.attention = prepare_attention(model, device_type or self.device.type)
        self.chunk_tokens = chunk_tokens
        self.own_head = own_head
        self.mesh = mesh
        self._peers, self._root = peers, root
        self.freed_units: list[FSDPModule] = []
        """Units whose gathered weights are freed after their forward; set by `wrap_fsdp`."""
        self.cached_lengths: dict[tuple[int, int], bool] = {}
        """Shortest and longest texts for which keys and values were checked, and whether they can
        be cached; the same on every rank. It depends on the architecture, not on the weights."""
        self._keeps_gathered = False
        self._wide_head: WideWeight | None = None
        self.compute_dtype: torch.dtype = compute_dtype or model.dtype
        self._router_loss = find_router_loss(model)
        self._sets_flag = has_flag(model) and takes_flag(model)
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        steps = {**_AFTER_HEAD, **_AFTER_HEAD_OF_FAMILY.get(config.model_type, {})}
        self._logit_transforms: tuple[Step, ...] = tuple(
            (step, float(getattr(config, field)))
            for field, step in steps.items()
            if getattr(config, field, None) is not None
        )

    @property
    def device(self) -> torch.device:
        """Device of the LM head's weights."""
        device: torch.device = self.model.get_output_embeddings().weight.device
        return device

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids at which `generate` would end a text, lowest first; empty if the model has none."""
        settings = getattr(self.model, "generation_config", None) or self.model.config
        setting = getattr(settings, "eos_token_id", None)
        ids = [setting] if isinstance(setting, int) else setting or []
        return tuple(sorted({int(id) for id in ids if 0 <= int(id) < self.vocab_size}))

    @property
    def router_loss(self) -> RouterLoss | None:
        """Load-balancing loss that the configuration makes part of training; None: no such loss."""
        return self._router_loss if self.own_head else None

    @property
    def num_batch_ways(self) -> int:
        """Number of parts into which the rows of a batch are split."""
        if self.mesh is not None:
            return self.mesh.shape.num_batch_ways
        return 1 if self._peers is None else self._peers.world_size

    @property
    def has_peers(self) -> bool:
        """Whether other ranks take part in a batch and wait if this one fails."""
        return self.mesh is not None or self.num_batch_ways > 1

    @property
    def batch_rank(self) -> int:
        """Index of this rank's part."""
        if self.mesh is not None:
            return self.mesh.batch_rank
        return 0 if self._peers is None else self._peers.rank

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each value over all ranks that hold a part of the model."""
        if self.mesh is not None:
            for name in ("x", "y"):
                values = all_reduce(values, self.mesh.axis(name), "max")
        return values

    def deal(self, items: Sequence[Item]) -> list[Item | None]:
        """Return this rank's items, padded with None to the same number on every rank.

        Ranks that process the same part of the batch get the same items.
        """
        ways = self.num_batch_ways
        mine = range(self.batch_rank, -(-len(items) // ways) * ways, ways)
        return [items[index] if index < len(items) else None for index in mine]

    def set_last_micro_batch(self, is_last: bool) -> None:
        """Set whether gradients are complete after the next backward.

        Until then gradients are reduced over z, because no rank could store all of them, but not
        over data.
        """
        if self.mesh is not None and self.mesh.shape.data > 1:
            assert isinstance(self, FSDPModule), "a sharded layer is the root of its units"
            self.set_requires_all_reduce(is_last)

    def __call__(self, work: Callable[[], Result]) -> Result:
        """Return ``work()``, see `forward`."""
        if self._root is not None:
            result: Result = self._root.run(work)
        else:
            result = super().__call__(work)
        if not torch.is_grad_enabled() and not self._keeps_gathered:
            self._reshard()
        return result

    def _reshard(self) -> None:
        """Free all gathered weights.

        FSDP2 keeps the weights gathered that backward needs first, or all of them. Without a
        backward, an optimizer or file created from the parameters would reference gathered tensors
        that the next forward discards.
        """
        if self._root is not None:
            self._root.reshard()
        if self.mesh is None:
            return
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def keep_gathered(self, *, fits: bool) -> Iterator[None]:
        """Gather weights over z once, in the first call inside the block, and free them at its end.

        For many short forwards without gradients, such as generating token by token. If they fit
        (`fits_gathered` on all ranks), the head is also widened once for all forwards. If not, each
        forward gathers the blocks one after the other; of another program's shards those of the
        root unit (embeddings and head) are kept.
        """
        if not fits and self._root is None:
            yield
            return
        assert not self._keeps_gathered, "blocks are not nested"
        for unit in self.freed_units:
            unit.set_reshard_after_forward(False, recurse=False)
        self._keeps_gathered = True
        self._wide_head = WideWeight() if fits else None
        try:
            yield
        finally:
            self._keeps_gathered, self._wide_head = False, None
            for unit in self.freed_units:
                unit.set_reshard_after_forward(True, recurse=False)
            self._reshard()

    def fits_gathered(self, *, reserved_bytes: int = 0) -> bool:
        """Return whether all weights gathered over z fit into this rank's free GPU memory.

        True without a mesh, with z of 1, and on the CPU, whose free memory is not measured. False
        if another program has sharded them, whose memory is its own. ``reserved_bytes`` are free
        now and will not be.
        """
        if self._root is not None:
            return False
        if self.mesh is None or self.mesh.shape.z == 1 or self.device.type != "cuda":
            return True
        needed = self.mesh.shape.z * sum(
            # Weights in NF4 are integers, which are gathered as they are stored.
            to_local(part).numel()
            * (self.compute_dtype if part.is_floating_point() else part.dtype).itemsize
            for part in self.model.parameters()
        )
        return needed <= _GATHERED_SHARE * (count_free_bytes(self.device) - reserved_bytes)

    def forward(self, work: Callable[[], Result]) -> Result:
        """Return ``work()``; the weights it reads are gathered while it runs."""
        return work()

    def hidden_states(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor | None = None,
        *,
        packing: Packing | None = None,
        mask_BT: Tensor | None = None,
        cache: Any = None,
        router_logits: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the last hidden states [B, T, D/y].

        Packed rows are passed without a cache, and with positions that restart at each document.
        transformers isolates their documents exactly only without an attention mask: with a mask of
        ones or the default cache they attend to each other.

        Args:
            input_ids_BT: tokens.
            position_ids_BT: position of each token; None counts from 0.
            packing: the documents of the rows, if there are several; without it, a GPU needs a
                mask of all pairs of tokens.
            mask_BT: only with a cache: True for the slots, old and new, that are visible.
            cache: only for rows of one document each, see `kv_cache`; stores the keys and values
                of these tokens, which attend to all of its slots.
            router_logits: only of a model with `router_loss`: receives those of each layer with
                experts, ``[B T, E]``.

        Raises:
            ModelError: no layer returns router logits.
        """
        body = _find_body(self.model) if self.own_head else self.model
        if cache is None or not cache.get_seq_length():
            # With an empty cache too: these tokens attend to each other only.
            arguments = self.attention.arguments(
                input_ids_BT, position_ids_BT, packing, compute_dtype=self.compute_dtype
            )
        else:
            arguments = {"attention_mask": mask_BT, "position_ids": position_ids_BT}
        if cache is not None:
            arguments["past_key_values"] = cache
        if self._sets_flag:
            # By their configuration such models record them in every forward.
            arguments = {**arguments, FLAG: router_logits is not None}
        output = body(input_ids=input_ids_BT, use_cache=cache is not None, **arguments)
        if router_logits is not None:
            router_logits += check_recorded(self.model, output.get("router_logits"))
        hidden: Tensor = output.last_hidden_state if self.own_head else output.logits
        # Blocks may be on several devices; the head is on the first.
        return hidden.to(self.device)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return the local logits [N, V/x] of N tokens; callers keep N small."""
        return self._with_head(
            lambda head, hidden: apply_logit_transforms(head.steps, head.logits(hidden)), hidden_ND
        )

    def sum_nll(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        """Return the sum of -log p(label) (nats, fp32), differentiable; see `loss.sum_nll`."""
        return self._with_head(lambda head, hidden: sum_nll(head, hidden, labels_N), hidden_ND)

    def token_terms(
        self, hidden_ND: Tensor, labels_N: Tensor, needs: frozenset[str] = frozenset({"nll"})
    ) -> TokenTerms:
        """Return differentiable terms of each label; see `loss.token_terms`."""
        return self._with_head(
            lambda head, hidden: token_terms(head, hidden, labels_N, needs), hidden_ND
        )

    @torch.no_grad()
    def token_scores(
        self,
        hidden_ND: Tensor,
        labels_N: Tensor,
        needs: frozenset[str] = frozenset(),
        *,
        choices: bool = True,
        schemes: Sequence[SamplingScheme] = (),
        rank_margin: float = 0.0,
    ) -> TokenScores:
        """Return scores of N labels, computed with the head in fp32; see `score_tokens`."""
        wanted: dict[str, Any] = {"needs": needs, "choices": choices, "schemes": schemes}
        # Greedy decoding suppresses end-of-text tokens.
        wanted |= {"rank_margin": rank_margin, "not_ranked": self.end_token_ids}
        return self._with_head(
            lambda head, hidden: score_tokens(head, hidden, labels_N, **wanted), hidden_ND
        )

    @torch.no_grad()
    def best_tokens(self, hidden_ND: Tensor, num: int) -> BestTokens:
        """Return the most likely next tokens, the head in fp32; see `next_token.find_best`."""
        return self._with_head(lambda head, hidden: find_best(head, hidden, num), hidden_ND)

    @torch.no_grad()
    def draw_tokens(
        self, hidden_ND: Tensor, uniform_N: Tensor, scheme: SamplingScheme
    ) -> DrawnTokens:
        """Return drawn next tokens, the head in fp32; see `next_token.draw_tokens`."""
        return self._with_head(
            lambda head, hidden: draw_tokens(head, hidden, uniform_N, scheme), hidden_ND
        )

    def _with_head(self, work: Callable[[Head, Tensor], Result], hidden_ND: Tensor) -> Result:
        linear = self.model.get_output_embeddings()
        if isinstance(linear, HeadLinear):
            # FSDP2 hooks see only the inputs and outputs of a module's call.
            result: Result = linear(hidden_ND, lambda hidden: work(self._head(linear), hidden))
            return result
        return work(self._head(linear), hidden_ND)

    def _head(self, linear: Any) -> Head:
        if not self.own_head:
            return Head(weight_VD=None, vocab_size=self.vocab_size, chunk_tokens=self.chunk_tokens)
        x, y = Axis(name="x"), Axis(name="y")
        if self.mesh is not None:
            x, y = self.mesh.axis("x"), self.mesh.axis("y")
        whole = ShardSlice.whole((self.vocab_size,))
        return Head(
            weight_VD=to_local(linear.weight),
            bias_V=None if linear.bias is None else to_local(linear.bias),
            steps=self._logit_transforms,
            first_token=cut(whole, 0, x.rank, x.degree).start[0],
            vocab_size=self.vocab_size,
            vocab_axis=x,
            feature_axis=y,
            chunk_tokens=self.chunk_tokens,
            wide=self._wide_head,
        )


def _find_body(model: Any) -> Any:
    """Return the model without its head.

    Some families (Llama 4) give it by a prefix that only their models with images have.
    """
    body = model.base_model
    if body is not model:
        return body
    bodies = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return bodies[0] if len(bodies) == 1 else body
