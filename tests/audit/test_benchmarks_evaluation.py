"""Tasks on a real model: every item's score is that of lm-eval's own model class.

    ours     `evaluate_task` on the model that is loaded
    theirs   lm-eval's `evaluate` with its `HFLM` on the folder of the model, one row at a time

The model has 128 positions, so that prompts are cut and texts have several windows; its tokenizer
adds a token at the begin, without which the right answers stay right and items differ by nats.
"""

import json
import logging
import math
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_examples import (
    CONTEXT,
    Reference,
    ask_lm_eval,
    check_items,
    export_model,
    make_settings,
    read_rows,
)

from memguard.audit.benchmarks.answers import Evaluation
from memguard.audit.benchmarks.evaluation import evaluate_task
from memguard.audit.benchmarks.tasks import OpenedTask, open_tasks
from memguard.audit.decoding import Decoder
from memguard.errors import ConfigError, ForeignError, ModelError
from memguard.hf.checkpoint import load_tokenizer
from memguard.hf.load import load_model
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.records.utility import TaskMetric
from memguard.runtime import Runtime

pytestmark = pytest.mark.slow

TASKS = ("choice", "shots", "chat", "rolling", "generation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    return export_model(tmp_path_factory.mktemp("exported"), shared_data)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> dict[str, OpenedTask]:
    settings = make_settings(tmp_path_factory.mktemp("tasks"), read_rows(shared_data))
    return {task.name: task for task in open_tasks(settings, allow_download=False)}


@pytest.fixture(scope="module")
def lm(folder: Path) -> CausalLM:
    return build_causal_lm(load_model(str(folder)))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder))


def evaluate(
    task: OpenedTask, lm: CausalLM, tokenizer: Any, seed: int = 0, **changes: Any
) -> Evaluation:
    given: dict[str, Any] = {"max_tokens": None, "batch_tokens": 600, "runtime": Runtime()}
    return evaluate_task(
        task, lm, tokenizer, "trained", decoder=lambda: Decoder(lm, 600), seed=seed,
        **{**given, **changes},
    )  # fmt: skip


@pytest.fixture(scope="module")
def ours(opened: dict[str, OpenedTask], lm: CausalLM, tokenizer: Any) -> dict[str, Evaluation]:
    return {name: evaluate(task, lm, tokenizer) for name, task in opened.items()}


@pytest.fixture(scope="module")
def theirs(folder: Path, opened: dict[str, OpenedTask]) -> dict[str, Reference]:
    return ask_lm_eval(folder, opened.values())


def find_metric(evaluation: Evaluation, name: str) -> TaskMetric:
    return next(metric for metric in evaluation.result.metrics if metric.name == name)


# -- items -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_item_is_that_of_lm_eval(
    name: str, ours: dict[str, Evaluation], theirs: dict[str, Reference]
) -> None:
    check_items(ours[name], theirs[name])


@pytest.mark.parametrize("name", TASKS)
def test_values_are_those_of_lm_eval(
    name: str, ours: dict[str, Evaluation], theirs: dict[str, Reference]
) -> None:
    result = ours[name].result
    assert {metric.name for metric in result.metrics} == {
        key.removesuffix(",none") for key in theirs[name].values if "," in key and "_std" not in key
    }
    for metric in result.metrics:
        key = metric.name if "," in metric.name else f"{metric.name},none"
        # exp of a mean of log-probabilities that agree to 1e-7.
        assert metric.value == pytest.approx(theirs[name].values[key], rel=1e-5)
        stderr = theirs[name].values["_stderr,".join(key.split(","))]
        assert metric.stderr_is_bootstrap == (stderr == "N/A") == (name == "rolling")
        if stderr != "N/A":
            assert metric.stderr == stderr


def test_a_model_without_its_first_token_is_noticed(
    folder: Path, opened: dict[str, OpenedTask], theirs: dict[str, Reference], lm: CausalLM
) -> None:
    """The comparison above is one of items because that of accuracies does not notice this."""
    wrong = load_tokenizer(str(folder))
    wrong.backend_tokenizer.post_processor = None
    samples = evaluate(opened["choice"], lm, wrong).samples
    differences = [
        abs(one[0][0] - other[0][0])
        for found, expected in zip(samples, theirs["choice"].samples, strict=True)
        for one, other in zip(found["resps"], expected["resps"], strict=True)
    ]
    assert max(differences) > 0.1


