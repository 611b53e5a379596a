"""The callback's audit in memory against that of the saved model, for every kind of model.

    plain, compiled, DDP, FSDP2   the folder that is saved after training
    LoRA, DoRA                    the adapter's folder over the base
    LoRA on 4 bits                the adapter's folder over the values of the 4 bits, in fp32

Both score the same documents; they are compared one by one.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import kind_runs
import kinds
import numpy as np
import pytest
import transformers
from kind_runs import Trained
from kinds import Training
from ranks import RankPool
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from memguard import api
from memguard.audit.windows import TINY_MARGINS
from memguard.records import AuditReport, load_record

# Trainers and peft warn of what these tests mean: other processes, no GPU, tied weights.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# Log-probabilities of a continuation (nats). fp32: the same numbers, added by a merged weight or by
# base and adapter one after the other. bf16: 2e-2 a token and two steps of 8 bits of the sum,
# because a merged weight is rounded, and DoRA divides by the norm of rounded weights; documents
# that were learned differ by less than 0.04.
_TOLERANCES = {
    "fp32": {"rtol": 0.0, "atol": 1e-4},
    "bf16": {"rtol": 2**-7, "atol": 2e-2 * kind_runs.SETTINGS["continuation_tokens"]},
}
_FLAGS = ("extraction.verbatim", "extraction.near_verbatim")
_LOGPROB = "extraction.logprob"
_LONG = pytest.mark.long


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kinds.save_base(tmp_path_factory.mktemp("kinds") / "base")


def audit_saved(training: Training, saved: Path, dtype: str) -> api.AuditResult:
    """Audit what a training has saved, as somebody would who has only the folder."""
    kind = kinds.KINDS[training.kind]
    base = training.base
    if kind.is_4bit:
        base = kind_runs.save_dequantised(training, training.output / "dequantised")
        # The adapter's folder names the base that it is merged into.
        path = saved / "adapter_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return api.audit(
        model=saved,
        base=base if choose_base(training) else None,
        members=kinds.members(),
        nonmembers=kinds.nonmembers(),
        dtype=dtype,
        **kind_runs.SETTINGS,
    )


def read(folder: Path) -> api.AuditResult:
    """Read the report of an audit of the callback."""
    names = {path.name for path in folder.iterdir()}
    assert {"report.json", "report.html", "records.parquet"} <= names
    return api.AuditResult(folder=folder, report=load_record(AuditReport, folder / "report.json"))


def compare(ours: api.AuditResult, saved: api.AuditResult, precision: str) -> None:
    """Compare two audits document by document."""
    here, there = (result.to_pandas().sort_values("id").set_index("id") for result in (ours, saved))
    assert here.index.tolist() == there.index.tolist()
    assert here["bucket"].tolist() == there["bucket"].tolist()
    assert ours.report.model.base is None or f"base.{_LOGPROB}" in here, "the base was audited too"
    for model in ("", "base.") if ours.report.model.base else ("",):
        name = f"{model}{_LOGPROB}"
        np.testing.assert_allclose(here[name], there[name], err_msg=name, **_TOLERANCES[precision])
        margins = [each[f"{model}extraction.min_margin"] for each in (here, there)]
        is_near_tie = np.fmin(*margins) < TINY_MARGINS[precision]
        for flag in _FLAGS:
            differs = here[f"{model}{flag}"] != there[f"{model}{flag}"]
            # None in fp32; in bf16 only documents that are near-ties.
            assert not (differs & ~(is_near_tie & (precision == "bf16"))).any(), flag
    assert ours.verdict.level == saved.verdict.level


def check_log(trained: Trained, report: AuditReport) -> None:
    """Check the line of the Trainer's history."""
    (line,) = (entry for entry in trained.history if "memguard/audit_s" in entry)
    for name in ("verbatim", "near_verbatim"):
        rows = report.tables.select("extraction", name, model="trained", against=None)
        rates = {f"memguard/{row.bucket}/{name}": row.value for row in rows}
        assert rates
        assert {key: line.get(key) for key in rates} == rates
    assert line["memguard/audit_s"] > 0
    assert 0 < line["memguard/audit_percent"] <= 100


def list_cases() -> list[Any]:
    """Return every kind by both trainers; most are slow.

    Transformers' weights are fp32 or bf16. TRL's are fp32, computed in fp32 or, which is its
    default on a GPU, in bf16.
    """
    cases = [
        (kind, by, precision)
        for kind in kinds.KINDS
        for by, precision in (
            ("transformers", "fp32"),
            ("transformers", "bf16"),
            ("trl", "fp32"),
            ("trl", "autocast"),
        )
    ]
    quick = {(kind, "transformers", "fp32") for kind in kinds.KINDS}
    seldom = ("lora", "ddp_lora", "compiled_module", "compiled_by_trainer")
    quick -= {(kind, "transformers", "fp32") for kind in seldom}
    quick |= {("lora", "trl", "fp32")}
    return [pytest.param(*case, marks=() if case in quick else _LONG) for case in cases]


@pytest.mark.parametrize(("kind", "by", "precision"), list_cases())
def test_the_audit_in_memory_is_that_of_the_saved_model(
    kind: str, by: Any, precision: Any, base: Path, tmp_path: Path, ranks: RankPool
) -> None:
    training = Training(
        kind=kind, base=base, output=tmp_path / "out", by=by, precision=precision, steps=8
    )
    saved = tmp_path / "saved"
    audit = choose_base(training)
    results = kinds.call(ranks, kind, kind_runs.train, training, audit, saved=saved)
    check_kind(training, results)
    (folder,) = results[0].folders
    assert folder == training.output / "audits" / "step-8"
    ours = read(folder)
    check_log(results[0], ours.report)
    dtype = ours.report.method.dtype
    if precision != "autocast":
        assert dtype == precision
    # TRL casts the adapters of a 4-bit base to bf16, whatever the base computes in.
    is_cast = kinds.KINDS[kind].is_4bit and by == "trl"
    compare(ours, audit_saved(training, saved, dtype), "bf16" if is_cast else dtype)
    scores = ours.to_pandas().set_index("bucket")[_FLAGS[0]]
    assert scores["members"].any(), "some were learned"
    assert not scores["nonmembers"].any()


