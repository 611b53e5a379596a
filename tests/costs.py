"""What the tests cost, by file: processor time with that of ranks and children, processes, steps.

    scripts/test.sh --costs                     print a table
    scripts/test.sh --budget                    fail where a cost exceeds `budget.json` (CI does)
    scripts/test.sh --accept-costs FILE...      write what FILE... cost now into `budget.json`

`budget.json` is of the default tier: with another `-m` costs are printed and not judged.

Processor time is counted in units. It is divided by that of a fixed loop that runs between tests,
so that a figure means the same on a slow, a fast and a busy machine. Ranks are children of a server
and not of the process that waits for them: the kernel's count for the server includes all of them,
their own children and those that were killed. Optimizer steps are counted in the process of the
tests and in forks of the server; of other children only the processor time is known.

A fixture of the session is set up by each worker that needs it, in whichever test comes first. Its
cost is an entry of its own.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import budget
import pytest
import step_count
import tiers
from budget import Cost

_SECONDS_BETWEEN_CALIBRATIONS = 45
_OPTIONS = ("costs", "budget", "accept_costs")


def calibrate() -> float:
    """Return one unit in seconds, by a quarter of it: tensor products, small kernels, JSON."""
    import torch  # Not at the top: only processes that run tests calibrate.

    start = time.process_time()
    square, small = torch.full((192, 192), 0.01), torch.ones(16)
    document = {"text": "ten words " * 20, "values": list(range(50))}
    for _ in range(700):
        square = (square @ square).clamp(-1, 1)
        for _ in range(30):
            small = small * 0.5 + 0.5
        json.loads(json.dumps(document))
    return 4 * (time.process_time() - start)


@dataclass(eq=False)
class _Meter:
    """Totals of this process and of all that it has started."""

    steps_file: Path
    processes: int = 0

    def start(self) -> None:
        """Count processes from now on."""
        sys.addaudithook(self._see_event)
        start_process = BaseProcess.start

        def start_counted(process: BaseProcess) -> None:
            self.processes += 1
            start_process(process)

        BaseProcess.start = start_counted  # type: ignore[method-assign]

    def _see_event(self, event: str, _: Any) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn"):
            self.processes += 1

    def read(self) -> Cost:
        """Return all that was used until now, in processor seconds."""
        times = os.times()
        seconds = times.user + times.system + times.children_user + times.children_system
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if server is not None:
            # proc(5): utime, stime, cutime, cstime, counted from behind the name in brackets.
            fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
            seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        return Cost(seconds, self.processes, self.steps_file.stat().st_size)


@dataclass(eq=False)
class CostPlugin:
    """Measures each test and each fixture of the session in one process of the tests."""

    meter: _Meter
    costs: dict[str, Cost] = field(default_factory=dict)
    calibrations: list[float] = field(default_factory=list)
    _calibrated_at: float = 0.0
    _inner: Cost = field(default_factory=Cost)
    """Sum of the entries inside the one that is measured."""

    def calibrate(self) -> None:
        self.calibrations.append(calibrate())
        self._calibrated_at = time.monotonic()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if time.monotonic() - self._calibrated_at > _SECONDS_BETWEEN_CALIBRATIONS:
            self.calibrate()
        result = yield from self._measured(budget.file_of(item.nodeid), tests=1)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        if fixturedef.scope != "session" or fixturedef.baseid.endswith(".py"):
            return (yield)
        # The place where it stands: `conftest.py::tiny_folder`, `audit/conftest.py::base`.
        place = budget.file_of(f"{fixturedef.baseid or 'tests'}/conftest.py")
        return (yield from self._measured(f"{place}::{fixturedef.argname}"))

    def _measured(self, name: str, tests: int = 0) -> Iterator[None]:
        """Add what happens meanwhile to the entry `name`, less what is added to entries inside."""
        before, outer = self.meter.read(), self._inner
        self._inner = Cost()
        try:
            return (yield)
        finally:
            whole = self.meter.read() - before
            own = whole - self._inner + Cost(tests=tests)
            self._inner = outer + whole
            self.costs[name] = self.costs.get(name, Cost()) + own

    def result(self) -> dict[str, Cost]:
        """Return the costs by entry, with processor time in units."""
        self.calibrate()
        unit = statistics.median(self.calibrations)
        return {name: cost.scaled(1 / unit) for name, cost in self.costs.items()}


@dataclass(eq=False)
class _Session:
    """Collects the costs of all workers, and judges them at the end."""

    config: pytest.Config
    here: CostPlugin | None
    merged: dict[str, Cost] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        self._merge({name: Cost(*values) for name, values in output.get("costs", {}).items()})

    def _merge(self, costs: dict[str, Cost]) -> None:
        for name, cost in costs.items():
            before = self.merged.get(name, Cost())
            # Two workers share the tests of a file, and both set up a fixture of the session.
            self.merged[name] = before.larger(cost) if "::" in name else before + cost

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.here is not None:
            self._merge(self.here.result())
        options = self.config.option
        if options.costs:
            self.report += budget.table(self.merged)
        if not tiers.is_default(self.config):
            self.report += ["With this -m, costs are not those of the default tier."]
        elif options.accept_costs and session.exitstatus == 0:
            self.report += budget.accept(self.merged)
        elif options.budget:
            whole = self.config.args_source.name != "ARGS"
            problems = budget.find_excesses(self.merged, budget.read(), whole=whole)
            self.report += problems or [f"Costs are within tests/{budget.PATH.name}."]
            if problems and session.exitstatus == 0:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("costs")
        for line in self.report:
            terminalreporter.write_line(line)


class _Worker:
    """Sends the costs of a worker of pytest-xdist to the session."""

    def __init__(self, plugin: CostPlugin) -> None:
        self._plugin = plugin

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] = session.config.workeroutput  # type: ignore[attr-defined]
        output["costs"] = {name: cost.values() for name, cost in self._plugin.result().items()}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("costs", "what the tests cost")
    group.addoption("--costs", action="store_true", help="print costs by file")
    group.addoption("--budget", action="store_true", help="fail where costs exceed budget.json")
    group.addoption("--accept-costs", action="store_true", help="write costs into budget.json")


def pytest_configure(config: pytest.Config) -> None:
    if not any(config.getoption(name) for name in _OPTIONS):
        return
    is_worker = hasattr(config, "workerinput")
    plugin = None
    if is_worker or not config.getoption("numprocesses", None):
        folder = Path(tempfile.mkdtemp())
        meter = _Meter(folder / "steps")
        meter.steps_file.touch()
        os.environ[step_count.VARIABLE] = str(meter.steps_file)
        step_count.count_steps()
        meter.start()
        plugin = CostPlugin(meter)
        plugin.calibrate()
        config.pluginmanager.register(plugin, "costs-of-this-process")
    if is_worker:
        assert plugin is not None
        config.pluginmanager.register(_Worker(plugin), "costs-of-a-worker")
    else:
        config.pluginmanager.register(_Session(config, plugin), "costs-of-the-session")
