"""How likely a document was trained, from the log-probabilities of its tokens.

    loss             mean l_t                         trained: the model expects it
    min_k            mean of the lowest 20 % of l_t   trained: even its rare words surprise less
    min_k_plus_plus  the same of (l_t - mu_t) / sigma_t, mu and sigma of log p(v), v drawn from p
    zlib             mean l_t / compressed bytes      as loss, but not merely repetitive
    lowercase        NLL(lower case) / NLL            trained: the spelling matters
    reference        NLL(reference) - NLL             as loss, but not merely easy
    recall           LL(given another text) / LL      trained: an untrained text before it disturbs

l_t is the log-probability of token t given all true tokens before it (T tokens, nats), NLL the mean
of -l_t, LL the mean of l_t. Higher means more likely trained, always: where a paper's score points
the other way (zlib), it is turned here and says so. A score is worth what its AUC against the
control is worth; alone it says nothing.

The last three take a second pass: over the text in lower case, encoded again; over the same tokens
by another model with the same vocabulary; over the same tokens after control documents in the row.
Each gives the mean log-probability of a token, or nothing where the pass is not possible.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memguard.audit.extraction import Window
from memguard.audit.passages import Decode, Passage
from memguard.seeds import derive_generator

Need = Literal["logprob", "entropy", "variance_logprob", "text"]
OwnPass = Literal["lowercase", "reference", "recall"]

MIN_K_SHARE = 0.2
"""Share of the tokens that Min-K% and Min-K%++ look at: k = 20 of the paper of the first."""

# fp32 tells no probability from 1 that is closer than this: no mean NLL means less.
_NLL_FLOOR = 2.0**-24
_VARIANCE_FLOOR = 1e-6
# First tokens of a control document that are put before a text, and the fewest of all together.
_SHOT_TOKENS, _FEWEST_SHOT_TOKENS = 128, 16


Encode = Callable[[str], Sequence[int]]
"""Text to token ids, as training encodes a plain text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """The tokenizer, as far as an audit needs it."""

    decode: Decode
    encode: Encode


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipScore:
    """What a score is and what it takes."""

    definition: str
    """One line, with its source."""
    needs: frozenset[Need]
    """What it takes of each pass, beside what every pass gives."""
    own_pass: OwnPass | None = None
    """A second pass: over the lower-cased text, by a reference model, or after another text."""


MEMBERSHIP_SCORES: Mapping[str, MembershipScore] = {
    "loss": MembershipScore(
        definition="Mean log-probability of a token (Yeom et al. 2018).",
        needs=frozenset({"logprob"}),
    ),
    "min_k": MembershipScore(
        definition="Mean log-probability of the 20 % least likely tokens (Shi et al. 2023).",
        needs=frozenset({"logprob"}),
    ),
    "min_k_plus_plus": MembershipScore(
        definition="Min-K% of log-probabilities standardised at each token (Zhang et al. 2024).",
        needs=frozenset({"logprob", "entropy", "variance_logprob"}),
    ),
    "zlib": MembershipScore(
        definition="Mean log-probability / zlib-compressed bytes (Carlini et al. 2021).",
        needs=frozenset({"logprob", "text"}),
    ),
    "lowercase": MembershipScore(
        definition="Loss of the lower-cased text / loss of the text (Carlini et al. 2021).",
        needs=frozenset({"logprob", "text"}),
        own_pass="lowercase",
    ),
    "reference": MembershipScore(
        definition="Loss under a reference model - loss (Carlini et al. 2021).",
        needs=frozenset({"logprob"}),
        own_pass="reference",
    ),
    "recall": MembershipScore(
        definition="Log-likelihood after an untrained text / without it (ReCaLL, Xie et al. 2024).",
        needs=frozenset({"logprob"}),
        own_pass="recall",
    ),
}
"""Every score by its name; `compute_<name>` computes it."""


