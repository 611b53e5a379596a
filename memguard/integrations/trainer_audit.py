"""Audits of the model that a `Trainer` trains, where it is: during training and at its end.

    on_train_begin   checks the model, the documents and the settings, before the first step
    on_step_end      counts the members that were trained; audits every `every_steps` steps
    on_save          saves the counts beside the Trainer's checkpoint
    on_evaluate      after each evaluation, if asked for
    on_train_end     the final model, unless it has been audited
    each audit  ->   <out>/step-<n>/report.html, as from `memguard audit`

The model is neither saved nor loaded again. Every process takes part: with DDP each scores other
documents on its copy of the model, with FSDP2 all run the model together. Training goes on after an
audit that fails, and computes what it computes without audits. At the end a notebook shows the card
of the last report.

Repetitions are counted, not planned: members are recognised among the rows that the model receives
(see `trained_rows`). They need not be all of the training data, but must be for the counts to hold.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from transformers import Trainer, TrainerCallback

from memguard.data.chat import writes_today
from memguard.data.documents import load_documents
from memguard.data.tokenization import tokenize_documents
from memguard.errors import ConfigError, OtherRankFailed, describe_foreign
from memguard.integrations.token_runs import RowFormat
from memguard.integrations.trained_rows import TrainedRows, find_resumed
from memguard.records import AuditReport
from memguard.records.texts import format_percent
from memguard.runtime import Console, default_cache_dir, format_duration, quieted_advice
from memguard.runtime.processes import join_program
from memguard.train.audit_callback import find_over_limit
from memguard.workflows.auditing.arguments import make_arguments, read_format, take_documents
from memguard.workflows.auditing.audit import audit
from memguard.workflows.auditing.checks import CheckedAudit, check_audit, load_audit_identity
from memguard.workflows.auditing.trained_counts import TrainedCounts
from memguard.workflows.auditing.wrapped_models import SAVED
from memguard.workflows.common.python_arguments import Place, Seed, Whole, describe, python_call
from memguard.workflows.results import AuditResult

Measure = Literal["verbatim", "near_verbatim", "token_accuracy"]
_LOGGED: Mapping[Measure, str] = {
    "verbatim": "rate",
    "near_verbatim": "rate",
    "token_accuracy": "mean",
}
"""Metrics of the extraction probe that are logged, and what is logged of each."""
_STOPPING = ("near_verbatim", "verbatim")
_DAY = "memguard/chat_date"
"""In the Trainer's history: what the chat template writes as today."""


