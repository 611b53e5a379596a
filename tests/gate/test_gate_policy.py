"""Policy files: what they set, and every mistake in one line with its place."""

import time
from pathlib import Path

import pytest
from gate_results import make_judgement, make_result

from memguard.errors import ConfigError
from memguard.gate.policy import load_policy, read_policy
from memguard.gate.rendered import render_junit


def write(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


def test_a_policy_is_read_with_its_text_and_its_folder(tmp_path: Path) -> None:
    text = (
        "gate:\n"
        "  - {metric: near_verbatim, on: trained, at_most: 1e-1}\n"
        "  - metric: within_queries\n"
        "    parameters: {queries: 10}\n"
        "    on: r64\n"
        "    above_control: 0.05\n"
        "verdict: [none-found, inconclusive]\n"
        "triage: ../triage.yaml\n"
        "release: open-weights\n"
    )
    loaded = load_policy(write(tmp_path, text))
    first, second = loaded.policy.gate
    # `on` is true in YAML 1.1, and 1e-1 a text.
    assert (first.metric, first.on, first.at_most, first.limit) == (
        *("near_verbatim", "trained"),
        *(0.1, 0.1),
    )
    assert (second.parameters, second.on, second.limit) == ("queries=10", "r64", 0.05)
    assert loaded.policy.verdict == ("none-found", "inconclusive")
    assert loaded.folder / "../triage.yaml" == tmp_path / "../triage.yaml"
    assert loaded.policy.release == "open-weights"
    assert loaded.text == text


def test_a_policy_of_python_is_the_same() -> None:
    loaded = read_policy({"gate": [{"metric": "risk", "on": "r4", "at_most": 0.1}]})
    assert (loaded.policy.gate[0].on, loaded.folder) == ("r4", Path())
    assert '"metric": "risk"' in loaded.text


RULE = "gate:\n  - {metric: risk, on: trained, at_most: 0.1}\n"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (
            "gate:\n  - {metric: risk, at_mst: 0.1}\n",
            2,
            "'gate[0].at_mst' is not a setting; did you",
        ),
        ("gates: []\n", 1, "'gates' is not a setting; did you mean 'gate'?"),
        ("gate:\n  - {on: trained, at_most: 0.1}\n", 2, "'gate[0].metric' is missing"),
        ("gate:\n  - {metric: risk}\n", 2, "needs exactly one of at_most"),
        ("gate:\n  - {metric: risk, at_most: 0.1, above_base: 0}\n", 2, "got at_most, above_base"),
        ("gate:\n  - {metric: risk, at_most: true}\n", 2, "should be a number"),
        ("gate:\n  - {metric: risk, at_most: .nan}\n", 2, "should be a finite number"),
        ("gate:\n  - {metric: risk, at_most: 10 %}\n", 2, "should be a valid number"),
        ("gate:\n  - {metric: risk, probe: grid, at_most: 0.1}\n", 2, "'risk' takes only on"),
        ("gate:\n  - {metric: epsilon, on: r4, at_most: 8}\n", 2, "'epsilon' takes only at_most"),
        ("gate:\n  - {metric: findings, at_most: 0.5}\n", 2, "must be a number of documents"),
        ("gate:\n  - {metric: auc, than: x, at_least: 0.5}\n", 2, "'than' needs 'at_most'"),
        ("gate:\n  - {metric: auc, model: base, above_base: 0.5}\n", 2, "leave 'model' out"),
        (RULE + "  - {metric: risk, on: trained, at_most: 0.1}\n", 3, "is the same rule as"),
        (RULE + "verdict: [none-fond]\n", 3, "did you mean 'none-found'?"),
        (RULE + "verdict: []\n", 3, "must name a level that passes"),
        (RULE + "release: hub\n", 3, "should be 'internal', 'api' or 'open-weights'"),
        (RULE + "gate: []\n", 3, "'gate' is set twice"),
        ("gate: [\n", 2, "is not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_file_and_line(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}:{line}:")
    assert said in problem


@pytest.mark.parametrize("text", ["gate: []\n", "release: api\n", "{}\n"])
def test_a_policy_without_a_rule_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="has no rule"):
        load_policy(write(tmp_path, text))


def test_many_equal_rules_are_few_lines(tmp_path: Path) -> None:
    rule = "  - {metric: risk, on: trained, at_most: 0.1}\n"
    path = write(tmp_path, RULE + rule * 3000)
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == f"{path} has 2,980 more such problems"


def test_levels_alone_are_a_policy(tmp_path: Path) -> None:
    assert load_policy(write(tmp_path, "verdict: [none-found]\n")).policy.gate == ()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy.yaml cannot be read: No such file"):
        load_policy(tmp_path / "policy.yaml")


def test_the_time_of_a_policy_is_linear_in_its_rules() -> None:
    def measure(count: int) -> float:
        began = time.process_time()
        read_policy({"gate": [{"metric": f"m{n}", "at_most": 0.1} for n in range(count)]})
        one = make_judgement("pass")
        many = (one.model_copy(update={"rule": number + 1}) for number in range(count))
        render_junit(make_result(*many))
        return time.process_time() - began

    measure(10)
    assert measure(1500) <= 12 * measure(150) + 0.05
