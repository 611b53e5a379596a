"""An audit at the end of a `Trainer`'s training, and optionally every given number of steps.

    model  ->  <out>/step-<n>/model  ->  memguard audit --model ...  ->  <out>/step-<n>/report.html

The audit is the command line's, run in a separate process: it writes the same report and does not
affect training. It loads the model a second time; if memory does not suffice during training, audit
the saved model afterwards.
"""

import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from memguard.errors import ConfigError
from memguard.records import AuditReport

logger = logging.getLogger(__name__)
_LOGGED = ("verbatim", "near_verbatim")

# Set by torchrun; removed because the audit is a separate process and not another rank.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


class MemorizationAuditCallback(TrainerCallback):  # type: ignore[misc]
    """Audits trained documents against documents that were not trained.

    `reports` stores the reports and `folders` the folders of their pages. The rates of the bucket
    of the verdict are appended to the Trainer's history as ``memguard/verbatim`` and
    ``memguard/near_verbatim``. An audit that fails logs an error and does not end training.
    """

    def __init__(
        self,
        *,
        members: str | Path | Sequence[str | Path],
        nonmembers: str | Path | Sequence[str | Path] = (),
        base: str | Path | None = None,
        out: str | Path,
        every_steps: int | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """Store the settings of the audit.

        Args:
            members: files of trained documents, as for ``memguard audit --members``.
            nonmembers: files of similar documents that are not trained; without them there is no
                control.
            base: folder or hub id of the model that is fine-tuned.
            out: folder of the reports.
            every_steps: also audit every this many optimizer steps (steps).
            arguments: further arguments of ``memguard audit``, e.g. ``["--suite", "attacks"]``.

        Raises:
            ConfigError: a file does not exist, or ``every_steps`` is below 1.
        """
        self._members, self._nonmembers = _list_paths(members), _list_paths(nonmembers)
        for name, paths in (("members", self._members), ("nonmembers", self._nonmembers)):
            for path in paths:
                if not Path(path).exists():
                    raise ConfigError(f"'{name}': '{path}' does not exist")
        if every_steps is not None and every_steps < 1:
            raise ConfigError(f"'every_steps' should be 1 or more; got {every_steps}")
        self._base, self._out = base, Path(out)
        self._every_steps, self._arguments = every_steps, tuple(arguments)
        self.reports: list[AuditReport] = []
        self.folders: list[Path] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reject models that this callback cannot save as a whole.

        Raises:
            ConfigError: the model is an adapter or sharded, or there is no tokenizer.
        """
        model = kwargs["model"]
        if kwargs.get("processing_class") is None:
            raise ConfigError(
                "MemorizationAuditCallback needs the tokenizer; pass it to the Trainer as "
                "'processing_class'"
            )
        if hasattr(model, "peft_config"):
            raise ConfigError(
                "MemorizationAuditCallback saves whole models, and this one is an adapter; merge "
                "it after training and run 'memguard audit --model DIR'"
            )
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ConfigError(
                "MemorizationAuditCallback saves whole models, and this one is sharded; run "
                "'memguard audit --model DIR' on the model that the Trainer saves"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Audit every ``every_steps`` steps."""
        if self._every_steps and state.global_step % self._every_steps == 0:
            self._audit(state, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Audit the final model, unless it was audited at its last step."""
        if not self.folders or self.folders[-1] != self._folder(state):
            self._audit(state, **kwargs)

    def _folder(self, state: Any) -> Path:
        return self._out / f"step-{state.global_step}"

    def _audit(self, state: Any, *, model: Any, processing_class: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = self._folder(state)
        saved = folder / "model"
        model = getattr(model, "module", model)
        model.save_pretrained(saved)
        processing_class.save_pretrained(saved)
        command = [sys.executable, "-m", "memguard", "audit", "--model", str(saved), "--json"]
        command += [f"--members={path}" for path in self._members]
        command += [f"--nonmembers={path}" for path in self._nonmembers]
        command += [] if self._base is None else ["--base", str(self._base)]
        command += ["--out", str(folder), *self._arguments]
        environment = {
            name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES
        }
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        self.folders.append(folder)
        if done.returncode:
            logger.error(
                "the audit failed with exit code %d; to repeat it: %s",
                done.returncode,
                shlex.join(["memguard", *command[3:]]),
            )
            return
        report = AuditReport.model_validate(json.loads(done.stdout))
        self.reports.append(report)
        rates = report.tables.risks(report.verdict.bucket)
        greedy = {name: rates[name].value if name in rates else None for name in _LOGGED}
        logged = {f"memguard/{name}": value for name, value in greedy.items()}
        state.log_history.append({**logged, "step": state.global_step})
        verdict = report.verdict
        page = folder / "report.html"
        logger.info("%s %s (%s)", verdict.describe(), verdict.membership.sentence, page)


def _list_paths(paths: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    return (str(paths),) if isinstance(paths, str | Path) else tuple(map(str, paths))
