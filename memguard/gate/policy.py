"""Policies: which metrics of an audit a release needs, in a YAML file.

    gate:
      - {metric: near_verbatim, on: trained, at_most: 0.10}
      - {metric: token_accuracy, on: r64, above_control: 0.05}
      - {metric: risk, on: trained, than: ../v1, at_most: 0.02}
    verdict: [none-found]
    triage: triage.yaml
    release: open-weights

Paths are relative to the policy. Which metrics and buckets exist is known only with an audit: what
a policy names and an audit lacks is judged, not refused here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from memguard.config import Document, load_yaml, validate
from memguard.config.settings import Settings
from memguard.config.yaml_text import MAX_PROBLEMS
from memguard.errors import ConfigError
from memguard.records.gate import ReleaseContext
from memguard.records.results import Statistic, write_parameters
from memguard.records.verdict import Level

EVERY_TRAINED = "trained"
"""`on: trained`: every trained bucket, each judged."""
RISK, EPSILON, FINDINGS = "risk", "epsilon", "findings"
LIMITS = ("at_most", "at_least", "above_control", "above_base")
_FREE: Mapping[str, tuple[str, ...]] = {
    RISK: ("on", "model", "at_most", "above_control", "above_base", "than"),
    EPSILON: ("at_most",),
    FINDINGS: ("probe", "at_most"),
}
"""What a rule about something else than one metric of the results table can set."""


def _check_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


def _read_parameters(value: Any) -> Any:
    return write_parameters(value) if isinstance(value, Mapping) else value


Limit = Annotated[float, BeforeValidator(_check_number)]


class Rule(Settings):
    """One rule of a policy."""

    metric: str = Field(description="a metric of the results table, or risk, epsilon or findings.")
    probe: str | None = Field(None, description="Only of this probe; null: of every probe.")
    parameters: Annotated[str | None, BeforeValidator(_read_parameters)] = Field(
        None,
        description="Only with these parameters, as 'queries=10' or {queries: 10}; '' is without "
        "any, null is all.",
    )
    on: str = Field(
        EVERY_TRAINED,
        description="A bucket; trained: every trained bucket, each judged; (trained): the pooled "
        "one.",
    )
    model: str = Field("trained", description="trained, base or reference.")
    statistic: Statistic | None = Field(
        None, description="Another statistic than the metric's own, as median."
    )
    at_most: Limit | None = Field(None, description="Largest value that passes.")
    at_least: Limit | None = Field(None, description="Smallest value that passes.")
    above_control: Limit | None = Field(
        None, description="Largest difference from the control that passes."
    )
    above_base: Limit | None = Field(
        None, description="Largest difference from the base model that passes."
    )
    than: str | None = Field(
        None,
        description="Run or audit folder of an earlier audit: 'at_most' limits the increase since.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        limits = [name for name in LIMITS if getattr(self, name) is not None]
        if len(limits) != 1:
            raise ValueError(
                f"needs exactly one of {', '.join(LIMITS)}; got {', '.join(limits) or 'none'}"
            )
        free = _FREE.get(self.metric)
        if free is not None:
            wrong = sorted(self.model_fields_set - {"metric", *free})
            if wrong:
                raise ValueError(
                    f"'{self.metric}' takes only {', '.join(free)}; got {', '.join(wrong)}"
                )
        if self.than is not None and self.at_most is None:
            raise ValueError("'than' needs 'at_most', the largest increase that passes")
        if self.above_base is not None and self.model != "trained":
            raise ValueError("'above_base' compares the trained model: leave 'model' out")
        if self.metric == FINDINGS and (self.limit < 0 or self.limit != int(self.limit)):
            raise ValueError(f"'at_most' must be a number of documents; got {self.limit:g}")
        return self

    @property
    def limit_name(self) -> str:
        """Which of `LIMITS` it has."""
        return next(name for name in LIMITS if getattr(self, name) is not None)

    @property
    def limit(self) -> float:
        """The limit, whichever kind it is."""
        return float(getattr(self, self.limit_name))


class Policy(Settings):
    """A policy file."""

    gate: tuple[Rule, ...] = Field((), description="The rules.")
    verdict: tuple[Level, ...] | None = Field(
        None, description="Levels of the audit's verdict that pass, as [none-found]."
    )
    triage: str | None = Field(None, description="File of the accepted documents.")
    release: ReleaseContext | None = Field(
        None, description="How the model will be released: internal, api or open-weights."
    )

    @field_validator("verdict")
    @classmethod
    def _check_verdict(cls, levels: tuple[Level, ...] | None) -> tuple[Level, ...] | None:
        if levels == ():
            raise ValueError("must name a level that passes, as [none-found]; or leave it out")
        return levels


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPolicy:
    """A policy and its text."""

    policy: Policy
    text: str
    folder: Path
    """Where the paths that it names begin."""
    document: Document


def load_policy(path: Path) -> LoadedPolicy:
    """Read a policy file; ConfigError has one line for each problem, with its place."""
    document = load_yaml(path)
    return _check(document, document.text, path.parent)


def read_policy(values: Mapping[str, Any]) -> LoadedPolicy:
    """Check a policy given as a dictionary; its paths are relative to the working folder."""
    document = Document(path="policy", values=dict(values), places={})
    loaded = _check(document, "", Path())
    text = json.dumps(loaded.policy.model_dump(mode="json", exclude_unset=True), indent=2)
    return replace(loaded, text=f"{text}\n")


def _check(document: Document, text: str, folder: Path) -> LoadedPolicy:
    policy = validate(Policy, _restore_on(document), document)
    if not policy.gate and not policy.verdict:
        raise ConfigError(
            f"{document.path} has no rule: 'gate' needs at least one, as {{metric: near_verbatim, "
            "on: trained, at_most: 0.10}, or 'verdict' the levels that pass"
        )
    problems, first = [], dict[Rule, int]()
    for number, rule in enumerate(policy.gate):
        if first.setdefault(rule, number) < number:
            place = document.locate(("gate", number))
            problems.append(f"{place} 'gate[{number}]' is the same rule as 'gate[{first[rule]}]'")
    if problems:
        if (more := len(problems) - MAX_PROBLEMS) > 0:
            problems[MAX_PROBLEMS:] = [f"{document.path} has {more:,} more such problems"]
        raise ConfigError(*problems)
    return LoadedPolicy(policy=policy, text=text, folder=folder, document=document)


def _restore_on(document: Document) -> dict[str, Any]:
    """Return the values with the key `on`, which YAML 1.1 reads as true."""
    values, rules = dict(document.values), document.values.get("gate")
    if not isinstance(rules, list):
        return values

    def restore(number: int, rule: Any) -> Any:
        if not isinstance(rule, dict) or ("gate", number, "on") not in document.places:
            return rule
        return {"on" if key is True else key: value for key, value in rule.items()}

    values["gate"] = [restore(number, rule) for number, rule in enumerate(rules)]
    return values