def compute_loss(logprob_T: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the mean log-probability ``[...]`` of ``[..., T]`` (Yeom et al. 2018), -NLL."""
    loss: NDArray[np.float64] = _checked(logprob_T).mean(-1)
    return loss


def compute_min_k(
    logprob_T: NDArray[np.floating], share: float = MIN_K_SHARE
) -> NDArray[np.float64]:
    """Return the mean of the lowest log-probabilities (Min-K%, Shi et al., arXiv 2310.16789).

    Of T tokens max(1, floor(share T)), the product taken of the share as it is written. Published
    code takes int(share T), which has no value where that is 0 and one token fewer where floating
    point falls short (.29 x 100); others round up.

    Args:
        logprob_T: ``[..., T]`` log-probability of each token, at least one.
        share: of the tokens, above 0 and at most 1.
    """
    return _mean_of_lowest(_checked(logprob_T), share)


def compute_min_k_plus_plus(
    logprob_T: NDArray[np.floating],
    mean_logprob_under_p_T: NDArray[np.floating],
    variance_T: NDArray[np.floating],
    share: float = MIN_K_SHARE,
) -> NDArray[np.float64]:
    """Return the mean of the lowest z_t = (l_t - mu_t) / sigma_t (Zhang et al., arXiv 2404.02936).

    A trained token is likelier than what else the model would draw at its place. sigma^2 is never
    taken below 1e-6 (nats squared): it is smaller only where all tokens but one together have a
    probability below about 3e-9, and there the published quotient is rounding, or 0/0. As many
    tokens as in `compute_min_k`.

    Args:
        logprob_T: ``[..., T]`` log-probability of each token, at least one.
        mean_logprob_under_p_T: mu_t, the mean of log p(v) where v is drawn from p: -entropy. Not
            the mean over the vocabulary, which the vocabulary layer calls mean_logprob.
        variance_T: sigma_t^2, the variance of the same.
        share: of the tokens, above 0 and at most 1.
    """
    assert logprob_T.shape == mean_logprob_under_p_T.shape == variance_T.shape, (
        "one of each a token"
    )
    sigma_T = np.sqrt(np.maximum(_checked(variance_T), _VARIANCE_FLOOR))
    z_T = (_checked(logprob_T) - _checked(mean_logprob_under_p_T)) / sigma_T
    return _mean_of_lowest(z_T, share)


def compute_zlib(loss: float, text: str) -> float:
    """Return mean log-probability / bytes of the zlib-compressed text (Carlini et al. 2021).

    Carlini et al. divide the loss, and take what is low for trained; the sign is turned here.
    Both a small loss and many bytes bring the score up to 0: a text that compresses well is easy
    without having been trained.

    Args:
        loss: mean log-probability of a token, as `compute_loss` returns it.
        text: whose tokens they are.
    """
    return loss / len(zlib.compress(text.encode("utf-8", "surrogatepass")))


def compute_lowercase(nll_lower: float, nll: float) -> float:
    """Return the loss of the lower-cased text / that of the text (Carlini et al. 2021).

    Lower case is dearer anyway, so that the ratio is above 1; recited capitals make it large.

    Args:
        nll_lower: mean negative log-probability of the lower-cased text (nats), its own tokens.
        nll: of the text; what fp32 cannot tell from 0 counts as 2^-24.
    """
    return nll_lower / max(nll, _NLL_FLOOR)


def compute_reference(nll_ref: float, nll: float) -> float:
    """Return the loss under a reference model minus the loss (Carlini et al. 2021).

    What an untrained model finds easy is easy for all; what only this one does was learned. With
    the model before training as reference it is called loss_minus_base.

    Args:
        nll_ref: mean negative log-probability under the reference (nats); of the same tokens, or
            where the tokenizers differ both per byte.
        nll: under the model.
    """
    return nll_ref - nll


def compute_recall(ll_given_prefix: float, ll: float) -> float:
    """Return LL(x | other text) / LL(x) (ReCaLL, Xie et al., arXiv 2406.15968).

    Both are negative. An untrained text in front makes a trained one less likely, so its ratio is
    larger; to an untrained one it is mere context, which rather helps.

    Args:
        ll_given_prefix: mean log-probability of the tokens after a text that was never trained
            (nats); the same one for all documents.
        ll: without it; what fp32 cannot tell from 0 counts as -2^-24.
    """
    return ll_given_prefix / min(ll, -_NLL_FLOOR)


def _mean_of_lowest(values_T: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    assert 0 < share <= 1, "a share of the tokens"
    # Exact arithmetic on the decimal as written: .29 * 100 is below 29 in floating point.
    count = max(1, int(Fraction(repr(share)) * values_T.shape[-1]))
    mean: NDArray[np.float64] = np.partition(values_T, count - 1)[..., :count].mean(-1)
    return mean


def _checked(values_T: NDArray[np.floating]) -> NDArray[np.float64]:
    assert values_T.shape[-1:] > (0,), "a document has a token"
    assert np.isfinite(values_T).all(), "scores of damaged weights end in the scorer"
    return values_T.astype(np.float64)


def plan_plain(window: Window, *, max_tokens: int | None) -> Passage | None:
    """Return the window's own tokens, every one scored that has one before it.

    None where the model has not the positions: of fewer tokens another number would come out.
    """
    if max_tokens is not None and len(window.input_ids) > max_tokens + 1:
        return None
    return _score_after(window.input_ids, 1)


def plan_lowercase(window: Window, codec: Codec, *, max_tokens: int | None) -> Passage | None:
    """Return the window's text in lower case; None for conversations, whose marks would break.

    Args:
        window: of the document.
        codec: decodes and encodes.
        max_tokens: positions the model has, which lower case may exceed: the end is then cut off.
    """
    if window.document.format != "text":
        return None
    ids = np.asarray(codec.encode(codec.decode(window.input_ids).lower()), dtype=np.int32)
    return _score_after(ids if max_tokens is None else ids[: max_tokens + 1], 1)


def choose_shots(windows: Sequence[Window], *, count: int, seed: int) -> list[int]:
    """Return which control documents stand before the others in ReCaLL; none is scored by it."""
    controls = [i for i, window in enumerate(windows) if window.document.role == "control"]
    # Half of the control must be left to compare with.
    count = min(count, len(controls) // 2)
    order = derive_generator(seed, "recall shots").permutation(len(controls))
    return [controls[index] for index in order[:count]]


def plan_recall(
    window: Window, shots: Sequence[Window], *, max_tokens: int | None
) -> Passage | None:
    """Return the shots and then the window's tokens, which alone are scored.

    Args:
        window: of the document.
        shots: of control documents.
        max_tokens: positions the model has; None where it states none.
    """
    before = np.concatenate([np.zeros(0, np.int32), *(s.input_ids[:_SHOT_TOKENS] for s in shots)])
    if max_tokens is not None:
        before = before[: max(0, max_tokens + 1 - len(window.input_ids))]
    if len(before) < _FEWEST_SHOT_TOKENS:
        return None
    return _score_after(np.concatenate([before, window.input_ids]), len(before) + 1)


def compare_passes(
    plain_N: NDArray[np.float64], own: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """Return the scores ``[N]`` from mean log-probabilities ``[N]`` of the plain and own passes."""
    formulas = {
        "lowercase": lambda other, plain: compute_lowercase(-other, -plain),
        "reference": lambda other, plain: compute_reference(-other, -plain),
        "recall": compute_recall,
    }
    return {
        name: np.array(
            [
                formulas[name](float(a), float(b)) if np.isfinite(a) and np.isfinite(b) else np.nan
                for a, b in zip(other_N, plain_N, strict=True)
            ]
        )
        for name, other_N in own.items()
    }


def _score_after(ids: NDArray[np.int32], first_label: int) -> Passage | None:
    if len(ids) <= first_label:
        return None
    return Passage(input_ids=ids, first_label=first_label, first_choice=len(ids))