class MemorizationAuditCallback(TrainerCallback):  # type: ignore[misc]
    """Audits trained documents against documents that were not trained.

    `reports` stores the reports and `folders` the folders of their pages, of the audits that did
    not fail. Scores of each bucket are logged as ``memguard/<bucket>/<metric>``, the time of the
    audits as ``memguard/audit_s`` and ``memguard/audit_percent``. An audit that fails says so in
    one line and does not end training.
    """

    @python_call
    def __init__(
        self,
        *,
        members: Any,
        nonmembers: Any = (),
        base: Any = None,
        out: Place,
        every_steps: Annotated[Whole, Field(ge=1)] | None = None,
        on_evaluate: bool = False,
        stop_above: Mapping[str, float] | None = None,
        trainer: Any = None,
        suite: Place | None = None,
        format: str | Mapping[str, Any] | None = None,
        seed: Seed = 0,
        identity_key: Place | None = None,
        **settings: Any,
    ) -> None:
        """Store the settings of the audits.

        Args:
            members: trained documents: paths or hub ids, a list of texts, or a `datasets.Dataset`.
            nonmembers: similar documents that are not trained; without them there is no control.
            base: folder or hub id of the model that is fine-tuned; "adapter-off": of a model with
                an adapter of peft, the model without it.
            out: folder of the reports.
            every_steps: also audit every this many optimizer steps (steps).
            on_evaluate: also audit after each evaluation of the Trainer.
            stop_above: end training once a larger share of the documents of a trained bucket is
                extracted, e.g. ``{"near_verbatim": 0.1}``.
            trainer: the Trainer, whose reporters (W&B, TensorBoard) then receive the scores; None
                writes them to its history only.
            suite: name of a shipped suite or a YAML file.
            format: of the documents: text, prompt_completion, messages, alpaca, sharegpt or
                input_ids; or a mapping, ``{"format": "alpaca", "columns": {"prompt": "q"}}``, also
                with 'template' and 'tags'; None takes it from their columns.
            seed: decides which documents are sampled.
            identity_key: file of the key under which equal texts have equal hashes, so that later
                audits can be matched; in the user's configuration folder if None.
            settings: further settings of an audit, e.g. ``continuation_tokens=100``, or
                ``utility="hellaswag:200"`` to run benchmark tasks of lm-eval on the model.

        Raises:
            ConfigError: a value out of range, or an argument that has another name now.
        """
        if "arguments" in settings:
            raise ConfigError(
                "'arguments' is no argument of MemorizationAuditCallback: give each setting by its "
                "name, e.g. suite='attacks', continuation_tokens=50"
            )
        if trainer is not None and not callable(getattr(trainer, "log", None)):
            raise ConfigError(f"'trainer' should be a Trainer or None; got {describe(trainer)}")
        for name, given in (("members", members), ("nonmembers", nonmembers)):
            if not isinstance(given, str | Path | Sized | None):
                raise ConfigError(
                    f"'{name}' should be paths, a list of texts or a Dataset; got {describe(given)}"
                )
        self._stop_above = dict(stop_above or {})
        for metric, limit in self._stop_above.items():
            if metric not in _STOPPING or not 0 <= limit <= 1:
                raise ConfigError(
                    "'stop_above' should give near_verbatim or verbatim a share from 0 to 1; got "
                    f"{{{metric!r}: {limit!r}}}"
                )
        self._arguments = {
            "members": members,
            "nonmembers": nonmembers,
            "base": base,
            "format": read_format(format),
            "seed": seed,
            "identity_key": identity_key,
            "settings": {**settings, **({} if suite is None else {"suite": str(suite)})},
        }
        self._has_control = nonmembers is not None and (
            isinstance(nonmembers, str | Path) or len(nonmembers) > 0
        )
        self._out, self._every_steps, self._on_evaluate = Path(out), every_steps, on_evaluate
        self._trainer = trainer
        self._rows: TrainedRows | None = None
        self._trained_model: Callable[[], Any] = lambda: None
        """Returns the model of the training before, whose weights a new one goes on with."""
        self._audited_steps: set[int] = set()
        self._audit_s, self._began_s = 0.0, time.perf_counter()
        self.reports: list[AuditReport] = []
        self.folders: list[Path] = []

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, processing_class: Any, **_: Any
    ) -> None:
        """Check what the audits need, before the first step.

        Raises:
            ConfigError: a wrong setting, no tokenizer, or a Trainer that uses DeepSpeed.
            DataError: documents are missing.
            ModelError: a model that cannot be audited where it is.
        """
        self._began_s, self._audit_s = time.perf_counter(), 0.0
        self._audited_steps.clear()
        problems = []
        if processing_class is None:
            problems.append("the Trainer needs the tokenizer for audits: set 'processing_class'")
        if getattr(args, "deepspeed", None) or getattr(args, "deepspeed_plugin", None):
            problems.append(f"the model of this Trainer is sharded by DeepSpeed; {SAVED}")
        if problems:
            raise ConfigError(*problems)
        with quieted_advice():
            checked = self._check(state.global_step, model, processing_class)
            say = _make_console(state).info
            with join_program() as runtime:
                runtime.only_on_main(lambda: load_audit_identity(checked, say))
            self._watch(args, state, model, processing_class)

    def _watch(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        """Begin to count the members among the rows that the model receives."""
        before, trained = self._rows, self._trained_model()
        if before is not None:
            before.unwatch()  # Training begins again, e.g. with a smaller batch.
        tokenizer = _find_tokenizer(processing_class)
        form = self._arguments["format"]
        if writes_today(tokenizer):
            # One day for all audits of a training, also where it is resumed.
            days = [log[_DAY] for log in state.log_history if _DAY in log]
            day = form.chat_date or date.fromisoformat(min(days, default=str(date.today())))
            form = self._arguments["format"] = form.model_copy(update={"chat_date": day})
            state.log_history.append({_DAY: str(day), "step": state.global_step})
        documents = load_documents(
            take_documents(self._arguments["members"], "members"),
            setting="members",
            form=form,
            has_chat_template=lambda: getattr(tokenizer, "chat_template", None) is not None,
            cache_dir=default_cache_dir(),
        ).documents
        tokenized = tokenize_documents(
            documents,
            tokenizer,
            append_eos=False,
            max_tokens=None,
            setting="members",
            day=form.chat_date,
        )
        self._rows = TrainedRows(
            ((document.id, document.input_ids) for document in tokenized),
            RowFormat.of_trainer(args, eos_id=tokenizer.eos_token_id),
        )
        if state.global_step:
            folder = find_resumed(args, state.global_step)
            self._rows.load(folder, args.process_index, args.world_size)
        elif before is not None and trained is model:
            self._rows.go_on(before)
        self._trained_model = weakref.ref(model)
        self._rows.watch(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count what was trained, and audit every ``every_steps`` steps."""
        if self._rows is not None:
            optimizer = kwargs.get("optimizer")
            self._rows.end_step(was_skipped=getattr(optimizer, "step_was_skipped", False))
        if self._every_steps and state.global_step % self._every_steps == 0:
            self._audit(state.global_step, state, control, **kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the counts beside the Trainer's checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._rows is not None:
            self._rows.save(folder, args.process_index, args.world_size)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Audit after an evaluation during training."""
        if self._on_evaluate:
            self._audit(state.global_step, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Audit the final model: of the last step, or of the best one if that was loaded."""
        step = state.global_step
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            step = state.best_global_step
            if step != state.global_step and self._rows is not None:
                best = Path(state.best_model_checkpoint)
                self._rows.load(best, args.process_index, args.world_size)
        self._audit(step, state, control, **kwargs)
        if self._rows is not None:
            self._rows.unwatch()
        self._show_end(step, _make_console(state))

    def _show_end(self, step: int, console: Console) -> None:
        """Say where the last report is, and show it in a notebook."""
        report_of = dict(zip(self.folders, self.reports, strict=True))
        final = self._out / f"step-{step}"
        folder = final if final in report_of else next(reversed(report_of), None)
        if folder is not None:
            console.info(f"memguard: the last report is {folder / 'report.html'}")
        if not self._has_control:
            console.info(
                "memguard: without 'nonmembers' there is no control, so that no verdict can be red"
            )
        if folder is not None and console.in_notebook and not console.quiet:
            from IPython.display import display

            display(AuditResult(folder=folder, report=report_of[folder]))

    def _check(
        self, step: int, model: Any, processing_class: Any, counts: TrainedCounts | None = None
    ) -> CheckedAudit:
        return check_audit(
            make_arguments(
                model=model,
                tokenizer=_find_tokenizer(processing_class),
                out=self._out / f"step-{step}",
                counts=counts,
                **self._arguments,
            )
        )

    @quieted_advice()
    def _audit(
        self, step: int, state: Any, control: Any, *, model: Any, processing_class: Any, **_: Any
    ) -> None:
        if step in self._audited_steps:
            return
        self._audited_steps.add(step)
        console = _make_console(state)
        started = time.perf_counter()
        try:
            counts = None
            if self._rows is not None:
                with join_program() as runtime:
                    counts = self._rows.counts(runtime)
            checked = self._check(step, model, processing_class, counts)
            folder, report = checked.out, audit(checked)
        except OtherRankFailed:
            return  # The rank that failed says why.
        except Exception as error:
            # On whatever process the audit failed.
            reason = describe_foreign(error)
            Console(quiet=False).warn(
                f"memguard: the audit of step {step} failed: {reason}. Training goes on"
            )
            return
        finally:
            audit_s = time.perf_counter() - started
            self._audit_s += audit_s
        self.folders.append(folder)
        self.reports.append(report)
        percent = 100 * self._audit_s / (time.perf_counter() - self._began_s)
        console.info(
            f"memguard: step {step} audited in {format_duration(audit_s)}; audits took "
            f"{percent:.0f} % of the time since training began"
        )
        self._log(
            state, {**_list_scores(report), "audit_s": audit_s, "audit_percent": round(percent, 2)}
        )
        self._judge(step, report, control, console)

    def _log(self, state: Any, scores: Mapping[str, float]) -> None:
        logs = {f"memguard/{name}": value for name, value in scores.items()}
        if self._trainer is None:
            state.log_history.append({**logs, "step": state.global_step})
        else:
            # That of the class: TRL's own would empty the means that it logs after each step.
            Trainer.log(self._trainer, logs)

    def _judge(self, step: int, report: AuditReport, control: Any, console: Console) -> None:
        """End training if a limit is exceeded."""
        for metric, limit in self._stop_above.items():
            rows = _select(report, metric, roles=("trained",))
            unknown = [row for row in rows if row.value is None]
            if unknown or not rows:
                why = unknown[0].missing_because if unknown else "the suite does not measure it"
                console.warn(
                    f"memguard: 'stop_above' cannot judge {metric} of step {step}: {why}. Training "
                    "goes on"
                )
                continue
            rates = {row.bucket: row.value for row in rows}
            over = find_over_limit(rates, limit)
            if over:
                extracted = format_percent(rates[over[0]])
                console.warn(
                    f"memguard: training ends after step {step}: {extracted} of the documents of "
                    f"'{over[0]}' are extracted ({metric}), and 'stop_above' allows "
                    f"{format_percent(limit)}"
                )
                control.should_training_stop = True


def _find_tokenizer(processing_class: Any) -> Any:
    """Return the tokenizer; the processor of a model with images has one."""
    return getattr(processing_class, "tokenizer", processing_class)


def _make_console(state: Any) -> Console:
    return Console(quiet=not state.is_world_process_zero)


def _list_scores(report: AuditReport) -> dict[str, float]:
    """Return the scores of each bucket that have a value, by ``bucket/metric``.

    Buckets of the members have other names from step to step where their repetitions differ, so the
    mean over all members is there in each step.
    """
    scores = {
        f"{row.bucket}/{metric}": row.value
        for metric in _LOGGED
        for row in _select(report, metric)
        if row.value is not None
    }
    for metric in _LOGGED:
        rows = [row for row in _select(report, metric, ("trained",)) if row.value is not None]
        num_documents = sum(row.num_documents for row in rows)
        if num_documents:
            total = sum(row.value * row.num_documents for row in rows)
            scores[f"members/{metric}"] = total / num_documents
    return scores


def _select(
    report: AuditReport, metric: str, roles: Sequence[str] = ("trained", "control")
) -> list[Any]:
    buckets = {row.bucket for row in report.tables.buckets if row.role in roles}
    statistic = _LOGGED[metric]  # type: ignore[index]
    rows = report.tables.select(
        "extraction", metric, model="trained", statistic=statistic, against=None
    )
    return [row for row in rows if row.bucket in buckets]
