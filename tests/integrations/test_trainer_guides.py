"""The scripts of the guide train, audit and write a report, and its commands start them.

They run as they are printed, in a folder where `path/to/checkpoint` and `documents.jsonl` are.
`test_it_shards` alone changes one: Accelerate is told to shard on a CPU (see `kinds`).
"""

import json
from pathlib import Path
from typing import Any

import kinds
import pytest
import torch
from guide_blocks import list_blocks, list_lines, run_shell
from ranks import RankPool
from torch import distributed
from torch.distributed.tensor import DTensor

from memguard.records import AuditReport, load_record

pytestmark = pytest.mark.slow

GUIDE = "memguard/integrations/README.md"
LORA, IN_4_BITS, PROCESSES, GENERATE = list_blocks(GUIDE, "python")
COMMANDS = {line.split()[0]: line for line in list_lines(GUIDE)}
SHARDS = "fsdp=on_gpus", "fsdp_config=sharding if on_gpus else None"


@pytest.fixture(params=["stories260K"])
def place(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Path:
    """A folder with what the scripts read: a model, and 30 passages of 260 characters."""
    import datasets

    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/checkpoint").symlink_to(shared_data / "checkpoints" / request.param)
    lines = (shared_data / "text" / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"][:260] for line in lines[:30]]
    (tmp_path / "documents.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_report(folder: Path, step: int) -> AuditReport:
    assert (folder / "audits" / f"step-{step}" / "report.html").is_file()
    report = load_record(AuditReport, folder / "audits" / f"step-{step}" / "report.json")
    assert {bucket.role for bucket in report.tables.buckets} == {"trained", "control"}
    return report


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("code", "place", "step"),
    [
        pytest.param(LORA, "stories260K", 9, id="lora"),
        pytest.param(IN_4_BITS, "llama2xs", 9, marks=pytest.mark.long, id="4-bits"),
    ],
    indirect=["place"],
)
def test_a_script_on_one_process(code: str, place: Path, step: int) -> None:
    exec(code, {"__name__": "__main__"})
    report = read_report(place, step)
    assert "LoRA adapter 'default'" in report.model.name
    assert report.model.base.endswith("without its adapter")
    texts = [banner.text for banner in report.banners]
    assert any("layers in 4 bits (NF4)" in text for text in texts) == (code == IN_4_BITS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the steps are those of a CPU")
@pytest.mark.parametrize(
    # 24 documents in 3 epochs, 8 rows a step and process: on a CPU Accelerate starts only one.
    # Three batches are four on two processes: Accelerate repeats the first, which is counted.
    ("tool", "step", "num_trained"),
    [("torchrun", 6, 3 * 32), pytest.param("accelerate", 9, 3 * 24, marks=pytest.mark.long)],
)
def test_a_command_starts_the_script_of_two_processes(
    tool: str, step: int, num_trained: int, place: Path
) -> None:
    (place / "train.py").write_text(PROCESSES)
    run_shell(COMMANDS[tool], place, OMP_NUM_THREADS=1)
    report = read_report(place, step)
    trained = [bucket for bucket in report.tables.buckets if bucket.role == "trained"]
    assert sum(bucket.num_documents for bucket in trained) == 24
    counted = [(bucket.num_documents, bucket.num_repetitions or 0) for bucket in trained]
    assert sum(number * repetitions for number, repetitions in counted) == num_trained


def run_on_a_rank(code: str, folder: Path) -> tuple[int, int]:
    import os

    import datasets

    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = folder / "cache" / str(distributed.get_rank())
    names: dict[str, Any] = {"__name__": "__main__"}
    with kinds._as_fsdp():
        exec(code, names)
    parameters = list(names["trainer"].model.parameters())
    return sum(isinstance(one, DTensor) for one in parameters), len(parameters)


def test_it_shards(place: Path, ranks: RankPool) -> None:
    code = PROCESSES
    for part in SHARDS:
        assert part in code
    code = code.replace(SHARDS[0], "fsdp=True").replace(SHARDS[1], "fsdp_config=sharding")
    for num_sharded, num in kinds.call(ranks, "fsdp2", run_on_a_rank, code, place):
        assert num_sharded == num > 0
    read_report(place, 6)
