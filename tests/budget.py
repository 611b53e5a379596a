"""The budget of the default tier: `budget.json`, by file of tests and by fixture of the session.

Processes and optimizer steps are counts, the same on every machine: one more process fails, and so
does one more step in an entry of less than 20. In larger ones a twentieth is allowed: a run that a
test kills takes a few steps more or less before it ends, and repeats them. Processor
time varies by some per cent: an entry may exceed its figure by 40 % or 5 units, whichever is more,
and the sum of all by 25 %, but never what two cores do in five minutes. The number of tests is
printed, and not limited.
"""

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import tiers

PATH = Path(__file__).with_name("budget.json")
_ENTRY_SHARE, _ENTRY_UNITS, _SUM_SHARE = 0.40, 5.0, 0.25
MOST_UNITS = 240.0
"""300 s on two idle cores, of 2.1 s a unit, less a sixth: imports, collection and waiting."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a file of tests or a fixture costs; `units` are processor seconds until scaled."""

    units: float = 0.0
    processes: int = 0
    steps: int = 0
    tests: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def larger(self, other: "Cost") -> "Cost":
        """Return the larger of the two, figure by figure."""
        return Cost(*map(max, astuple(self), astuple(other)))

    def scaled(self, factor: float) -> "Cost":
        """Return the same with another unit of processor time."""
        return replace(self, units=self.units * factor)

    def values(self) -> list[float]:
        """Return what `Cost(*values)` takes."""
        return list(astuple(self))


def file_of(node_id: str) -> str:
    """Return the name of an entry: the file of a test, relative to the folder of the tests."""
    return node_id.split("::")[0].removeprefix("tests/")


def read() -> dict[str, Cost]:
    """Return the budget by entry."""
    entries = json.loads(PATH.read_text())
    return {name: Cost(**figures) for name, figures in entries.items()}


def table(costs: Mapping[str, Cost]) -> list[str]:
    """Return the lines of a table of all costs, the dearest first."""
    total = sum(costs.values(), Cost())
    rows = sorted(costs.items(), key=lambda item: -item[1].units)
    return [f"{'units':>7} {'processes':>9} {'steps':>6} {'tests':>6}"] + [
        f"{cost.units:7.1f} {cost.processes:9} {cost.steps:6} {cost.tests:6}  {name}"
        for name, cost in [*rows, ("all", total)]
    ]


def find_excesses(
    costs: Mapping[str, Cost], allowed: Mapping[str, Cost], *, whole: bool
) -> list[str]:
    """Return a line for each cost above the budget; the sum is judged where all files ran."""
    problems = []
    for name, cost in sorted(costs.items()):
        entry = allowed.get(name)
        if entry is None:
            problems.append(f"{name} has no entry")
            continue
        for what in ("processes", "steps"):
            got, limit = getattr(cost, what), getattr(entry, what)
            if what == "steps":
                limit += limit // 20
            if got > limit:
                problems.append(f"{name}: {got} {what}, {limit} allowed")
        if cost.units > _highest(entry):
            problems.append(
                f"{name}: {cost.units:.1f} units of processor time, {entry.units:.1f} expected and "
                f"{_highest(entry):.1f} allowed"
            )
    if whole:
        got, expected = (sum(all_of.values(), Cost()).units for all_of in (costs, allowed))
        if got > expected * (1 + _SUM_SHARE):
            problems.append(f"all: {got:.0f} units, {expected:.0f} expected (+{_SUM_SHARE:.0%})")
        if got > MOST_UNITS:
            problems.append(
                f"all: {got:.0f} units, and five minutes are {MOST_UNITS:.0f}: mark files slow"
            )
    if problems:
        problems.append(
            "Make them cheaper, or accept with `scripts/test.sh --accept-costs FILE...` and say in "
            "the commit message why the tests cost more."
        )
    return [f"tests/{PATH.name}: {line}" for line in problems]


def _highest(entry: Cost) -> float:
    return entry.units + max(_ENTRY_SHARE * entry.units, _ENTRY_UNITS)


def accept(costs: Mapping[str, Cost]) -> list[str]:
    """Write the costs of the files that ran into the budget, and say what has changed.

    A fixture's entry changes only where its cost exceeds it. Entries are removed whose file is gone
    or has no test of the default tier.
    """
    entries = read() if PATH.exists() else {}
    lines = []
    for name, cost in costs.items():
        before = entries.get(name)
        is_fixture = "::" in name
        if is_fixture and before and not find_excesses({name: cost}, {name: before}, whole=False):
            continue
        entries[name] = replace(cost, units=round(cost.units, 1), tests=0)
        lines.append(f"{name}: {before or 'new'} -> {entries[name]}")
    for name in [name for name in entries if not _is_default(PATH.parent / name.split("::")[0])]:
        del entries[name]
        lines.append(f"{name}: removed, no test of it runs by default")
    PATH.write_text(_as_json(entries))
    return lines


def _is_default(file: Path) -> bool:
    return file.exists() and tiers.may_have_default_tests(file.read_text())


def _as_json(entries: Mapping[str, Cost]) -> str:
    rows = (
        f"  {json.dumps(name)}: "
        + json.dumps({"units": cost.units, "processes": cost.processes, "steps": cost.steps})
        for name, cost in sorted(entries.items())
    )
    return "{\n" + ",\n".join(rows) + "\n}\n"