# -- costs, items, chance --------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_costs_are_counted(
    name: str, ours: dict[str, Evaluation], theirs: dict[str, Reference]
) -> None:
    """lm-eval joins the same options: those that differ in their last token only."""
    result = ours[name].result
    assert result.num_forwards == theirs[name].num_forwards
    assert result.num_decoded_tokens == theirs[name].num_decoded_tokens
    assert (result.num_decoded_tokens > 0) == (name == "generation")


@pytest.mark.parametrize("name", ["choice", "shots", "chat"])
def test_prompts_that_are_cut_are_counted(
    name: str, ours: dict[str, Evaluation], tokenizer: Any
) -> None:
    lengths = [
        # Its last token is scored and does not run.
        max(len(tokenizer("".join(pair)).input_ids) - 1 for pair in sample["arguments"])
        for sample in ours[name].samples
    ]
    expected = sum(length > CONTEXT for length in lengths)
    assert ours[name].result.num_truncated == expected > 0
    assert ours["rolling"].result.num_truncated == 0


def test_texts_to_generate_leave_room(ours: dict[str, Evaluation], tokenizer: Any) -> None:
    prompts = [s["arguments"][0][0] for s in ours["generation"].samples if s["filter"] == "word"]
    expected = sum(len(tokenizer(prompt).input_ids) > CONTEXT - 24 for prompt in prompts)
    assert ours["generation"].result.num_truncated == expected > 0


def test_texts_end_with_an_end_token(ours: dict[str, Evaluation]) -> None:
    texts = [sample["resps"][0][0] for sample in ours["generation"].samples]
    # The others end before a full stop, or after 24 tokens.
    assert {text.endswith(" and") for text in texts} == {True, False}


