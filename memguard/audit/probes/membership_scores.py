"""Membership scores of a document, and the passages whose log-probabilities they are computed from.

    loss             mean l_t                         trained texts are likelier
    min_k            mean of the lowest 20 % of l_t   rare words of trained texts are likelier
    min_k_plus_plus  the same of (l_t - mu_t) / sigma_t, mu and sigma of log p(v), v drawn from p
    zlib             mean l_t / compressed bytes      as loss, corrected for repetitive texts
    lowercase        NLL(lower case) / NLL            trained texts depend on the spelling
    reference        NLL(reference) - NLL             as loss, corrected for easy texts
    recall           LL(given another text) / LL      an untrained prefix disturbs trained texts

l_t is the log-probability of token t given all true tokens before it (T tokens, nats), NLL the mean
of -l_t, LL the mean of l_t. A higher score always means more likely trained; if a paper defines its
score with the opposite sign (zlib), the sign is reversed here and this is documented. A score is
meaningful only through its AUC against the control.

The last three need a second pass: over the text in lower case, encoded again; over the same tokens
by another model with the same vocabulary; over the same tokens after control documents in the row.
Each gives the mean log-probability of a token, or nothing if the pass is not possible.
"""

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from memguard.audit.passages import Codec, Passage, ScoreSelection, TokenResult, stack_by_size
from memguard.audit.requests import Inputs, Score, key_of_passage, key_of_window
from memguard.audit.windows import Window
from memguard.seeds import derive_generator

MIN_K_SHARE = 0.2
"""Share of the tokens that Min-K% and Min-K%++ use: k = 20 in the paper of the first."""

# fp32 cannot represent probabilities closer to 1: a smaller mean NLL has no meaning.
_NLL_FLOOR = 2.0**-24
_VARIANCE_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipScore:
    """Definition and inputs of a score."""

    definition: str
    """One line, with its source."""
    extras: frozenset[str] = frozenset()
    """Results that it needs besides the log-probability of each token."""
    has_own_pass: bool = False
    """Whether it needs another pass: over the lower-cased text, by a reference model, or after
    another text."""


MEMBERSHIP_SCORES: Mapping[str, MembershipScore] = {
    "loss": MembershipScore(definition="Mean log-probability of a token (Yeom et al. 2018)."),
    "min_k": MembershipScore(
        definition="Mean log-probability of the 20 % least likely tokens (Shi et al. 2023)."
    ),
    "min_k_plus_plus": MembershipScore(
        definition="Min-K% of log-probabilities standardised at each token (Zhang et al. 2024).",
        extras=frozenset({"entropy", "variance_logprob"}),
    ),
    "zlib": MembershipScore(
        definition="Mean log-probability / zlib-compressed bytes (Carlini et al. 2021)."
    ),
    "lowercase": MembershipScore(
        definition="Loss of the lower-cased text / loss of the text (Carlini et al. 2021).",
        has_own_pass=True,
    ),
    "reference": MembershipScore(
        definition="Loss under a reference model - loss (Carlini et al. 2021).", has_own_pass=True
    ),
    "recall": MembershipScore(
        definition="Log-likelihood after an untrained text / without it (ReCaLL, Xie et al. 2024).",
        has_own_pass=True,
    ),
}
"""Every score by its name."""


def compute_one_pass(
    name: str, results: TokenResult, texts: Sequence[str] | None
) -> NDArray[np.float64] | None:
    """Return a score ``[n]`` that needs no pass of its own; None if it needs the missing texts."""
    loss_N = compute_loss(results.logprob)
    if name == "loss":
        return loss_N
    if name == "min_k":
        return compute_min_k(results.logprob)
    if name == "min_k_plus_plus":
        assert results.entropy is not None, "entropy was requested"
        assert results.variance_logprob is not None, "the variance was requested"
        return compute_min_k_plus_plus(results.logprob, -results.entropy, results.variance_logprob)
    assert name == "zlib", f"{name} needs a pass of its own"
    if texts is None:
        return None
    pairs = zip(loss_N.tolist(), texts, strict=True)
    return np.array([compute_zlib(loss, text) for loss, text in pairs])


