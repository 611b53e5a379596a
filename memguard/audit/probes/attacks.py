"""Attacks: extraction by an attacker who submits several answers, and by one who knows the mask.

    beam_search   the W most likely continuations
    sampling      N samples; the first answer is the most frequent one
    fill          beam search that knows which labels a goldfish dropped: at those it tries many
                  tokens, and the learned tokens after them select the right one

An attacker can compute a goldfish's mask (`masks.py`). A wrong guess has two effects:
the tokens after it are less likely, and the mask of the next h tokens changes. This is memguard's
version of an adaptive attack; Hans et al. (arXiv 2406.10209) evaluate beam search that does not
know the mask.

The cost of a guess (see `beams`) is computed from each document's own prefix, which the attacker
has, without the prefix's first tokens. It is between the cost of a learned token and the cost of
the model's first choice at a token that was not learned:

    guess_cost = sqrt(mean -log p(learned token) * mean -log p(first choice at a dropped one))

If guesses cost less than learned tokens, the search prefers texts with many guesses; if they cost
as much as unlearned tokens, it prefers any text with few guesses.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from memguard.audit.metrics import Evidence, Metric, count_clusters, rate_metric, share_metric
from memguard.audit.passages import Passage, TokenResult
from memguard.audit.probe import Column, Probe, Summary
from memguard.audit.probes.masks import drops_next, find_dropped
from memguard.audit.requests import (
    Generate,
    Generated,
    Inputs,
    IsFree,
    Measured,
    Model,
    Prompt,
    Rounds,
    Score,
    View,
    join,
    key_of_window,
)
from memguard.audit.selection import choose_sample
from memguard.audit.statistics import compute_difference, compute_mean, compute_rate
from memguard.audit.windows import Window
from memguard.config.settings import PositiveInt, SamplingScheme
from memguard.mitigation import Goldfish
from memguard.pages.extraction_cost import build_extraction_cost
from memguard.pages.page import Section
from memguard.records import (
    AuditReport,
    DetailRow,
    MetricRow,
    Rate,
    ResultRow,
    fill_row,
    write_parameters,
)

_Answers = Annotated[int, Field(ge=1, le=100_000)]
NUMBERS = ("best", "any", "right")
"""1 if the first answer, or any answer, is the true continuation; correct tokens of the first."""
UNKNOWN_MASK = (
    "mode random drew a new mask in each epoch, which cannot be known: plain beam search was run"
)
"""Note of a fill attack without a known mask."""
TIGHTENED_MASK = (
    "the attack used the mask of each document's initial k; a risk budget lowered k for some "
    "documents during training"
)
"""Note of a fill attack that treats some labels as learned that were dropped for part of training
or all of it."""

# The probabilities of a prefix's first tokens contain little information about memorization.
SHORT_CONTEXT_TOKENS = 8
# Cost for a prefix without dropped or without learned tokens; and the smallest cost of a guess.
USUAL_GUESS_COST, _LEAST_GUESS_COST = 0.1, 1e-3


class AttackProbe(Probe):
    """Attacks by an attacker who may submit several answers and knows the mask."""

    models: ClassVar[tuple[Model, ...]] = ("trained",)
    metrics: ClassVar[tuple[Metric, ...]] = (
        rate_metric("first_answer", "The attack's first answer is the true continuation."),
        rate_metric("any_answer", "One of the attack's answers is the true continuation."),
        share_metric(
            "token_accuracy", "Tokens of the first answer that are right, index by index."
        ),
        rate_metric(
            "best_any_answer",
            "One of the answers of the attack that extracts most of the bucket is the true "
            "continuation.",
            heading="Best attack",
            spoken="best attack",
            risk_rank=4,
        ),
    )
    is_attack: ClassVar[bool] = True

    name: Literal["attacks"] = Field("attacks", description="Which probe.")
    width: _Answers = Field(16, description="Beams, and answers per document.")
    candidates: _Answers = Field(64, description="Tokens tried for each dropped token.")
    samples: _Answers = Field(16, description="Samples of the sampling attack.")
    scheme: SamplingScheme = Field(SamplingScheme(), description="Sampling scheme of this attack.")
    max_documents_per_bucket: PositiveInt | None = Field(
        40, description="Size of the seeded sample of each bucket that is attacked; null takes all."
    )

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Attack a sample of each bucket; columns are ``beam_search.best``, ..."""
        windows, goldfish = inputs.windows, inputs.goldfish
        chosen = choose_sample(
            windows, self.max_documents_per_bucket, seed=inputs.seed, purpose="attacked"
        )
        knows_mask = goldfish is not None and goldfish.config.mode != "random"
        first = [
            self._attack("beam_search", inputs, chosen, "beam search", beams=self.width),
            self._attack(
                "sampling", inputs, chosen, "sampling", scheme=self.scheme, samples=self.samples
            ),
        ]
        costs = [self._score_costs(inputs, chosen)] if knows_mask else []
        beam, sampled, *cost = yield [*first, *costs]
        columns = {"beam_search.": beam, "sampling.": sampled}
        if goldfish is not None:
            masks = {}
            if knows_mask:
                cost_N = np.nan_to_num(cost[0]["cost"], nan=USUAL_GUESS_COST)
                masks = {
                    "candidates": self.candidates,
                    "is_free": lambda index: build_mask(goldfish, windows[index]),
                    "guess_costs": cost_N.tolist(),
                }
            (columns["fill."],) = yield [
                self._attack(
                    "fill", inputs, chosen, "filling dropped tokens", beams=self.width, **masks
                )
            ]
        return Measured(columns=join(columns))

    def tabulate(self, evidence: Evidence) -> Summary:
        """Return the rates of each attack, and of the best one, in each attacked bucket."""
        measured = evidence.trained.get(self.name)
        attacked_N = np.zeros(len(evidence.inputs.windows), dtype=bool)
        if measured is not None:
            attacked_N = ~np.isnan(measured.columns["beam_search.any"])
        if measured is None or not attacked_N.any():
            return Summary(reason="no document was attacked")
        numbers = measured.columns
        attacks = [name.removesuffix(".any") for name in numbers.names if name.endswith(".any")]
        *each, best_answer = self.metrics
        rows: list[ResultRow] = []
        best: dict[str, tuple[Rate, str]] = {}
        for name in attacks:
            parameters = write_parameters(self._describe_attack(name))
            for outline in evidence.buckets:
                here_N = (evidence.bucket_N == outline.bucket) & attacked_N
                if not here_N.any():
                    continue
                clusters = evidence.cluster_N[here_N]
                share = numbers[f"{name}.right"][here_N] / evidence.size_N[here_N]
                first, of_any = (
                    compute_rate(numbers[f"{name}.{number}"][here_N], clusters)
                    for number in ("best", "any")
                )
                row = self.make_row(
                    "first_answer",
                    parameters=parameters,
                    bucket=outline.bucket,
                    num_documents=len(share),
                )
                mean = compute_mean(share, bounds=(0, 1), clusters=clusters)
                accuracy = replace(
                    row,
                    metric="token_accuracy",
                    statistic="mean",
                    num_clusters=count_clusters(clusters),
                )
                rows += [
                    fill_row(row, first, "clopper-pearson"),
                    fill_row(replace(row, metric="any_answer"), of_any, "clopper-pearson"),
                    fill_row(accuracy, mean, "jackknife"),
                ]
                highest = best.get(outline.bucket)
                if highest is None or of_any.num_matched > highest[0].num_matched:
                    best[outline.bucket] = of_any, name
        beside = None if evidence.control is None else best.get(evidence.control.bucket)
        for bucket, pair in best.items():
            minus = None
            if beside is not None and pair is not beside:
                minus = compute_difference(pair[0], beside[0])
            row = self.make_row("best_any_answer", bucket=bucket)
            rows.append(fill_row(row, pair[0], "clopper-pearson", minus_control=minus))
        detail = {"best": {bucket: name for bucket, (_, name) in best.items()}}
        extracted_N = np.stack([numbers[f"{name}.any"] for name in attacks]).max(axis=0)
        return Summary(
            rows=rows,
            metrics=[
                *(row for name in attacks for row in self._describe_metrics(name, each, evidence)),
                self.describe_metric(best_answer),
            ],
            details=[DetailRow(probe=self.name, schema=self.VERSION, value=detail)],
            columns={
                f"{self.name}.{name}": Column(
                    values=numbers[name], kind="int" if name.endswith(".right") else "bool"
                )
                for name in numbers.names
            },
            num_items=int(attacked_N.sum()),
            matched={"trained": extracted_N},
        )

    def _describe_attack(self, name: str) -> dict[str, Any]:
        return {"attack": name, "answers": self.samples if name == "sampling" else self.width}

    def _describe_metrics(
        self, name: str, metrics: Sequence[Metric], evidence: Evidence
    ) -> list[MetricRow]:
        goldfish, note = evidence.inputs.goldfish, ""
        if name == "fill" and goldfish is not None:
            is_blind = goldfish.config.mode == "random"
            note = UNKNOWN_MASK if is_blind else TIGHTENED_MASK if evidence.num_tightened else ""
        return [
            self.describe_metric(metric, self._describe_attack(name), note=note)
            for metric in metrics
        ]

    @classmethod
    def section(cls, report: AuditReport) -> Section:
        """Return the section of attack cost and attacks, the same as that of the sampling probe."""
        return build_extraction_cost(report)

    def _attack(
        self, attack: str, inputs: Inputs, chosen: Sequence[int], how: str, **decoding: Any
    ) -> Generate:
        windows, attacked = inputs.windows, set(chosen)

        def reduce(items: Sequence[int], texts: Sequence[Generated]) -> ArrayLike:
            return [
                judge_answers(windows[index], _order_answers(attack, text.samples))
                for index, text in zip(items, texts, strict=True)
            ]

        return Generate(
            prompts=[
                Prompt.of(window) if index in attacked else None
                for index, window in enumerate(windows)
            ],
            keys=_list_keys(windows),
            names=NUMBERS,
            reduce=reduce,
            parameters=self._describe(f"attack, {attack}", inputs),
            stage=f"attack by {how}",
            **decoding,
        )

    def _score_costs(self, inputs: Inputs, chosen: Sequence[int]) -> Score:
        """Return the request for the cost of a guess, from each prefix that is long enough."""
        windows, attacked, goldfish = inputs.windows, set(chosen), inputs.goldfish
        assert goldfish is not None, "the attacker knows a mask"

        def reduce(items: Sequence[int], results: Sequence[TokenResult]) -> list[float]:
            return [
                read_guess_cost(windows[index], result, goldfish)
                for index, result in zip(items, results, strict=True)
            ]

        return Score(
            items=windows,
            passages=[
                Passage(
                    input_ids=window.prefix_ids,
                    first_label=SHORT_CONTEXT_TOKENS,
                    first_choice=SHORT_CONTEXT_TOKENS,
                )
                if index in attacked and window.prefix_tokens > SHORT_CONTEXT_TOKENS
                else None
                for index, window in enumerate(windows)
            ],
            keys=_list_keys(windows),
            names=("cost",),
            reduce=reduce,
            parameters=self._describe("cost of a guess", inputs),
        )

    def _describe(self, kind: str, inputs: Inputs) -> dict[str, Any]:
        """Return what the numbers depend on, in addition to model and window."""
        goldfish = inputs.goldfish
        mask = None
        if goldfish is not None:
            mask = [goldfish.config.model_dump(mode="json"), goldfish.special_ids]
        settings = self.model_dump(mode="json", exclude={"max_documents_per_bucket"})
        return {
            "kind": kind,
            "seed": inputs.seed,
            "mask": mask,
            "probe": {"version": self.VERSION, **settings},
        }


