"""The held-out loss of a run's model as an audit loads it, beside that of its training."""

from dataclasses import replace
from pathlib import Path

from memguard.data.corpus import load_corpus
from memguard.hf.load_as import LoadedForm
from memguard.records import LoadAs
from memguard.records.run_files import find_weights_folder
from memguard.runtime import detect_runtime
from memguard.train.heldout import HeldoutLoss
from memguard.workflows.auditing.models import DTYPES, LazyModel, ModelSource
from memguard.workflows.common.folder import RunFolder
from memguard.workflows.common.setup import DistributedContext


def measure_form(run: Path, load_as: LoadAs) -> float:
    """Return the loss in fp32 (nats a token)."""
    config, fp32 = RunFolder(run).read_config(), DTYPES["fp32"]
    # Also in a process that torchrun started: this one alone.
    runtime = replace(detect_runtime(), rank=0, world_size=1)
    source = ModelSource(
        model=str(find_weights_folder(run)),
        attn=config.model.attn_implementation,
        form=None if load_as == "stored" else LoadedForm(name=load_as, stored=fp32, dtype=fp32),
    )
    alone = DistributedContext(runtime=runtime, mesh=None)
    model = LazyModel(source, config.audit.model_copy(update={"dtype": "fp32"}), alone)
    heldout = HeldoutLoss(
        lm=model.load(), corpus=load_corpus(run), seq_len=config.data.seq_len, runtime=runtime
    )
    measured = heldout.measure(step=0)
    assert measured is not None, "the run has a control"
    return measured.nll