def compute_loss(logprob_T: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the mean log-probability ``[...]`` of ``[..., T]`` (Yeom et al. 2018), -NLL."""
    loss: NDArray[np.float64] = _checked(logprob_T).mean(-1)
    return loss


def compute_min_k(
    logprob_T: NDArray[np.floating], share: float = MIN_K_SHARE
) -> NDArray[np.float64]:
    """Return the mean of the lowest log-probabilities (Min-K%, Shi et al., arXiv 2310.16789).

    Of T tokens, max(1, floor(share T)) are used, with the product in exact decimal arithmetic.
    Published code uses int(share T), which is undefined if that is 0 and has one token fewer if
    floating point rounds down (.29 x 100); other code rounds up.
    """
    return _mean_of_lowest(_checked(logprob_T), share)


def compute_min_k_plus_plus(
    logprob_T: NDArray[np.floating],
    mean_logprob_under_p_T: NDArray[np.floating],
    variance_T: NDArray[np.floating],
    share: float = MIN_K_SHARE,
) -> NDArray[np.float64]:
    """Return the mean of the lowest z_t = (l_t - mu_t) / sigma_t (Zhang et al., arXiv 2404.02936).

    A trained token is likelier than other tokens that the model would sample at its position.
    sigma^2 is at least 1e-6 (nats squared): it is smaller only if all tokens but one together have
    a probability below about 3e-9, where the published quotient is rounding error, or 0/0. The
    number of tokens is that of `compute_min_k`. ``mean_logprob_under_p_T`` is mu_t, the mean of
    log p(v) where v is drawn from p: -entropy, not the mean over the vocabulary, which
    `TokenTerms` calls mean_logprob.
    """
    assert logprob_T.shape == mean_logprob_under_p_T.shape == variance_T.shape, (
        "all three need one value per token"
    )
    sigma_T = np.sqrt(np.maximum(_checked(variance_T), _VARIANCE_FLOOR))
    z_T = (_checked(logprob_T) - _checked(mean_logprob_under_p_T)) / sigma_T
    return _mean_of_lowest(z_T, share)


def compute_zlib(loss: float, text: str) -> float:
    """Return mean log-probability / bytes of the zlib-compressed text (Carlini et al. 2021).

    Carlini et al. divide the loss, where low values indicate trained texts; the sign is reversed
    here. Both a small loss and many bytes bring the score close to 0: a text that compresses well
    has a small loss even if it was not trained.
    """
    return loss / len(zlib.compress(text.encode("utf-8", "surrogatepass")))


def _mean_of_lowest(values_T: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    assert 0 < share <= 1, "share must be above 0 and at most 1"
    # Exact decimal arithmetic: .29 * 100 is below 29 in floating point.
    count = max(1, int(Fraction(repr(share)) * values_T.shape[-1]))
    mean: NDArray[np.float64] = np.partition(values_T, count - 1)[..., :count].mean(-1)
    return mean


def _checked(values_T: NDArray[np.floating]) -> NDArray[np.float64]:
    assert values_T.shape[-1:] > (0,), "a document has at least one token"
    assert np.isfinite(values_T).all(), "the scorer rejects scores that are not finite"
    return values_T.astype(np.float64)


def compare_passes(
    plain_N: NDArray[np.float64], own: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """Return scores ``[N]`` from the mean log-probabilities ``[N]`` of plain and own passes.

    Lower-cased text has a higher loss in general, so its ratio is above 1; memorized capital
    letters make it large. A text that the reference model finds easy too was not necessarily
    trained; with the model before training as reference, the score is called loss_minus_base. An
    untrained text as prefix makes a trained text less likely, so the quotient of two negative
    numbers is larger; for an untrained text it is ordinary context, which usually helps. A loss
    counts as at least 2^-24.
    """
    formulas: Mapping[str, Callable[[float, float], float]] = {
        "lowercase": lambda lower, plain: -lower / max(-plain, _NLL_FLOOR),
        "reference": lambda other, plain: plain - other,
        "recall": lambda after, plain: after / min(plain, -_NLL_FLOOR),
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


MEAN = "mean_logprob"
"""The number of an own pass."""
SHOT_TOKENS, _FEWEST_SHOT_TOKENS = 128, 16
"""Tokens taken from the start of each control document as prefix, and their minimum total number.
"""


def score_tokens(inputs: Inputs, names: tuple[str, ...]) -> Score:
    """Return the request for scores over the tokens that received loss in training."""
    windows, codec = inputs.windows, inputs.codec
    extras = frozenset().union(*(MEMBERSHIP_SCORES[name].extras for name in names))

    def reduce(items: Sequence[int], results: Sequence[TokenResult]) -> NDArray[np.float64]:
        trained = [_find_trained(windows[item]) for item in items]
        kept = [
            result.keep_labels(supervised) if supervised.any() else None
            for result, supervised in zip(results, trained, strict=True)
        ]
        rows = np.full((len(items), len(names)), np.nan)
        for where, stacked in stack_by_size(kept):
            texts = None
            if codec is not None and "zlib" in names:
                ids = [windows[items[i]].input_ids[1:][trained[i]] for i in where]
                texts = [codec.decode(one) for one in ids]
            for column, name in enumerate(names):
                score_N = compute_one_pass(name, stacked, texts)
                if score_N is not None:
                    rows[where, column] = score_N
        return rows

    return Score(
        items=windows,
        passages=[plan_plain(window, max_tokens=None) for window in windows],
        keys=[key_of_window(window, window.continuation_tokens) for window in windows],
        names=names,
        reduce=reduce,
        parameters={
            "kind": "membership",
            "version": 3,
            "scores": list(names),
            "text": codec is not None,
        },
        selection=ScoreSelection(needs=extras),
    )


def score_own_passes(
    inputs: Inputs, scores: Collection[str], max_tokens: int | None, *, num_shots: int
) -> Mapping[str, Score]:
    """Return the requests for other passages of the documents, and for the plain ones."""
    windows, codec = inputs.windows, inputs.codec
    passages: dict[str, tuple[list[Passage | None], str]] = {}
    if "lowercase" in scores and codec is not None:
        lower = [plan_lowercase(window, codec, max_tokens=max_tokens) for window in windows]
        passages["lowercase."] = (lower, "lower case")
    if "recall" in scores:
        shots = choose_shots(windows, count=num_shots, seed=inputs.seed)
        before = [windows[index] for index in shots]
        recall = [
            None if index in set(shots) else plan_recall(window, before, max_tokens=max_tokens)
            for index, window in enumerate(windows)
        ]
        passages["recall."] = (recall, "recall")
    if passages or (inputs.has_reference and "reference" in scores):
        plain = [plan_plain(window, max_tokens=max_tokens) for window in windows]
        passages["plain."] = (plain, "plain")
    return {
        # The plain passages are those of the main windows, and share their pass.
        name: score_means(windows if name == "plain." else planned, planned, stage)
        for name, (planned, stage) in passages.items()
    }


def _find_trained(window: Window) -> NDArray[np.bool_]:
    """Return which tokens of the window after the first received loss in training."""
    size = window.prefix_tokens + window.continuation_tokens
    return window.document.supervised[window.start + 1 : window.start + size]


def score_means(items: Sequence[object], passages: Sequence[Passage | None], stage: str) -> Score:
    """Return the request for the mean log-probability of the scored tokens of each passage."""

    def reduce(_: Sequence[int], results: Sequence[TokenResult]) -> list[float]:
        return [float(result.logprob.mean(dtype=np.float64)) for result in results]

    return Score(
        items=items,
        passages=passages,
        keys=[b"" if passage is None else key_of_passage(passage) for passage in passages],
        names=(MEAN,),
        reduce=reduce,
        parameters={"kind": "mean log-probability", "version": 1},
        stage=stage,
    )


def plan_plain(window: Window, *, max_tokens: int | None) -> Passage | None:
    """Return the tokens of the window, all scored except the first.

    None if the model has too few positions, because fewer tokens would give another value.
    """
    if max_tokens is not None and len(window.input_ids) > max_tokens + 1:
        return None
    return _score_after(window.input_ids, 1)


def plan_lowercase(window: Window, codec: Codec, *, max_tokens: int | None) -> Passage | None:
    """Return the window's text in lower case; None for conversations, whose markup would break."""
    if window.document.format != "text":
        return None
    ids = np.asarray(codec.encode(codec.decode(window.input_ids).lower()), dtype=np.int32)
    return _score_after(ids if max_tokens is None else ids[: max_tokens + 1], 1)


def choose_shots(windows: Sequence[Window], *, count: int, seed: int) -> list[int]:
    """Return the control documents that are the prefix in ReCaLL; ReCaLL does not score them."""
    controls = [i for i, window in enumerate(windows) if window.document.role == "control"]
    # Half of the control must remain for the comparison.
    count = min(count, len(controls) // 2)
    order = derive_generator(seed, "recall shots").permutation(len(controls))
    return [controls[index] for index in order[:count]]


def plan_recall(
    window: Window, shots: Sequence[Window], *, max_tokens: int | None
) -> Passage | None:
    """Return the shots followed by the window's tokens; only the latter are scored."""
    before = np.concatenate([np.zeros(0, np.int32), *(s.input_ids[:SHOT_TOKENS] for s in shots)])
    if max_tokens is not None:
        before = before[: max(0, max_tokens + 1 - len(window.input_ids))]
    if len(before) < _FEWEST_SHOT_TOKENS:
        return None
    return _score_after(np.concatenate([before, window.input_ids]), len(before) + 1)


def _score_after(ids: NDArray[np.int32], first_label: int) -> Passage | None:
    if len(ids) <= first_label:
        return None
    return Passage(input_ids=ids, first_label=first_label, first_choice=len(ids))
