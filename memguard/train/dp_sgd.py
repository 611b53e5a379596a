"""DP-SGD: per-row gradient clipping, noise on the sum, and the scope of the reported epsilon.

    g_r   gradient of the mean loss of row r
    step  (sum over rows of g_r min(1, C / |g_r|)  +  N(0, (sigma C)^2)) / rows of the step

The algorithm is that of Abadi et al., arXiv 1607.00133, as commonly known; it was implemented
without reading the paper. Each row has its own backward pass: opacus computes per-sample gradients
with module hooks, but the head is not called as a module here, since `causal_lm` reads its weight
and computes the logits of selected tokens in chunks. A step therefore takes as many passes as it
has rows. This is exact, and intended for small models. Epsilon is computed by opacus (RDP).

The unit of privacy is a ROW, one piece of one document; a neighbouring data set replaces the row by
an empty one:

    epsilon             for the run's actual schedule. A row is in E steps, which do not depend on
                        its content: E Gaussian mechanisms without amplification by sampling
    epsilon_if_sampled  as reported in papers: as if every step drew its rows independently, each
                        with probability E / steps (Poisson). This run does not sample; the value
                        is for comparison with papers. It is usually smaller than epsilon, but not
                        with little noise and few steps

Neither value covers: a document that was split into several pieces or that has copies; choices
that were made by looking at the documents (tokenizer, packing, held-back clusters, learning rate);
what the model knew before; the losses, the audit and its report, which are computed from the
documents.

The noise is drawn from a secret key in the run's folder, not from the run's seed, which is public:
128 bits of the key per step, the same numbers on every device. Anyone with access to that folder
can remove the noise. The generator (Philox) is not cryptographic. Noise and sums are fp32, and
epsilon does not cover their rounding. 'optim.max_grad_norm' then clips the noisy mean like any
other gradient; this costs no privacy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.config.mitigations import DpSgdConfig
from memguard.parallel.local_parameters import LocalParameter, clear_gradients
from memguard.seeds import derive_secret_generator


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivacySpent:
    """The privacy loss of a run; both epsilons are at the same delta."""

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
    """Sums the clipped gradients of rows, one after the other, and computes their noisy mean."""

    def __init__(self, config: DpSgdConfig, *, noise_seed: int) -> None:
        """Start with empty sums; the seed is a secret of 128 bits or more."""
        self.config, self._noise_seed = config, noise_seed
        self._sums: dict[str, Tensor] = {}

    def add_row(self, parameters: Sequence[LocalParameter]) -> None:
        """Clip the gradients of a row's backward pass, add them to the sums and clear them."""
        gradients = {
            parameter.name: parameter.local.grad
            for parameter in parameters
            if parameter.local.grad is not None
        }
        if not gradients:
            return
        norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()
        scale = (self.config.max_grad_norm / norm).clamp(max=1.0)
        for name, gradient in gradients.items():
            clipped = gradient * scale.to(gradient.dtype)
            self._sums[name] = self._sums[name] + clipped if name in self._sums else clipped
        clear_gradients(parameters)

    def put_mean(self, parameters: Sequence[LocalParameter], *, step: int, num_rows: int) -> None:
        """Store the noisy mean as the parameters' gradients and reset the sums.

        ``num_rows``: rows of the step, with or without labels.
        """
        deviation = self.config.noise_multiplier * self.config.max_grad_norm
        # torch's generator is not sufficient: on the CPU it uses only 32 bits of a seed.
        generator = derive_secret_generator(self._noise_seed, "dp noise", step)
        for parameter in parameters:
            local = parameter.local
            drawn = generator.standard_normal(tuple(local.shape), dtype=np.float32)
            noise = torch.from_numpy(drawn).to(local)
            local.grad = (self._sums.get(parameter.name, 0) + deviation * noise) / num_rows
        self._sums = {}


def compute_privacy(
    config: DpSgdConfig, fed: NDArray[np.int64], *, batch_size: int
) -> PrivacySpent:
    """Return the privacy loss of a run, for the row with the largest loss.

    ``fed`` ``[num_samples]`` is the row of each trained sample.

    Raises:
        ConfigError: opacus is not installed.
    """
    config.check_library(by_import=True)
    from opacus.accountants import RDPAccountant

    pairs, times = np.unique(
        np.stack([fed, np.arange(len(fed)) // batch_size]), axis=1, return_counts=True
    )
    # A step across the end of an epoch may contain a row twice. Its sensitivity is then twice as
    # large, which costs as much as four steps.
    num_mechanisms = int(np.bincount(pairs[0], weights=times**2).max())
    num_steps = -(-len(fed) // batch_size)
    rate = min(int(np.bincount(fed).max()) / num_steps, 1.0)

    def epsilon(sample_rate: float, steps: int) -> float:
        accountant = RDPAccountant()
        accountant.history = [(config.noise_multiplier, sample_rate, steps)]
        return float(accountant.get_epsilon(delta=config.delta))

    return PrivacySpent(
        epsilon=epsilon(1.0, num_mechanisms),
        epsilon_if_sampled=epsilon(rate, num_steps),
        delta=config.delta,
    )
