"""The scripts of the guide train, audit and write a report.

On a CPU some arguments are added; on two processes Accelerate is told to shard (see `kinds`).
"""

import json
import re
from pathlib import Path
from typing import Any

import kinds
import pytest
from ranks import RankPool
from torch import distributed
from torch.distributed.tensor import DTensor

from memguard.records import AuditReport, load_record

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "memguard" / "integrations" / "README.md"
ON_CPU = "use_cpu=True, max_steps=2, per_device_train_batch_size=16"


def write_documents(shared_data: Path, folder: Path) -> Path:
    """Write 30 passages of real text, of 260 characters each."""
    lines = (shared_data / "text" / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"][:260] for line in lines[:30]]
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read_script(number: int, checkpoint: Path, documents: Path, folder: Path) -> str:
    text = GUIDE.read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.S)[number]
    for written, used in (
        ("path/to/checkpoint", str(checkpoint)),
        ("documents.jsonl", str(documents)),
        ('"out", num_train_epochs=3', f'"{folder / "out"}", {ON_CPU}'),
        ('"audits"', f'"{folder / "audits"}"'),
    ):
        assert written in code, written
        code = code.replace(written, used)
    # TRL asks for bf16 on a GPU by default; the audit is one of few documents.
    code = code.replace("max_length=256", "max_length=256, bf16=False")
    return code.replace("MemorizationAuditCallback(\n", "MemorizationAuditCallback(cache=False,\n")


def read_report(folder: Path) -> AuditReport:
    assert (folder / "audits" / "step-2" / "report.html").is_file()
    return load_record(AuditReport, folder / "audits" / "step-2" / "report.json")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("number", "model"), [(0, "stories260K"), pytest.param(1, "llama2xs", marks=pytest.mark.long)]
)
def test_a_script_on_one_process(
    number: int, model: str, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    documents = write_documents(shared_data, tmp_path)
    exec(
        read_script(number, shared_data / "checkpoints" / model, documents, tmp_path),
        {"__name__": "__main__"},
    )
    report = read_report(tmp_path)
    assert "LoRA adapter 'default'" in report.model.name
    assert report.model.base.endswith("without its adapter")
    assert {bucket.role for bucket in report.tables.buckets} == {"trained", "control"}
    texts = [banner.text for banner in report.banners]
    assert any("layers in 4 bits (NF4)" in text for text in texts) == (number == 1)


def run_on_a_rank(code: str, cache: Path) -> tuple[int, int]:
    import datasets

    datasets.config.HF_DATASETS_CACHE = cache / str(distributed.get_rank())
    names: dict[str, Any] = {"__name__": "__main__"}
    with kinds._as_fsdp():
        exec(code, names)
    parameters = list(names["trainer"].model.parameters())
    return sum(isinstance(one, DTensor) for one in parameters), len(parameters)


def test_the_script_of_two_processes(shared_data: Path, tmp_path: Path, ranks: RankPool) -> None:
    documents = write_documents(shared_data, tmp_path)
    checkpoint = shared_data / "checkpoints" / "stories260K"
    code = read_script(2, checkpoint, documents, tmp_path)
    for num_sharded, num in kinds.call(ranks, "fsdp2", run_on_a_rank, code, tmp_path):
        assert num_sharded == num > 0
    report = read_report(tmp_path)
    assert {bucket.role for bucket in report.tables.buckets} == {"trained", "control"}
