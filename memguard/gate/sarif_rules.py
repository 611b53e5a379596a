"""The rules of `report.sarif`: one for each probe with findings and each rule of the policy."""

from collections.abc import Sequence
from typing import Any

from memguard.pages import formatting as fmt
from memguard.records.gate import Judgement


class RuleTable:
    """The rules of one file, and references of results to them.

    Args:
        judgements: of the gate; each of their rules is listed.
        probes: those with findings.
    """

    def __init__(self, judgements: Sequence[Judgement], probes: Sequence[str]) -> None:
        self._judged: dict[int, list[Judgement]] = {}
        for judgement in sorted(judgements, key=lambda judgement: judgement.rule):
            self._judged.setdefault(judgement.rule, []).append(judgement)
        self._probes = list(probes)
        names = [_name_rule(rule) for rule in self._judged]
        names += [_name_probe(probe) for probe in self._probes]
        self._indices = {name: index for index, name in enumerate(names)}

    def refer_to_rule(self, rule: int) -> dict[str, Any]:
        """Return the fields of a result that name a rule of the policy."""
        name = _name_rule(rule)
        return {"ruleId": name, "ruleIndex": self._indices[name]}

    def refer_to_probe(self, probe: str) -> dict[str, Any]:
        """Return the fields of a result that name the probe of a finding."""
        name = _name_probe(probe)
        return {"ruleId": name, "ruleIndex": self._indices[name]}

    def describe(self) -> list[dict[str, Any]]:
        """Return the descriptors, in the order of their indices."""
        return [
            *(_describe_rule(rule, judged) for rule, judged in self._judged.items()),
            *(_describe_probe(probe) for probe in self._probes),
        ]


def _name_rule(rule: int) -> str:
    return f"gate/rule-{rule}" if rule else "gate/verdict"


def _name_probe(probe: str) -> str:
    return f"finding/{fmt.clean_name(probe)}"


def _describe_rule(rule: int, judged: Sequence[Judgement]) -> dict[str, Any]:
    metrics = sorted({judgement.metric for judgement in judged if judgement.metric})
    named = f" ({fmt.clean_text(', '.join(metrics), 200)})" if metrics else ""
    return {
        "id": _name_rule(rule),
        "name": f"GateRule{rule}" if rule else "GateVerdict",
        "shortDescription": {
            "text": f"Rule {rule} of the policy{named}"
            if rule
            else "The levels of the verdict that the policy allows"
        },
        "fullDescription": {
            "text": "Judged on the two-sided 95 % interval of a row of the audit's results: within "
            "the limit it passes, beyond it it fails, across it nothing is decided."
            if rule
            else "The verdict of the audit has one of four levels; the policy lists those that "
            "pass."
        },
        "defaultConfiguration": {"level": "error"},
    }


def _describe_probe(probe: str) -> dict[str, Any]:
    name = fmt.clean_name(probe)
    return {
        "id": _name_probe(probe),
        "name": "ExtractedDocument",
        "shortDescription": {"text": f"A trained document is extracted by the probe '{name}'"},
        "fullDescription": {
            "text": "The model was trained on the document, and the probe obtains its continuation "
            "from the model. The document is named by its id; its text is not in this file."
        },
        "defaultConfiguration": {"level": "warning"},
    }