def _list_keys(windows: Sequence[Window]) -> list[bytes]:
    # The mask depends on the planned repetitions of a document.
    return [key_of_window(window, window.document.dose) for window in windows]


def _order_answers(attack: str, samples: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the answers in the order of submission: samples by how often they were drawn."""
    if attack != "sampling":
        return samples
    # Counter keeps the order of the samples if several are equally frequent.
    return np.array([text for text, _ in Counter(map(tuple, samples.tolist())).most_common()])


def measure_guess_cost(
    logprob_T: NDArray[np.floating],
    best_logprob_T: NDArray[np.floating],
    dropped_T: NDArray[np.bool_],
) -> float:
    """Return the cost of a guess (nats), from the supervised tokens of a prefix."""
    if dropped_T.all() or not dropped_T.any():
        return USUAL_GUESS_COST
    learned = -float(logprob_T[~dropped_T].mean(dtype=np.float64))
    unlearned = -float(best_logprob_T[dropped_T].mean(dtype=np.float64))
    # Rounding may make a probability exceed one, and its negative logarithm negative.
    return max(float(np.sqrt(max(learned, 0) * max(unlearned, 0))), _LEAST_GUESS_COST)


def read_guess_cost(window: Window, result: TokenResult, goldfish: Goldfish) -> float:
    """Return the cost of a guess (nats) in a window."""
    positions = slice(window.start + SHORT_CONTEXT_TOKENS, window.start + window.prefix_tokens)
    supervised_T = window.document.supervised[positions]
    dosed = goldfish.at_dose(window.document.dose)
    dropped_T = find_dropped(dosed, window.prefix_ids[None], _first_position(window))[0]
    # The margin is relative to the best other token; it is negative if the label is not the best.
    best_logprob_T = result.logprob - np.minimum(result.margin, 0)
    return measure_guess_cost(
        result.logprob[supervised_T],
        best_logprob_T[supervised_T],
        dropped_T[SHORT_CONTEXT_TOKENS:][supervised_T],
    )


def build_mask(goldfish: Goldfish, window: Window) -> IsFree:
    """Return which next tokens of a window training would have dropped."""
    dosed, first = goldfish.at_dose(window.document.dose), _first_position(window)
    return lambda ids_RT, candidates_RC: drops_next(dosed, ids_RT, candidates_RC, first)


def judge_answers(window: Window, answers_WS: NDArray[np.integer]) -> list[float]:
    """Return whether the first and any answer are the true continuation, and the correct tokens.

    Tokens of the first answer are compared index by index.
    """
    right_WS = answers_WS == window.continuation_ids
    verbatim_W = right_WS.all(axis=1)
    return [float(verbatim_W[0]), float(verbatim_W.any()), float(right_WS[0].sum())]


def _first_position(window: Window) -> int:
    """Return the number of tokens of the document before the window."""
    return window.document.first_position + window.start
