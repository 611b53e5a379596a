"""Tasks on meshes: on each rank every item's score is that of lm-eval's own model class."""

from pathlib import Path

import pytest
import torch
from benchmark_examples import (
    CONTEXT,
    ask_lm_eval,
    check_items,
    export_model,
    make_settings,
    read_rows,
)
from ranks import RankPool

from memguard.audit.benchmarks.answers import Evaluation
from memguard.audit.benchmarks.evaluation import evaluate_task
from memguard.audit.benchmarks.tasks import open_tasks
from memguard.audit.decoding import Decoder
from memguard.config.utility import UtilityTask
from memguard.hf.assembly import Assembly
from memguard.hf.checkpoint import load_tokenizer
from memguard.hf.load import load_assembled
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import start_runtime


def evaluate_on_mesh(
    degrees: MeshShape, folder: str, settings: list[UtilityTask]
) -> list[Evaluation]:
    mesh = build_mesh(degrees, "cpu")
    assembly = Assembly(
        mesh=mesh, device=torch.device("cpu"), dtype=torch.float32, is_trained=False
    )
    # From the folder, so that every rank has the end tokens of its generation_config.json.
    lm, tokenizer = load_assembled(folder, assembly).lm, load_tokenizer(folder)
    with start_runtime() as runtime:
        return [
            evaluate_task(
                task,
                lm,
                tokenizer,
                "base",
                decoder=lambda: Decoder(lm, 600, runtime),
                max_tokens=CONTEXT,
                batch_tokens=600,
                runtime=runtime,
                seed=0,
            )
            for task in open_tasks(settings, allow_download=False)
        ]


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", [MeshShape(z=2, x=2), MeshShape(data=2, y=2)], ids=str)
def test_every_item_is_that_of_lm_eval_on_each_rank(
    ranks: RankPool, tmp_path: Path, shared_data: Path, mesh: MeshShape
) -> None:
    folder = export_model(tmp_path / "exported", shared_data)
    settings = make_settings(tmp_path, read_rows(shared_data))
    references = ask_lm_eval(folder, open_tasks(settings, allow_download=False))
    results = ranks(evaluate_on_mesh, mesh.num_ranks, mesh, str(folder), settings)
    for evaluations in results:
        for evaluation in evaluations:
            result, reference = evaluation.result, references[evaluation.result.task]
            check_items(evaluation, reference)
            assert result.num_forwards == reference.num_forwards
            assert result.num_decoded_tokens == reference.num_decoded_tokens
            for metric in result.metrics:
                key = metric.name if "," in metric.name else f"{metric.name},none"
                # exp of a mean of log-probabilities that agree to 1e-7.
                assert metric.value == pytest.approx(reference.values[key], rel=1e-5)
