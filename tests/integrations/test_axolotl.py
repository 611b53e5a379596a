"""The plugin of axolotl: what it adds to a trainer, what it prints, and what it refuses.

axolotl's part is played by a stub: its BasePlugin, and the order in which it calls a plugin. Where
axolotl is installed (scripts/axolotl_check.sh), its own BasePlugin is used.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import trainer_program as program
import transformers
import yaml
from pydantic import BaseModel
from test_trainer_audit import MEMBERS, UNSEEN, build_trainer

from memguard.errors import ConfigError, DataError
from memguard.integrations.goldfish import GoldfishCollator
from memguard.integrations.trainer_audit import MemorizationAuditCallback
from memguard.records import IGNORE_LABEL, AuditReport, load_record

NAME = "memguard.integrations.axolotl"
AUDIT = {"members": "m.jsonl", "out": "audits"}


class BasePlugin:
    """The hooks of axolotl 0.19 that the plugin fills."""

    def register(self, cfg: dict[str, Any]) -> None: ...

    def get_input_args(self) -> str | None: ...

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None: ...

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return []


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    """The plugin's module, imported beside axolotl."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("axolotl") is None:
            for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
                patch.setitem(sys.modules, name, ModuleType(name))
            sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin  # type: ignore[attr-defined]
        yield importlib.import_module(NAME)
        sys.modules.pop(NAME, None)


def read(text: str) -> dict[str, Any]:
    cfg: dict[str, Any] = yaml.safe_load(text)
    return cfg


def prepare(
    module: ModuleType,
    cfg: dict[str, Any],
    trainer: Any,
    between: Callable[[Any], None] = lambda trainer: None,
) -> None:
    """Call the plugin as axolotl does up to the training; `between` plays another plugin."""
    plugin = module.MemguardPlugin()
    plugin.register(cfg)
    for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    plugin.post_trainer_create(cfg, trainer)
    between(trainer)


