"""Generation: overlap of generated continuations with the true text.

    greedy    the true tokens up to the first divergence d, then S - d greedily decoded tokens
    nucleus   S sampled tokens after the prefix

Verbatim documents need no decoding step. The numbers describe the whole continuation of S tokens;
for near-verbatim matches, generation of a text stops when it has too many edits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from memguard.audit.metrics import Evidence, Metric, rate_metric, share_metric
from memguard.audit.probe import Probe, Values
from memguard.audit.probes.window_scores import (
    APPROXIMATE_BLEU,
    MIN_WINDOW_TOKENS,
    NEAR_VERBATIM,
    compute_overlap,
)
from memguard.audit.requests import (
    Generate,
    Generated,
    Inputs,
    Measured,
    Prompt,
    Rounds,
    View,
    join,
    key_of_window,
)
from memguard.audit.selection import choose_sample
from memguard.audit.windows import Window
from memguard.config.settings import PositiveInt, SamplingScheme
from memguard.pages import formatting as fmt
from memguard.pages.columns import PLAIN, Column, name_bucket, show_name, tone_of_bucket
from memguard.pages.page import Section
from memguard.pages.pivot import ResultColumn, pivot
from memguard.records import AuditReport, BucketRow, MetricRow

_COLUMNS = (
    ("rouge_l", "mean", PLAIN),
    ("longest_copied_run", "tokens, mean", ""),
    ("edit_distance", "share of the length, mean", ""),
    ("near_verbatim", "documents", ""),
    ("bleu_above_0.75", "documents", ""),
    ("type_token_ratio", "generated, mean", PLAIN),
)
"""Name of the metric, second line of its heading, and unit ("" for the metric's)."""
_SHOWN_ROWS = 16


class GenerationProbe(Probe):
    """Generate text from the first wrong token on, and compare it with the true text."""

    VERSION: ClassVar[int] = 3
    after: ClassVar[tuple[str, ...]] = ("extraction",)
    no_result: ClassVar[str] = "no document was continued"
    metrics: ClassVar[tuple[Metric, ...]] = (
        share_metric(
            "rouge_l",
            "Longest common subsequence with the generated text (ROUGE-L F1).",
            heading="ROUGE-L",
            spoken="ROUGE-L",
        ),
        Metric(
            name="longest_copied_run",
            meaning="Longest run of the true text in the generated text.",
            unit="tokens",
            is_length=True,
        ),
        share_metric(
            "edit_distance",
            "Edits from the generated to the true text, over its length.",
            higher_is_better=True,
        ),
        replace(NEAR_VERBATIM, risk_rank=None),
        rate_metric(
            "bleu_above_0.75",
            "BLEU above 0.75 (approximate memorization, Ippolito et al. 2022).",
            heading="BLEU above 0.75",
            spoken="BLEU above 0.75",
        ),
        share_metric(
            "type_token_ratio",
            "Share of distinct ones in 50 generated tokens; low for repetitive text.",
            higher_is_better=True,
            heading="Type-token ratio",
            spoken="type-token ratio",
        ),
    )

    name: Literal["generation"] = Field("generation", description="Which probe.")
    nucleus: SamplingScheme | None = Field(
        SamplingScheme(top_p=0.95),
        description="Sampling in addition to greedy decoding; null for none.",
    )
    max_documents_per_bucket: PositiveInt | None = Field(
        100, description="Size of the seeded sample of each bucket; null takes all."
    )

    @property
    def decodings(self) -> dict[str, str]:
        """The decoding methods and their labels."""
        nucleus = {} if self.nucleus is None else {"nucleus": self.nucleus.label}
        return {"greedy": "greedy", **nucleus}

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Generate a sample of each bucket; columns are ``greedy.rouge_l``, ..."""
        windows = inputs.windows
        chosen = choose_sample(
            windows, self.max_documents_per_bucket, seed=inputs.seed, purpose="written on"
        )
        kept_N = view.before["extraction"].columns["first_divergence"].astype(int)
        stage = "generating" if view.name == "model" else f"{view.name}: generating"

        def keep_true(index: int, text: Generated) -> NDArray[np.int32]:
            true_ids = windows[index].continuation_ids[: kept_N[index]]
            return np.concatenate([true_ids, text.samples[0]])

        requests = [
            self._generate(
                "greedy",
                {i: Prompt.of(windows[i], int(kept_N[i])) for i in chosen},
                inputs,
                f"{stage} greedily",
                keep_true,
            )
        ]
        if self.nucleus is not None:
            prompts = {i: Prompt.of(windows[i]) for i in chosen}
            how = f"{stage} by sampling"
            requests.append(
                self._generate("nucleus", prompts, inputs, how, lambda _, text: text.samples[0])
            )
        numbers = yield requests
        return Measured(
            columns=join({f"{name}.": m for name, m in zip(self.decodings, numbers, strict=True)})
        )

    def _generate(
        self,
        decoding: str,
        prompts: dict[int, Prompt],
        inputs: Inputs,
        stage: str,
        complete: Callable[[int, Generated], NDArray[np.int32]],
    ) -> Generate:
        """Return the request for the texts of one decoding method."""
        windows, scheme = inputs.windows, None if decoding == "greedy" else self.nucleus

        def reduce(items: Sequence[int], texts: Sequence[Generated]) -> ArrayLike:
            return [
                _compare(
                    windows[index],
                    complete(index, text),
                    inputs.num_edits_allowed(windows[index].continuation_tokens),
                )
                for index, text in zip(items, texts, strict=True)
            ]

        return Generate(
            prompts=[prompts.get(index) for index in range(len(windows))],
            keys=[key_of_window(window) for window in windows],
            names=tuple(metric.name for metric in self.metrics),
            reduce=reduce,
            parameters={
                "kind": f"generated, {decoding}",
                "version": self.VERSION,
                "max_edit_share": inputs.max_edit_share,
                "seed": None if scheme is None else inputs.seed,
                "scheme": None if scheme is None else scheme.model_dump(mode="json"),
            },
            scheme=scheme,
            stage=stage,
        )

    def list_values(self, measured: Measured, evidence: Evidence) -> list[Values]:
        """Return the metrics of each decoding method."""
        return [
            Values(
                parameters={"decoding": label},
                columns={m.name: measured.columns[f"{name}.{m.name}"] for m in self.metrics},
                continuation_tokens=int(evidence.size_N.max(initial=0)),
            )
            for name, label in self.decodings.items()
        ]

    def find_windows(self, measured: Measured, evidence: Evidence) -> NDArray[np.float64]:
        """Return whether a text is near-verbatim, long enough, and the end of a text of its own."""
        columns = [measured.columns[f"{name}.near_verbatim"] for name in self.decodings]
        near_N = np.fmax.reduce(columns) * evidence.own_text.is_own_N
        return np.where(evidence.size_N < MIN_WINDOW_TOKENS, np.nan, near_N)

    @classmethod
    def section(cls, report: AuditReport) -> Section | None:
        """Return the section of generated text; None if nothing was generated."""
        tables = report.tables
        metrics = {metric.metric: metric for metric in tables.list_metrics("generation")}
        decodings = {metric.parameters: metric for metric in tables.list_metrics("generation")}
        if not metrics:
            return None
        head: Column[tuple[BucketRow, MetricRow]] = Column(
            ("Bucket", "decoding"),
            lambda item: show_name(name_bucket(item[0], report).text, _name_decoding(item[1])),
            lambda item: show_name("Base model", _name_decoding(item[1])),
        )
        table = pivot(
            tables,
            f"Generated text compared with the true continuation ({fmt.CI})",
            head,
            [
                ResultColumn((metrics[name].heading, detail), "generation", name, unit=unit)
                for name, detail, unit in _COLUMNS
                if name in metrics
            ],
            [(bucket, decoding) for bucket in tables.buckets for decoding in decodings.values()],
            key=lambda item: {"bucket": item[0].bucket, "parameters": item[1].parameters},
            tone=lambda item: tone_of_bucket(item[0]),
            over_base=True,
            shown=_SHOWN_ROWS,
            compact=True,
        )
        return Section(
            key="generation",
            title="Generated text",
            lead=(
                "Text generated from the prefix without correction by the true text: a passage "
                "that is shifted or changed in a few words still counts in part. Compare each "
                "overlap with that of the control, which texts of this kind have in common anyway, "
                "and with the type-token ratio: repetitive text overlaps by chance.",
            ),
            tables=(table,),
        )


def _name_decoding(metric: MetricRow) -> str:
    decoding = metric.settings.get("decoding")
    if not isinstance(decoding, str):
        return fmt.settings(metric.settings)
    return "greedy" if decoding == "greedy" else f"sampled, {fmt.clean_name(decoding, 40)}"


def _compare(window: Window, written: NDArray[np.int32], num_allowed: int) -> list[float]:
    """Return the numbers of a text in the order of the metrics."""
    overlap = compute_overlap(window.continuation_ids, written)
    num_edits = round(overlap.edit_distance * window.continuation_tokens)
    ratio = overlap.type_token_ratio
    assert ratio is not None, "a continuation has tokens"
    return [
        overlap.rouge_l,
        float(overlap.longest_run_tokens),
        overlap.edit_distance,
        float(num_edits <= num_allowed),
        float(overlap.bleu > APPROXIMATE_BLEU),
        ratio,
    ]
