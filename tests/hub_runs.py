"""Made-up finished runs whose files hold 206 texts that must not leave the machine."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bundle_examples import make_counts, make_report, make_rows, write_audit, write_audited_run
from result_examples import make_tables, rate_row

from memguard import records as r
from memguard.hf.identity import hash_sums, hash_weights
from memguard.records.run_files import load_trained, sum_trained
from memguard.records.sealed import FileSum, save_sealed, sum_file

BASE_SUM = {"base/model.safetensors": FileSum(num_bytes=4, sha256="ab" * 32)}
TOKENIZER = {"tokenizer_class": "TokenizersBackend", "model_max_length": 128, "is_local": True}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Texts by kind."""

    texts: tuple[str, ...]
    ids: tuple[str, ...]
    secrets: tuple[str, ...]
    names: tuple[str, ...]
    paths: tuple[str, ...]
    buckets: tuple[str, ...]
    probe: str
    key: str
    """An identity key, in hexadecimal digits."""

    @property
    def all(self) -> tuple[str, ...]:
        documents = self.texts + self.ids + self.secrets
        return (*documents, *self.names, *self.paths, *self.buckets, self.probe, self.key)


def plant(folder: Path) -> Planted:
    """Return 206 texts; paths are those of the names in a folder of their own."""
    draw = np.random.default_rng(7)

    def word() -> str:
        return "".join(draw.choice(list("klmnopqrst"), 9))

    names = tuple(f"{word()}.jsonl" for _ in range(20))
    return Planted(
        texts=tuple(f"{word()} {word()} owes {word()} {n}" for n in range(60)),
        ids=tuple(f"patient_{n}-{word()}" for n in range(60)),
        secrets=tuple(" ".join(f"{n:02}" for n in draw.integers(0, 99, 6)) for _ in range(40)),
        names=names,
        paths=tuple(str(folder / f"secret_{n}" / name) for n, name in enumerate(names)),
        buckets=tuple(f"ward {word()}" for _ in range(4)),
        probe=f"inhouse_{word()}",
        key=draw.bytes(32).hex(),
    )


def write_planted_run(
    folder: Path, *, is_adapter: bool = False, level: r.Level = "inconclusive", base: str = ""
) -> Planted:
    """Write a finished and audited run whose every file has planted texts.

    Weights, of a few bytes, are those of no model. ``base`` is named in adapter_config.json.
    """
    planted = plant(folder.parent)
    rows = make_rows(60)
    for row, own_id in zip(rows, planted.ids, strict=True):
        row["id"] = own_id
    write_audited_run(folder, rows, data=list(planted.paths))  # type: ignore[arg-type]
    weights = folder / "model"
    if is_adapter:
        weights = Path(shutil.move(weights, folder / "adapter"))
        (weights / "config.json").unlink()
        (weights / "model.safetensors").rename(weights / "adapter_model.safetensors")
        named = base or planted.paths[0]
        fields: dict[str, Any] = {"base_model_name_or_path": named, "revision": "main", "r": 4}
        (weights / "adapter_config.json").write_text(json.dumps(fields))
    else:
        fields = {"model_type": "llama", "_name_or_path": planted.paths[1]}
        (weights / "config.json").write_text(json.dumps(fields))
    tokenizer = {**TOKENIZER, "name_or_path": planted.paths[2]}
    (weights / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (weights / "chat_template.jinja").write_text("{{ messages }}")
    (weights / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    everything = "\n".join(planted.all)
    # Training would seal such files, had they been in the folder that it wrote.
    for name in ("optimizer.pt", "memguard-identity.key", planted.names[3], "notes.txt"):
        (weights / name).write_text(everything)
    base_sums = {name.removeprefix("base/"): item for name, item in BASE_SUM.items()}
    trained = sum_trained(folder, run_key="k", step=1, base=base_sums if is_adapter else None)
    save_sealed(trained, folder / "trained.json")
    for place in ("checkpoints/step-1/data.json", "audit/private/excerpts.txt", "notes.md"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(everything)
    write_planted_audit(folder, planted, level=level)
    return planted


def write_planted_audit(
    folder: Path, planted: Planted, *, level: r.Level = "inconclusive", **changes: Any
) -> None:
    """Write the audit of such a run: buckets, warnings, findings and probes have planted names."""
    trained = load_trained(folder)
    weights = folder / trained.folder
    if trained.folder == "adapter":
        names = ("adapter_config.json", "adapter_model.safetensors")
        hashed = hash_sums({**{name: sum_file(weights / name) for name in names}, **BASE_SUM})
    else:
        hashed = hash_weights(weights)
    report = make_report(hashed, 60, run=folder.name)
    named = [planted.ids[0], planted.ids[1], planted.names[0], planted.paths[1], str(folder)]
    banners = [r.Banner(level="note", text=f"A probe names '{text}' here.") for text in named]
    worst = planted.buckets[1]
    test = r.VerdictTest(
        documents="bucket",
        texts="all",
        bucket=worst,
        trained=make_counts(2, 4),
        control=make_counts(0, 4),
        p_value=0.2,
        level=0.01,
    )
    verdict = report.verdict.model_copy(
        update={
            "level": level,
            "sentence": f"2 of 4 documents of '{worst}' were extracted, 0 of 4 unseen ones.",
            "scope": f"{report.verdict.scope} Not run: {planted.probe}.",
            "bucket": worst,
            "test": test,
        }
    )
    roles: tuple[r.Role, ...] = ("control", "trained", "trained", "forget")
    buckets = [
        r.BucketRow(bucket=name, role=role, num_repetitions=n, num_documents=4)
        for n, (name, role) in enumerate(zip(planted.buckets, roles, strict=True))
    ]
    rows = [rate_row("extraction", "near_verbatim", name, 2, 4) for name in planted.buckets]
    run = r.ProbeRun(
        name=planted.probe, version=1, num_documents=None, reason_not_run=planted.paths[0]
    )
    values = {
        "banners": banners,
        "verdict": verdict,
        "tables": make_tables(rows, buckets),
        "probe_runs": [*report.probe_runs, run],
    }
    report = report.model_copy(update={**values, **changes})
    secrets = "\n".join(planted.secrets)
    (folder / "audit" / "canaries.parquet").write_text(secrets)
    write_audit(folder / "audit", report, make_rows(60), has_card=True)