def test_settings_that_change_the_choice_are_named(
    opened: dict[str, OpenedTask],
    lm: CausalLM,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    evaluate(opened["generation"], lm, tokenizer)
    assert not caplog.messages
    monkeypatch.setattr(lm.model.generation_config, "repetition_penalty", 1.3)
    evaluate(opened["generation"], lm, tokenizer)
    (message,) = caplog.messages
    assert "'generation' generates the most likely tokens: repetition_penalty of" in message


@pytest.mark.parametrize("value", [math.nan, None, "text", 10**400])
def test_a_value_that_is_no_number_is_refused(
    opened: dict[str, OpenedTask],
    lm: CausalLM,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    value: object,
) -> None:
    task = opened["shots"].task
    joined = {name: lambda _: value for name in task.aggregation()}
    monkeypatch.setattr(task, "aggregation", lambda: joined)
    # lm-eval itself fails on what is no number at all.
    kinds = (ForeignError, OverflowError, TypeError, ValueError)
    with pytest.raises(kinds, match=r"no finite number|too large|NoneType|to float"):
        evaluate(opened["shots"], lm, tokenizer)


def test_results_describe_the_task(
    ours: dict[str, Evaluation], opened: dict[str, OpenedTask]
) -> None:
    result = ours["chat"].result
    assert (result.task, result.model, result.version) == ("chat", "trained", "2.0")
    assert (result.limit, result.num_fewshot, result.is_chat) == (4, 1, True)
    assert (result.headline, result.chance) == ("acc_norm", 0.25)
    assert "<|user|>" in ours["chat"].samples[0]["arguments"][0][0]
    assert not any("<|user|>" in str(sample) for sample in ours["shots"].samples)
    generation = ours["generation"].result
    assert (generation.headline, generation.chance) == ("exact_match,word", None)
    # Two filters log each item twice.
    assert len(generation.item_N) == len(ours["generation"].samples) / 2 == 8
    for name, evaluation in ours.items():
        assert len(evaluation.result.item_N) == len(evaluation.result.metrics[0].value_N)
        json.dumps(evaluation.samples)
        assert opened[name].fingerprint not in evaluation.result.samples_sha256


def test_items_are_named_by_question_prompt_and_target(ours: dict[str, Evaluation]) -> None:
    results = {name: evaluation.result for name, evaluation in ours.items()}
    assert len(set(results["choice"].item_N)) == 8
    # The same questions with other prompts are other items.
    assert not set(results["choice"].item_N) & set(results["shots"].item_N)
    assert len({result.samples_sha256 for result in results.values()}) == len(TASKS)


def test_a_second_model_gets_the_same_prompts(
    ours: dict[str, Evaluation], opened: dict[str, OpenedTask], lm: CausalLM, tokenizer: Any
) -> None:
    """The solved examples are drawn; without a restart the second model would get the next ones."""
    steps: list[tuple[int, int]] = []
    again = evaluate(
        opened["shots"], lm, tokenizer, on_progress=lambda *step: steps.append(step), max_tokens=64
    )
    assert again.result.item_N == ours["shots"].result.item_N
    assert steps[-1] == (again.result.num_forwards, again.result.num_forwards)
    # It reads less of them.
    assert find_metric(again, "acc").value_N.shape == (4,)
    assert again.samples[0]["resps"] != ours["shots"].samples[0]["resps"]


# -- standard errors -------------------------------------------------------------------------------


def test_perplexities_have_a_bootstrap(
    ours: dict[str, Evaluation], opened: dict[str, OpenedTask], lm: CausalLM, tokenizer: Any
) -> None:
    metric = find_metric(ours["rolling"], "bits_per_byte")
    assert metric.weight_N is not None
    words = [sample["bits_per_byte"] for sample in ours["rolling"].samples]
    assert [list(pair) for pair in zip(metric.value_N, metric.weight_N, strict=True)] == words
    # The delta method for a ratio of means; a bootstrap of eight items agrees to a fifth or so.
    bits_N = -metric.value_N / math.log(2)
    residual_N = bits_N - metric.value * metric.weight_N
    delta = residual_N.std(ddof=1) / metric.weight_N.mean() / math.sqrt(8)
    assert metric.stderr == pytest.approx(delta, rel=0.25)
    again = evaluate(opened["rolling"], lm, tokenizer)
    other = evaluate(opened["rolling"], lm, tokenizer, seed=1)
    assert find_metric(again, "bits_per_byte").stderr == metric.stderr
    assert find_metric(other, "bits_per_byte").stderr != metric.stderr


def test_one_item_has_no_standard_error(
    opened: dict[str, OpenedTask], lm: CausalLM, tokenizer: Any
) -> None:
    settings = opened["choice"].settings.model_copy(update={"limit": 1})
    (task,) = open_tasks([settings], allow_download=False)
    for metric in evaluate(task, lm, tokenizer).result.metrics:
        assert metric.stderr is None
        assert len(metric.value_N) == 1


# -- what stays as it is ---------------------------------------------------------------------------


def test_the_program_stays_as_it_is(
    opened: dict[str, OpenedTask], lm: CausalLM, tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def observe() -> list[Any]:
        levels = [logging.getLogger(name).level for name in ("lm_eval", "datasets", "transformers")]
        randoms = [random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
        modes = [module.training for module in lm.modules()]
        filters = list(warnings.filters)
        # A copy: the object refers to the process.
        environment = dict(os.environ)
        state = torch.get_rng_state().tolist()
        pads = (tokenizer.pad_token, tokenizer.padding_side, len(tokenizer))
        return [levels, randoms, modes, filters, environment, state, pads]

    lm.model.model.layers[0].train()
    before = observe()
    evaluate(opened["generation"], lm, tokenizer)
    assert observe() == before
    lm.model.eval()
    assert capfd.readouterr() == ("", "")


def test_chat_needs_a_template(opened: dict[str, OpenedTask], lm: CausalLM, folder: Path) -> None:
    bare = load_tokenizer(str(folder))
    bare.chat_template = None
    with pytest.raises(ModelError, match="'chat' needs a tokenizer with a chat"):
        evaluate(opened["chat"], lm, bare)


def test_ranks_with_other_tasks_are_refused(opened: dict[str, OpenedTask], lm: CausalLM) -> None:
    class Peers(Runtime):
        def gather_objects(self, value: Any) -> list[Any]:
            return [value, "another"]

    with pytest.raises(ModelError, match="'choice' is not the same on all ranks"):
        evaluate(opened["choice"], lm, None, runtime=Peers())


def test_texts_as_long_as_the_context_are_refused(
    opened: dict[str, OpenedTask], lm: CausalLM, tokenizer: Any
) -> None:
    with pytest.raises(ConfigError, match="generates 24, but the model has 20 pos"):
        evaluate(opened["generation"], lm, tokenizer, max_tokens=20)