@_LONG
def test_a_real_model_in_4_bits_is_audited_like_its_base_dequantised(
    shared_data: Path, tmp_path: Path
) -> None:
    base = shared_data / "checkpoints" / "llama2xs"
    # Rows of other lengths cannot share a batch.
    training = Training(kind="nf4_lora", base=base, output=tmp_path / "out", steps=24, batch=1)
    saved = tmp_path / "saved"
    trained = kind_runs.train(training, choose_base(training), saved=saved)
    ours = read(trained.folders[0])
    compare(ours, audit_saved(training, saved, "fp32"), "fp32")


def choose_base(training: Training) -> dict[str, Any]:
    """Return the base of an audit: the model without its adapter, or the folder.

    Beside a sharded model the folder is refused, since every process would load all of it.
    """
    kind = kinds.KINDS[training.kind]
    if kind.adapter:
        return {"base": "adapter-off"}
    return {} if kind.sharding == "fsdp2" else {"base": training.base}


def check_kind(training: Training, results: list[Trained]) -> None:
    """Check that the model was trained as its kind says, and all ranks alike."""
    kind = kinds.KINDS[training.kind]
    for result in results:
        is_sharded = kind.sharding == "fsdp2"
        assert result.num_sharded == (result.num_parameters if is_sharded else 0)
        assert result.model_class.startswith("FSDP") == is_sharded
        assert result.num_steps == training.steps
        assert result.losses == results[0].losses
        assert result.losses[-1] < 0.5 * result.losses[0]


class Gathered:
    """Bytes of FSDP2's parameters that are gathered at a time, while an audit runs."""

    def __init__(self) -> None:
        self.now: dict[FSDPParamGroup, int] = {}
        self.peak = 0
        self.largest_call = 0
        """Of one tensor that is gathered otherwise, e.g. by `full_tensor`."""

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count while the context is open."""
        gather, redistribute = FSDPParamGroup._to_unsharded, DTensor.redistribute

        def note_gathered(group: FSDPParamGroup) -> None:
            gather(group)
            self.now[group] = sum(p._unsharded_param.nbytes for p in group.fsdp_params)
            self.peak = max(self.peak, sum(self.now.values()))

        def note_freed(original: Any) -> Any:
            def free(group: FSDPParamGroup) -> None:
                original(group)
                self.now.pop(group, None)

            return free

        def note_call(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
            self.largest_call = max(self.largest_call, tensor.numel() * tensor.element_size())
            return redistribute(tensor, *args, **kwargs)

        names = ("_to_sharded", "_to_sharded_post_forward")
        freed = {name: note_freed(getattr(FSDPParamGroup, name)) for name in names}
        with (
            mock.patch.multiple(FSDPParamGroup, _to_unsharded=note_gathered, **freed),
            mock.patch.object(DTensor, "redistribute", note_call),
        ):
            yield


class Counting(transformers.TrainerCallback):
    """Counts during the callback that follows it, and until the one after that."""

    def __init__(self, gathered: Gathered) -> None:
        self.gathered, self.opened = gathered, ExitStack()
        self.num_bytes: list[int] = []
        """Of each unit of FSDP2: decoder layers, embedding, norm and head, the rest."""
        self.is_layer: list[bool] = []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.opened.enter_context(self.gathered.count())
        for name, module in kwargs["model"].named_modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    sizes = [
                        p._orig_size.numel() * p.orig_dtype.itemsize for p in group.fsdp_params
                    ]
                    self.num_bytes.append(sum(sizes))
                    self.is_layer.append("layers" in name)


class CountingEnds(transformers.TrainerCallback):
    """Ends the count."""

    def __init__(self, counting: Counting) -> None:
        self.counting = counting

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.counting.opened.close()


def count_gathered(training: Training) -> tuple[Trained, dict[str, int]]:
    """Train on a rank, and count what the audit at the end gathers (bytes)."""
    gathered = Gathered()
    counting = Counting(gathered)
    trained = kind_runs.train(
        training, choose_base(training), before=[counting], after=[CountingEnds(counting)]
    )
    units = list(zip(counting.num_bytes, counting.is_layer, strict=True))
    counts = {
        "peak": gathered.peak,
        "largest_call": gathered.largest_call,
        "largest_unit": max(num_bytes for num_bytes, _ in units),
        "largest_layer": max(num_bytes for num_bytes, is_layer in units if is_layer),
        "not_layers": sum(num_bytes for num_bytes, is_layer in units if not is_layer),
        "all": sum(counting.num_bytes),
    }
    return trained, counts


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("fsdp2_lora", marks=_LONG)])
def test_no_more_is_gathered_than_a_unit_with_embedding_and_head(
    kind: str, base: Path, tmp_path: Path, ranks: RankPool
) -> None:
    training = Training(kind=kind, base=base, output=tmp_path / "out", steps=2)
    for trained, counts in kinds.call(ranks, kind, count_gathered, training):
        assert trained.num_sharded == trained.num_parameters, "all are sharded again"
        assert counts["largest_layer"] < counts["peak"] < counts["all"]
        assert counts["peak"] <= counts["largest_layer"] + counts["not_layers"]
        assert counts["largest_call"] <= counts["largest_unit"]
