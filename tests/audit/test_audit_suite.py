"""Suites by name and path, and what is said of wrong ones."""

from pathlib import Path

import pytest

from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.mask_consistency import MaskConsistencyProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.membership_scores import MEMBERSHIP_SCORES
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.suite import PROBES, load_audit_suite, load_suite
from memguard.config import AuditConfig
from memguard.errors import ConfigError


def test_the_default_suite_generates_for_near_verbatim_alone() -> None:
    suite = load_suite("extraction")
    assert (suite.name, suite.version) == ("extraction", 3)
    assert suite.probes == (
        ExtractionProbe(),
        SamplingProbe(),
        MembershipProbe(),
        CanaryProbe(),
        MaskConsistencyProbe(),
    )
    assert suite.extraction == ExtractionProbe()
    (membership,) = (probe for probe in suite.probes if isinstance(probe, MembershipProbe))
    assert all(not MEMBERSHIP_SCORES[name].has_own_pass for name in membership.scores)


def test_the_full_suite_has_every_probe_and_every_score() -> None:
    suite = load_suite("full")
    assert [probe.name for probe in suite.probes] == list(PROBES)
    assert [type(probe) for probe in suite.probes] == list(PROBES.values())
    (membership,) = (probe for probe in suite.probes if isinstance(probe, MembershipProbe))
    assert set(membership.scores) == set(MEMBERSHIP_SCORES)


def test_every_probe_says_which_it_is_and_has_a_version() -> None:
    for name, kind in PROBES.items():
        probe = kind.model_validate({"name": name})
        assert probe.name == name
        assert probe.VERSION >= 1
        assert kind(**probe.model_dump()) == probe


def test_the_lengths_of_an_audit_replace_those_of_its_suite() -> None:
    suite = load_suite("extraction")
    assert load_audit_suite(AuditConfig()) == suite
    settings = AuditConfig(continuation_tokens=8, prefix_tokens=9, min_prefix_tokens=2)
    adapted = load_audit_suite(settings)
    assert adapted.extraction == ExtractionProbe(
        continuation_tokens=8, prefix_tokens=9, min_prefix_tokens=2
    )
    assert adapted.probes[1:] == suite.probes[1:]


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
    max_edit_share: 1.5
  - name: extractoin
  - name: membership
    scores: [loss, lose]
  - name: sampling
    schemes:
      - {temperature: 1}
      - {top_p: 2}
"""
    found = sorted(_problems(tmp_path, text), key=lambda problem: int(problem.split(":")[0]))
    assert [problem.replace("':", "'").split(" ")[:2] for problem in found] == [
        ["5:5", "'probes[0].continuation_token'"],
        ["6:5", "'probes[0].max_edit_share'"],
        ["7:5", "'probes[1].name'"],
        ["9:5", "'probes[2].scores'"],
        ["13:10", "'probes[3].schemes[1].top_p'"],
    ]
    assert found[0].endswith("did you mean 'continuation_tokens'?")
    others = "or a probe of an installed package (none)"
    assert found[2].endswith(f"one of {', '.join(PROBES)}, {others}; got 'extractoin'")
    assert "must be of loss, min_k, " in found[3]
    assert "got 'lose'" in found[3]


@pytest.mark.parametrize(
    ("probes", "problem"),
    [
        ("[{name: membership}]", "needs 'extraction'"),
        ("[{name: extraction}, {name: extraction}]", "has 'extraction' twice"),
        ("[{continuation_tokens: 5}]", "must be one of extraction, grid, "),
        ("[]", "needs 'extraction'"),
        ("[extraction]", "'probes[0]'"),
        ("[{name: extraction}, {name: sampling, schemes: []}]", "'probes[1].schemes'"),
    ],
)
def test_wrong_lists_of_probes(tmp_path: Path, probes: str, problem: str) -> None:
    problems = _problems(tmp_path, f"name: mine\nversion: 1\nprobes: {probes}\n")
    assert len(problems) == 1
    assert problem in problems[0]
    assert problems[0].startswith("3:")
