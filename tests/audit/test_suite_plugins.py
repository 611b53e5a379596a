"""Suites with probes of other packages: what is loaded, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_examples import PACKAGE, installed, read_example, write_package, write_suite

from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.suite import load_suite
from memguard.errors import ConfigError


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder of packages that this process finds."""
    folder = tmp_path / "site"
    with installed(folder):
        yield folder


def find_problem(folder: Path, probe: str) -> str:
    """Return the only problem of a suite with a probe."""
    with pytest.raises(ConfigError) as caught:
        load_suite(write_suite(folder / "suite.yaml", probe))
    (problem,) = caught.value.problems
    return problem


def test_settings_are_read_and_the_package_is_known(site: Path, tmp_path: Path) -> None:
    write_package(site)
    suite = load_suite(write_suite(tmp_path / "s.yaml", "{name: first_word, tokens: 3}"))
    probe = suite.probes[1]
    assert suite.packages == {"first_word": PACKAGE}
    assert not suite.counts(probe)
    assert suite.describe_probes()[1] == {
        "name": "first_word",
        "version": 1,
        "tokens": 3,
        "package": PACKAGE,
        "in_verdict": False,
    }
    counted = load_suite(write_suite(tmp_path / "s.yaml", "{name: first_word, in_verdict: true}"))
    assert counted.counts(counted.probes[1])


def test_an_own_name_is_never_taken_from_a_package(site: Path, tmp_path: Path) -> None:
    code = read_example().replace('"first_word"', '"extraction"')
    write_package(site, code, probe="extraction")
    suite = load_suite(write_suite(tmp_path / "s.yaml"))
    assert type(suite.probes[0]) is ExtractionProbe
    assert suite.packages == {}


@pytest.mark.parametrize(
    ("probe", "problem"),
    [
        ("{name: first_word, token: 3}", "did you mean 'tokens'?"),
        ("{name: first_word, tokens: 0}", "'probes[1].tokens'"),
        ("{name: first_word, in_verdict: maybe}", "must be true or false; got 'maybe'"),
        ("{name: first_wrod}", "a probe of an installed package (first_word); got 'first_wrod'"),
        ("{name: grid, in_verdict: true}", "'probes[1].in_verdict'"),
    ],
)
def test_wrong_settings(site: Path, tmp_path: Path, probe: str, problem: str) -> None:
    write_package(site)
    assert problem in find_problem(tmp_path, probe)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("1 / 0", f"of package {PACKAGE} cannot be imported (ZeroDivisionError at "),
        ("FirstWordProbe = dict", "must be a subclass of memguard.audit.probe.Probe"),
        (None, "its setting 'name' must have the default 'second_word'"),
    ],
)
def test_what_is_no_probe(site: Path, tmp_path: Path, code: str | None, problem: str) -> None:
    write_package(site, code, probe="second_word")
    assert problem in find_problem(tmp_path, "{name: second_word}")


def test_two_packages_with_one_name_are_refused(site: Path, tmp_path: Path) -> None:
    write_package(site)
    write_package(site, module="another")
    problem = find_problem(tmp_path, "{name: first_word}")
    assert "another 1.2 and first-word 1.2 both define the probe 'first_word'" in problem
