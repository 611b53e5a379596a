"""What a forward and a backward pass send, recorded without sending it."""

import torch
from fake_mesh import Calls, SentCollectives, observe

from memguard.hf.assembly import AssembledModel, allocate


def record_forward_backward(
    layer: AssembledModel, *, num_rows: int, seq_len: int, sums_nll: bool = True
) -> Calls:
    """Record a forward and a backward pass of a layer from `build_meta_layer`."""
    lm = layer.lm
    sent = SentCollectives(lm.mesh, lm.model.config)
    with observe(sent):
        allocate(layer.lm, layer.assembly.device)
        lm.model.train()
        ids_BT = torch.zeros(num_rows, seq_len, dtype=torch.long)
        positions_BT = torch.arange(seq_len).expand(num_rows, seq_len)
        labels_N = torch.zeros(num_rows * (seq_len - 1), dtype=torch.long)

        def work() -> torch.Tensor:
            hidden_BTD = lm.hidden_states(ids_BT, positions_BT)
            hidden_ND = hidden_BTD[:, :-1].flatten(0, 1)
            if sums_nll:
                return lm.sum_nll(hidden_ND, labels_N)
            return lm.token_terms(hidden_ND, labels_N).nll_N.sum()

        lm(work).backward()
    return sent.calls