def watch_labels(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the list that receives the labels of each batch."""
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["labels"].clone()), with_kwargs=True
    )
    return seen


def write_documents(folder: Path) -> None:
    for name, texts in (("train", MEMBERS), ("unseen", UNSEEN)):
        rows = (json.dumps({"text": text}) for text in texts)
        (folder / f"{name}.jsonl").write_text("\n".join(rows))


def test_every_batch_is_masked_and_a_line_says_so(
    module: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = read("memguard: {goldfish: {k: 3, context_width: 4}}")
    trainer = build_trainer(
        tmp_path, max_steps=2, per_device_train_batch_size=4, train_sampling_strategy="sequential"
    )
    prepare(module, cfg, trainer)
    labels = watch_labels(trainer.model)
    trainer.train()
    assert (
        "memguard is active: goldfish drops labels from every batch (k 3, context_width 4)\n"
        in capsys.readouterr().err
    )
    collate = GoldfishCollator(program.build_tokenizer(), **cfg["memguard"]["goldfish"])
    rows = [
        {"input_ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset
    ]
    assert len(labels) == 2
    for batch, begin in zip(labels, (0, 4), strict=True):
        assert torch.equal(batch, collate(rows[begin : begin + 4])["labels"])
    # One label in three is dropped; of 232 that are at least a fifth and at most a half.
    dropped = torch.cat(labels)[:, 1:].eq(IGNORE_LABEL).float().mean()
    assert 0.2 < dropped < 0.5


def test_the_model_is_audited(
    module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_documents(tmp_path)
    monkeypatch.chdir(tmp_path)
    cfg = read(
        """
        memguard:
          audit:
            members: [train.jsonl]
            nonmembers: unseen.jsonl
            out: audits
            every_steps: 1
            stop_above: {near_verbatim: 0.9}
            continuation_tokens: 8
            cache: false
            identity_key: my.key
        """
    )
    trainer = build_trainer(tmp_path, max_steps=2)
    prepare(module, cfg, trainer)
    trainer.train()
    said = capsys.readouterr().err
    assert (
        "memguard is active: the model is audited every 1 steps, at the end, with reports in audits"
        in said
    )
    assert "failed" not in said
    assert said.count(f"identity key: made {tmp_path / 'my.key'}, keep it") == 1
    for step in (1, 2):
        report = load_record(AuditReport, tmp_path / "audits" / f"step-{step}" / "report.json")
        assert {row.role for row in report.tables.buckets} == {"trained", "control"}
    # The trainer was passed on: its reporters receive the scores.
    assert any("memguard/audit_s" in line for line in trainer.state.log_history)


def test_a_path_that_does_not_exist_is_no_document(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = read("memguard: {audit: {members: [absent.jsonl], out: audits}}")
    trainer = build_trainer(tmp_path, max_steps=1)
    prepare(module, cfg, trainer)
    with pytest.raises((ConfigError, DataError), match=r"absent\.jsonl"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_collator_that_another_plugin_replaced_ends_the_training(
    module: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def replace(trainer: Any) -> None:
        trainer.data_collator = transformers.default_data_collator

    trainer = build_trainer(tmp_path, max_steps=1)
    prepare(module, read("memguard: {goldfish: {}}"), trainer, replace)
    with pytest.raises(ConfigError, match="not made by memguard's collator"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert "is active" not in capsys.readouterr().err


def test_the_block_passes_axolotls_validation(module: ModuleType) -> None:
    """The classes that plugins name become bases of axolotl's configuration."""
    plugin = module.MemguardPlugin()
    folder, name = plugin.get_input_args().rsplit(".", 1)
    arguments = getattr(importlib.import_module(folder), name)

    class Configuration(BaseModel):
        sequence_len: int = 512

    merged = type("Merged", (Configuration, arguments), {})
    cfg = read("memguard: {goldfish: {k: 4, mode: random, seed: 3}}")
    checked = merged(**cfg).model_dump(exclude_none=True)
    assert checked == {"sequence_len": 512, **cfg}
    assert module.read_settings(checked) == module.read_settings(cfg)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "'memguard' should hold settings; got null"),
        ("memguard: {}", "'memguard' needs 'goldfish' or 'audit'"),
        ("memguard: on", "'memguard' should hold settings; got True"),
        ("memguard: {goldfisch: {k: 4}}", "'memguard.goldfisch' is not a setting"),
        ("memguard: {goldfish: }", "'memguard.goldfish' should hold settings; got null"),
        (
            "memguard: {goldfish: {kk: 4}}",
            "'memguard.goldfish.kk' is not a setting; it may be seed",
        ),
        ("memguard: {goldfish: {name: focal}}", "'memguard.goldfish.name' is not a setting"),
        ("memguard: {goldfish: {k: 1}}", "in 'memguard': 'goldfish.k': Input should be greater"),
        ("memguard: {goldfish: {k_by_dose: {2: 3}}}", "in 'memguard': 'k_by_dose' needs"),
        ("memguard: {goldfish: {seed: x}}", "'memguard.goldfish.seed' should be an integer"),
        ("{memguard: {goldfish: {}}, rl: dpo}", "'memguard.goldfish' does not fit 'rl'"),
        ("{memguard: {goldfish: {}}, reward_model: true}", "does not fit 'reward_model'"),
        (
            "{memguard: {goldfish: {}}, pretraining_dataset: [{path: p}], sample_packing: true, "
            "pretrain_multipack_attn: false}",
            "'pretrain_multipack_attn' false packs documents",
        ),
        ("memguard: {audit: {out: audits}}", "'memguard.audit' needs 'members'"),
        ("memguard: {audit: {members: m.jsonl}}", "'memguard.audit' needs 'out'"),
        (
            "memguard: {audit: {members: 3, out: audits}}",
            "'memguard.audit.members' should be a path",
        ),
        (
            "memguard: {audit: {members: m, out: o, trainer: 1}}",
            "'memguard.audit.trainer' is not a",
        ),
        ("memguard: {audit: {members: m, out: o, every: 1}}", "'memguard.audit.every' is not a"),
        (
            "memguard: {audit: {members: m, out: o, every_steps: 0}}",
            "'every_steps' should be greater",
        ),
    ],
)
def test_errors_come_before_anything_is_loaded(module: ModuleType, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        module.MemguardPlugin().register(read(text))
    assert "\n" not in str(caught.value)


def test_without_axolotl_the_import_is_an_error_that_axolotl_does_not_swallow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An ImportError would be logged, and training would go on."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", None)
    with pytest.raises(ConfigError, match=r"its imports fails: .*axolotl") as caught:
        importlib.import_module(NAME)
    assert not isinstance(caught.value, ImportError)


def test_the_hooks_have_the_arguments_of_axolotls(module: ModuleType) -> None:
    base = sys.modules["axolotl.integrations.base"].BasePlugin
    for name, hook in vars(module.MemguardPlugin).items():
        if inspect.isfunction(hook):
            theirs = inspect.signature(getattr(base, name)).parameters
            assert list(inspect.signature(hook).parameters) == list(theirs)


def test_the_callback_has_the_settings_of_the_block(module: ModuleType) -> None:
    cfg = {"memguard": {"audit": {**AUDIT, "base": "adapter-off", "suite": "attacks"}}}
    callbacks = module.MemguardPlugin().add_callbacks_post_trainer(cfg, None)
    # The line comes last: whatever the audit refuses, it refuses before the line is printed.
    assert [type(callback) for callback in callbacks] == [
        MemorizationAuditCallback,
        module.ActiveLine,
    ]
