"""Change the code in one place at a time and see whether a test fails: which rules no test holds.

    python scripts/mutants.py                        all of mutants.toml
    python scripts/mutants.py --only verify-newest lora-copies
    python scripts/mutants.py --list
    python scripts/mutants.py --check                which named tests the default run has not

A mutant is a change of behaviour that a user would suffer from. It is made in a copy of the tracked
files, as they are now, and in no other place. Its own tests run first, up to the first that fails;
the default suite runs only if they pass. A mutant that no test kills survives: a test is missing.
All tests run as by default, so that one marked `slow` alone kills nothing. Where no test ran,
nothing was killed: the entry is broken.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
NAMED_LIMIT_S, SUITE_LIMIT_S = 900, 7200
"""Most time that the tests of a mutant, and the default suite, may take; longer is a kill."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_PASSED = re.compile(r"^PASSED (.+)$", re.MULTILINE)
_COLLECTED = re.compile(r"^(\S+\.py::.+)$", re.MULTILINE)
_KILLED = (None, 1, 2)
"""How pytest ends where a test found the mutant: too late, a failure, or no import (2). It found
nothing where no test ran (5) or was there to run (4)."""

State = Literal["killed", "survived", "may survive", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One change of one file."""

    name: str
    file: str
    """Relative to the project."""
    old: str
    """Text that the file has exactly once."""
    new: str
    tests: tuple[str, ...]
    """Files and node ids that run first."""
    why: str | None = None
    """Why no user could notice it; such a mutant may survive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one mutant."""

    name: str
    file: str
    state: State
    by: str
    """The test that failed, or what else happened."""
    took_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tested:
    """How a run of pytest ended."""

    code: int | None
    """None: it took too long and was stopped."""
    output: str

    @property
    def failed(self) -> list[str]:
        """Node ids of the tests that failed."""
        return _FAILED.findall(self.output)

    @property
    def passed(self) -> list[str]:
        """Node ids of the tests that passed."""
        return _PASSED.findall(self.output)

    def describe(self) -> str:
        """Return the first test that failed, or how else pytest ended."""
        if self.code is None:
            return "timeout, which counts as killed"
        if self.code == 5:
            return "no test ran"
        return self.failed[0] if self.failed else f"pytest ended with {self.code}"


def read_mutants(path: Path) -> list[Mutant]:
    """Read a list of mutants, each a table with the mutant's name.

    Raises:
        ValueError: a field is unknown or missing.
    """
    mutants = []
    for name, fields in tomllib.loads(path.read_text()).items():
        try:
            mutants.append(Mutant(name=name, **{**fields, "tests": tuple(fields["tests"])}))
        except (KeyError, TypeError) as error:
            raise ValueError(f"'{name}' in {path.name}: {error}") from error
    return mutants


def find_error(mutant: Mutant, root: Path) -> str | None:
    """Return why a mutant cannot be made in a project; None if it can."""
    path = root / mutant.file
    if not path.is_file():
        return f"'{mutant.name}': there is no '{mutant.file}'"
    count = path.read_text().count(mutant.old)
    if count != 1:
        return (
            f"'{mutant.name}': 'old' must be in '{mutant.file}' exactly once, it is {count} times"
        )
    if mutant.old == mutant.new:
        return f"'{mutant.name}': 'old' and 'new' are the same"
    missing = [test for test in mutant.tests if not (root / test.partition("::")[0]).exists()]
    if missing or not mutant.tests:
        return f"'{mutant.name}': 'tests' must name tests; there is no '{''.join(missing[:1])}'"
    return None


def copy_tracked(root: Path, folder: Path) -> None:
    """Copy the files that git tracks, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def make_mutant(mutant: Mutant, folder: Path) -> None:
    """Change the file of a copy of the project."""
    path = folder / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    # Bytecode of the same second and size would be taken for that of the changed file.
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()


def run_tests(folder: Path, tests: Sequence[str], *, limit_s: float, stops: bool = True) -> Tested:
    """Run pytest in a copy of the project.

    Args:
        folder: the copy, which is also what child processes import.
        tests: files and node ids; empty for the default suite.
        limit_s: the most it may take.
        stops: whether it ends with the first test that fails.
    """
    options = ["-q", "-rfEp", "-n", "0", "-p", "no:cacheprovider", *(["-x"] if stops else [])]
    place = f"--basetemp={folder.parent}/pytest"
    command = [sys.executable, "-m", "pytest", *options, place, *tests]
    # A file, not a pipe: what a killed test has left would keep a pipe open.
    with (folder.parent / "output").open("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=make_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_group(process)
        output.seek(0)
        return Tested(code=code, output=output.read())


def make_environment(folder: Path) -> dict[str, str]:
    """Return the environment in which a copy, and no installed package, is imported."""
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    # Every mutant is a copy of what the first run has compiled.
    settings |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": ""}
    return {**os.environ, **settings, "PYTHONPATH": str(folder)}


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End pytest, if it still runs, and all that it has started and left."""
    for number, patience_s in ((signal.SIGTERM, 5), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def check_import(folder: Path, package: str) -> None:
    """Check that Python imports a package from a copy.

    Raises:
        SystemExit: it imports another one.
    """
    command = [sys.executable, "-c", f"import {package}; print({package}.__file__)"]
    found = subprocess.run(
        command, cwd=folder.parent, env=make_environment(folder), capture_output=True, text=True
    )
    if not found.stdout.startswith(str(folder)):
        raise SystemExit(f"{package} is not imported from the copy: {found.stdout}{found.stderr}")


def is_among(test: str, named: Sequence[str]) -> bool:
    """Return whether a test that ran is one of those that files and node ids name."""
    return any(test == name or test.startswith((f"{name}::", f"{name}[")) for name in named)


def find_missing(named: Sequence[str], found: Sequence[str]) -> list[str]:
    """Return the files and node ids of which no test was found."""
    return [name for name in named if not any(is_among(test, [name]) for test in found)]


def find_obstacle(named: Sequence[str], first: Tested) -> str:
    """Return why the run without a mutant makes its tests no proof; empty if nothing does."""
    failed = [test for test in first.failed if is_among(test, named)]
    if failed:
        return f"without the mutant too: {failed[0]}"
    missing = find_missing(named, first.passed)
    return f"no test ran by default: {missing[0]}" if missing else ""


def collect_default(root: Path) -> list[str]:
    """Return the node ids of the default run.

    Raises:
        SystemExit: pytest cannot collect them.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0"]
    done = subprocess.run(
        command, cwd=root, env=make_environment(root), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"pytest --collect-only ended with {done.returncode}\n{done.stdout}")
    return _COLLECTED.findall(done.stdout)


def run_mutants(
    root: Path, mutants: Sequence[Mutant], say: Callable[[str], None]
) -> Iterator[Outcome]:
    """Make one mutant after the other and yield what became of it.

    Args:
        root: the project, which is not changed.
        mutants: changes that can be made.
        say: receives progress.

    Raises:
        SystemExit: the tests cannot run without a mutant, or not in a copy.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        here = Path(name).resolve()
        whole, changed = here / "whole", here / "changed"
        copy_tracked(root, whole)
        # Real checkpoints and text lie beside a project.
        if (root.parent / "shared").is_dir():
            (here / "shared").symlink_to((root.parent / "shared").resolve())
        for package in sorted({Path(mutant.file).parts[0] for mutant in mutants}):
            check_import(whole, package)
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        say(f"without a mutant: {len(tests)} files and tests")
        first = run_tests(whole, tests, limit_s=SUITE_LIMIT_S, stops=False)
        if first.code not in (0, 1):
            raise SystemExit(f"without a mutant: {first.describe()}\n{first.output[-2000:]}")
        for number, mutant in enumerate(mutants, 1):
            started = time.monotonic()
            state: State = "broken"
            by = find_obstacle(mutant.tests, first)
            if not by:
                shutil.copytree(whole, changed)
                make_mutant(mutant, changed)
                state, by = _try(changed, mutant)
                shutil.rmtree(changed, ignore_errors=True)
            took_s = round(time.monotonic() - started, 1)
            say(f"[{number}/{len(mutants)}] {mutant.name}: {state} ({took_s:.0f} s): {by}")
            yield Outcome(name=mutant.name, file=mutant.file, state=state, by=by, took_s=took_s)


def _try(folder: Path, mutant: Mutant) -> tuple[State, str]:
    tested = run_tests(folder, mutant.tests, limit_s=NAMED_LIMIT_S)
    if tested.code == 0:
        tested = run_tests(folder, [], limit_s=SUITE_LIMIT_S)
    if tested.code != 0:
        return ("killed" if tested.code in _KILLED else "broken"), tested.describe()
    return ("survived", "nothing") if mutant.why is None else ("may survive", mutant.why)


def check_tests(mutants: Sequence[Mutant]) -> int:
    """Print each named test of which nothing is in the default run; return 1 if there is one."""
    found = collect_default(ROOT)
    lines = [
        f"{mutant.name}: {name}" for mutant in mutants for name in find_missing(mutant.tests, found)
    ]
    print("\n".join([*lines, f"{len(found)} tests by default, {len(lines)} named ones missing"]))
    return 1 if lines else 0


def main() -> int:
    """Run the mutants of the list; return 1 if one survived or its tests are no proof."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants instead of all")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    parser.add_argument(
        "--check", action="store_true", help="show the named tests that do not run by default"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there too")
    given = parser.parse_args()
    mutants = read_mutants(LIST)
    unknown = sorted({*(given.only or ())} - {mutant.name for mutant in mutants})
    if unknown:
        parser.error(f"there is no mutant {', '.join(unknown)}: see --list")
    chosen = [mutant for mutant in mutants if given.only is None or mutant.name in given.only]
    if given.list:
        for mutant in chosen:
            print(f"{mutant.name:32} {mutant.file}")
        return 0
    errors = [error for mutant in chosen if (error := find_error(mutant, ROOT))]
    if errors:
        parser.error("\n".join(errors))
    if given.check:
        return check_tests(chosen)
    # As Ctrl-C: the copy is removed, and pytest does not go on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes: list[Outcome] = []
    try:
        for outcome in run_mutants(ROOT, chosen, lambda line: print(line, flush=True)):
            outcomes.append(outcome)
            if given.json is not None:
                given.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    except KeyboardInterrupt:
        print(f"interrupted after {len(outcomes)} of {len(chosen)} mutants", file=sys.stderr)
        return 130
    bad = [each for each in outcomes if each.state in ("survived", "broken")]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} as they should be")
    for each in bad:
        print(f"{each.state}: {each.name} ({each.file}): {each.by}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
