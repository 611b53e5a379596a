"""DP-SGD: the gradient of each row clipped, noise on their sum, and what its epsilon covers.

    g_r   gradient of the mean loss of row r
    step  (sum over rows of g_r min(1, C / |g_r|)  +  N(0, (sigma C)^2)) / rows of the step

Abadi et al., arXiv 1607.00133, as commonly known; the paper was not read for this. One backward a
row: opacus takes per-sample gradients by hooks on modules, and the head here is not called as one:
`causal_lm` reads its weight and computes logits of chosen tokens only, in chunks. So a step takes
as many passes as it has rows; it is exact, and meant for small models. epsilon is opacus' (RDP).

What is protected is a ROW, one piece of one document, against being replaced by an empty one:

    epsilon             of the run's own schedule. A row is in E steps, the same ones whatever it
                        says: E Gaussian mechanisms, and no help from sampling
    epsilon_if_sampled  as papers give it: as if every step drew its rows anew, each with
                        probability E / steps (Poisson). This run does not; to compare with
                        papers. Mostly the smaller one, but not with little noise and few steps

Neither covers: a document that was cut into several pieces, or of which there are copies; what was
chosen by looking at the documents (tokenizer, packing, held-back clusters, learning rate); what the
model knew before; the losses, the audit and its report, which are made of the documents. The noise
is drawn from a secret key of the run's folder, never from its seed, which everybody may read: 128
bits of it a step, the same numbers on every device. Who holds that folder can take the noise off
again. The generator (Philox) is no cryptographic one, and noise and sums are fp32, whose rounding
no epsilon covers. 'optim.max_grad_norm' then clips the noisy mean as it clips any gradient; that
costs no privacy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.config.mitigations import DpSgdConfig
from memguard.errors import ConfigError
from memguard.parallel.local_parameters import LocalParameter, clear_gradients
from memguard.seeds import derive_secret_generator


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivacySpent:
    """The privacy loss of a run; both figures at the same delta."""

    epsilon: float
    epsilon_if_sampled: float
    delta: float

    def describe(self) -> str:
        """Return the line for a log."""
        return (
            f"epsilon {self.epsilon:.3g} at delta {self.delta:g} for a row (as if rows had been "
            f"sampled: {self.epsilon_if_sampled:.3g}); it covers neither copies nor other pieces "
            "of a document, nor what the model knew before"
        )


class RowClipping:
    """Takes the gradients of one row after the other, and gives their noisy mean."""

    def __init__(self, config: DpSgdConfig, *, noise_seed: int) -> None:
        """Prepare.

        Args:
            config: clipping norm and noise.
            noise_seed: a secret of 128 bits or more.
        """
        self.config, self._noise_seed = config, noise_seed
        self._sums: dict[str, Tensor] = {}

    def add_row(self, parameters: Sequence[LocalParameter]) -> None:
        """Clip the gradients that a row's backward has left, add them up and clear them.

        Args:
            parameters: of a model on one process.
        """
        gradients = {
            each.name: each.local.grad for each in parameters if each.local.grad is not None
        }
        if not gradients:
            return
        norm = torch.stack([each.double().norm() for each in gradients.values()]).norm()
        scale = (self.config.max_grad_norm / norm).clamp(max=1.0)
        for name, gradient in gradients.items():
            clipped = gradient * scale.to(gradient.dtype)
            self._sums[name] = self._sums[name] + clipped if name in self._sums else clipped
        clear_gradients(parameters)

    def put_mean(self, parameters: Sequence[LocalParameter], *, step: int, num_rows: int) -> None:
        """Leave the noisy mean as the parameters' gradients, and begin anew.

        Args:
            parameters: of a model on one process.
            step: number of the step, which has its own noise.
            num_rows: rows of the step, with or without labels.
        """
        deviation = self.config.noise_multiplier * self.config.max_grad_norm
        # torch's generator would not do: on a CPU it looks at 32 bits of a seed.
        generator = derive_secret_generator(self._noise_seed, "dp noise", step)
        for each in parameters:
            local = each.local
            drawn = generator.standard_normal(tuple(local.shape), dtype=np.float32)
            noise = torch.from_numpy(drawn).to(local)
            local.grad = (self._sums.get(each.name, 0) + deviation * noise) / num_rows
        self._sums = {}


def compute_privacy(
    config: DpSgdConfig, fed: NDArray[np.int64], *, batch_size: int
) -> PrivacySpent:
    """Return what a run has spent on the row that it was spent on most.

    Args:
        config: noise and delta.
        fed: ``[num_samples]`` row of each sample that was trained.
        batch_size: rows of a step.

    Raises:
        ConfigError: opacus is not installed.
    """
    pairs, times = np.unique(
        np.stack([fed, np.arange(len(fed)) // batch_size]), axis=1, return_counts=True
    )
    # Where one epoch ends and the next begins a step may hold a row twice: it can move the sum
    # twice as far, which costs as much as four steps.
    num_mechanisms = int(np.bincount(pairs[0], weights=times**2).max())
    num_steps = -(-len(fed) // batch_size)
    rate = min(int(np.bincount(fed).max()) / num_steps, 1.0)

    def epsilon(sample_rate: float, steps: int) -> float:
        accountant = load_accountant()()
        accountant.history = [(config.noise_multiplier, sample_rate, steps)]
        return float(accountant.get_epsilon(delta=config.delta))

    return PrivacySpent(
        epsilon=epsilon(1.0, num_mechanisms),
        epsilon_if_sampled=epsilon(rate, num_steps),
        delta=config.delta,
    )


def load_accountant() -> type:
    """Return opacus' RDP accountant.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise ConfigError(
            "'mitigations': dp_sgd needs opacus: pip install 'memguard[dp]'"
        ) from error
    accountant: type = RDPAccountant
    return accountant
