"""Suites by name and path, and what is said of wrong ones."""

from pathlib import Path

import pytest

from memguard.audit.extraction import ExtractionProbe
from memguard.audit.membership import MembershipProbe
from memguard.audit.suite import PROBES, load_suite
from memguard.errors import ConfigError


def test_shipped_suite_is_the_default_probe() -> None:
    suite = load_suite("extraction")
    assert (suite.name, suite.version) == ("extraction", 1)
    assert suite.probes == (ExtractionProbe(), MembershipProbe())
    assert suite.has_membership
    assert [probe.name for probe in suite.probes] == list(PROBES)


def test_adapted_suite() -> None:
    suite = load_suite("extraction")
    assert suite.adapt() == suite
    adapted = suite.adapt(continuation_tokens=8, prefix_tokens=9, min_prefix_tokens=2)
    assert adapted.extraction == ExtractionProbe(
        continuation_tokens=8, prefix_tokens=9, min_prefix_tokens=2
    )
    assert adapted.has_membership


def test_unknown_suite() -> None:
    with pytest.raises(ConfigError, match=r"'audit\.suite' must be a YAML file or one of"):
        load_suite("no-such-suite")


def _problems(folder: Path, text: str) -> list[str]:
    path = folder / "s.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_suite(path)
    return [problem.removeprefix(f"{path}:") for problem in caught.value.problems]


def test_all_problems_with_their_places(tmp_path: Path) -> None:
    text = """\
name: mine
version: 1
probes:
  - name: extraction
    continuation_token: 50
    near_verbatim_threshold: 1.5
  - name: extractoin
"""
    found = sorted(_problems(tmp_path, text))
    assert [problem.split(" ")[:2] for problem in found] == [
        ["5:5", "'probes[0].continuation_token'"],
        ["6:5", "'probes[0].near_verbatim_threshold'"],
        ["7:5", "'probes[1].name'"],
    ]
    assert found[0].endswith("did you mean 'continuation_tokens'?")
    assert found[2].endswith("must be one of extraction, membership; got 'extractoin'")


@pytest.mark.parametrize(
    ("probes", "problem"),
    [
        ("[{name: membership}]", "needs 'extraction'"),
        ("[{name: extraction}, {name: extraction}]", "has 'extraction' twice"),
        ("[{continuation_tokens: 5}]", "must be one of extraction, membership; got None"),
        ("[]", "needs 'extraction'"),
        ("[extraction]", "'probes[0]'"),
    ],
)
def test_wrong_lists_of_probes(tmp_path: Path, probes: str, problem: str) -> None:
    problems = _problems(tmp_path, f"name: mine\nversion: 1\nprobes: {probes}\n")
    assert len(problems) == 1
    assert problem in problems[0]
    assert problems[0].startswith("3:")
