"""The commands and their arguments; those on finished folders are in `finished`."""

import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

import memguard
from memguard.cli import finished, help, options
from memguard.cli.doctor import doctor
from memguard.cli.options import (
    TAKES_SETTINGS,
    Config,
    Json,
    MaxRestarts,
    Nproc,
    Overrides,
    TrainNproc,
    print_result,
    refuse_split_settings,
    say,
)
from memguard.runtime.children import own_rank
from memguard.workflows.common.launch import run_on_processes

app = typer.Typer(
    name="memguard",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune causal language models, measure memorization, and prevent it in the loss.",
)

_COMMANDS = """\
memguard fine-tunes causal language models and measures what they memorized.

  memguard compare quickstart   train tiny models on the CPU, to see a report
  memguard init run.yaml        write the settings of a run, to fill in
  memguard plan run.yaml        check them, and whether it fits this machine
  memguard train run.yaml       train, then audit; the same command resumes
  memguard audit --model DIR --members FILE --nonmembers FILE --out DIR
                                audit a model that was trained elsewhere

memguard doctor checks this installation; memguard --help lists all commands."""
"""What `memguard` alone prints."""


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(memguard.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(_COMMANDS)
        raise typer.Exit


@app.command()
def init(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="File to write; standard output if left out."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Write every setting.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Write the JSON Schema.")] = False,
) -> None:
    """Write the usual settings of a run, each with a comment, to fill in."""
    from memguard.config import RunConfig, render_template
    from memguard.records.record import write_new

    text = render_template(with_all=every)
    if schema:
        text = json.dumps(RunConfig.model_json_schema(), indent=2) + "\n"
    if path is None:
        typer.echo(text, nl=False)
        return
    write_new(path, text)
    typer.echo(f"wrote {path}" if schema else _write_next_steps(path))


@app.command(context_settings=TAKES_SETTINGS)
def plan(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="A run's YAML, or the name of a shipped one."),
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A model's config.json or its folder; alone, or for a CONFIG."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, max=10**7, help="Number of GPUs; the mesh's or one node's if left out."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="perlmutter, perlmutter-80gb, frontier, alps, dgx-h100, h200 or your own YAML; "
            "this-machine if left out."
        ),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Parallel layout to estimate, e.g. z=16,y=2,x=8.")
    ] = None,
    seq_len: Annotated[str | None, typer.Option(help="Short for data.seq_len=...")] = None,
    batch: Annotated[str | None, typer.Option(help="Short for train.batch_size=...")] = None,
    micro_batch: Annotated[
        str | None, typer.Option(help="Short for train.micro_batch_size=...")
    ] = None,
    checkpointing: Annotated[
        str | None, typer.Option(help="Short for train.activation_checkpointing=...")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Short for train.precision=...")] = None,
    lora_r: Annotated[
        str | None, typer.Option(help="Short for adapter.name=lora adapter.r=...")
    ] = None,
    documents: Annotated[
        bool, typer.Option(help="With a CONFIG: read its documents, as training would.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Estimate memory and list feasible parallel layouts.

    With a CONFIG it also shows, without training, what the run would train, save and audit.
    Without one, rows have 2048 tokens, and the planner chooses whatever you do not set.
    """
    from memguard.workflows.plan import PlanRequest

    settings = list(overrides or ())
    if config is not None and "=" in config and not os.path.exists(config):
        settings, config = [config, *settings], None
    short = {
        "data.seq_len": seq_len,
        "train.batch_size": batch,
        "train.micro_batch_size": micro_batch,
        "train.activation_checkpointing": checkpointing,
        "train.precision": precision,
        "adapter.name": None if lora_r is None else "lora",
        "adapter.r": lora_r,
    }
    settings += [f"{setting}={value}" for setting, value in short.items() if value is not None]
    request = PlanRequest(
        run=_load_model_alone(settings) if config is None else _load_run(config, settings),
        is_run=config is not None,
        model=model,
        gpus=gpus,
        machine=machine,
        mesh=mesh,
        arguments=None if config is None else (config, *settings),
    )
    request.check()
    checked = None
    if documents and request.is_run:
        from memguard.workflows.training.checks import check_run

        checked = check_run(request.run, trains=False, writes=False)
        say("plan: loading torch and transformers")
    from memguard.cli.plan_screen import print_plan

    print_plan(request, run=checked, as_json=as_json)


@app.command(context_settings=TAKES_SETTINGS)
def prepare(config: Config, overrides: Overrides = None, as_json: Json = False) -> None:
    """Read and tokenise the documents of a run.

    Documents are also assigned to buckets. Nothing is trained.
    """
    from memguard.workflows.training.checks import check_run

    run = check_run(_load_run(config, overrides), trains=False)
    say("prepare: loading torch and transformers")
    from memguard.workflows.training.data import prepare_run

    summary = prepare_run(run).corpus.summary
    print_result(as_json, summary.model_dump(mode="json"), run.folder / "manifest.jsonl")


@app.command(context_settings=TAKES_SETTINGS)
def train(
    config: Config,
    overrides: Overrides = None,
    nproc: TrainNproc = None,
    max_restarts: MaxRestarts = 0,
    as_json: Json = False,
) -> None:
    """Train a run and audit it.

    After an interruption the same command resumes.
    """
    from memguard.runtime.ended import refuse_restart
    from memguard.workflows.training.checks import check_run

    settings = _load_run(config, overrides)
    refuse_restart(Path(settings.output_dir) / settings.name)
    run = check_run(settings, nproc=nproc)
    for note in run.notes:
        say(f"train: {note}")
    run_on_processes(run.num_to_start, (run.folder, max_restarts) if max_restarts else None)
    say("train: loading torch and transformers")
    from memguard.workflows.training.train import train_run

    result = train_run(run)
    print_result(as_json, result, result.get("report", run.folder))


@app.command(context_settings=TAKES_SETTINGS)
def audit(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Folder of a run trained by memguard.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings as in a run's file: audit.prefix_tokens=50, audit.base=false, seed=1, "
            "parallel.z=2; `memguard init --all` describes them.",
            callback=refuse_split_settings,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of any other model.")] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The base model, for comparison; for a RUN, its present location."),
    ] = None,
    members: Annotated[
        list[str] | None, typer.Option(help="Training documents of the model (repeatable).")
    ] = None,
    nonmembers: Annotated[
        list[str] | None,
        typer.Option(help="Similar documents that were not in the training data (repeatable)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; the run's audit/ if left out.")
    ] = None,
    suite: Annotated[str | None, typer.Option(help="Shipped suite, or a suite's YAML.")] = None,
    format: options.Format = None,
    load_as: options.LoadAs = "stored",
    step: Annotated[
        int | None, typer.Option(min=1, help="Audit a RUN's checkpoint of this step, into --out.")
    ] = None,
    nproc: Nproc = None,
    list_probes: Annotated[
        bool,
        typer.Option("--list-probes", help="List the probes that a suite can name; audit nothing."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure what a model memorized of its training data."""
    if list_probes:
        from memguard.cli.probes import print_probes

        print_probes(as_json=as_json)
        return
    from memguard.workflows.auditing.arguments import read_format
    from memguard.workflows.auditing.checks import AuditArguments, check_audit
    from memguard.workflows.common.checks import count_processes, count_usable_gpus

    settings = [*([] if suite is None else [f"audit.suite={suite}"]), *(overrides or ())]
    if run is not None and "=" in run and not os.path.exists(run):
        settings, run = [run, *settings], None
    arguments = AuditArguments(
        run=None if run is None else Path(run),
        model=model,
        base=base,
        members=tuple(members or ()),
        nonmembers=tuple(nonmembers or ()),
        out=out,
        form=read_format(format, option="--format"),
        load_as=load_as,
        step=step,
        style="options",
        settings=AuditArguments.read_settings(settings),
    )
    num_processes = count_processes(nproc or 1)
    checked = check_audit(arguments, num_processes=num_processes, writes=own_rank() == 0)
    if nproc is None and (num_gpus := count_usable_gpus()) > 1:
        say(f"audit: 1 of {num_gpus} visible GPUs is used; --nproc splits the model over more")
    run_on_processes(nproc or 1)
    say("audit: loading torch and transformers")
    from memguard.workflows.auditing.audit import audit as audit_checked
    from memguard.workflows.training.export import run_at_step

    report = audit_checked(checked, at_step=run_at_step)
    print_result(as_json, report.model_dump(mode="json"), checked.out / "report.html")


@app.command(context_settings=TAKES_SETTINGS)
def compare(
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP | RUN RUN ...",
            help="A sweep's YAML, or the name of a shipped one; or the folders of finished runs.",
        ),
    ],
    others: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE | RUN",
            help="Settings of the sweep to change, e.g. run.optim.lr=1e-4; or more run folders.",
            callback=refuse_split_settings,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="For RUNs: folder of the comparison; next to the first if left out."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="For a sweep: runs to train at the same time; 1 if left out."),
    ] = None,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="For one RUN: train again with the fix its report suggests; compare both."
        ),
    ] = False,
    utility: Annotated[
        str | None, typer.Option(help="For RUNs: the utility, 'heldout_nll' or a benchmark task.")
    ] = None,
    nproc: TrainNproc = None,
    as_json: Json = False,
) -> None:
    """Train, audit and compare settings or runs.

    All settings of a SWEEP are trained and audited on the same documents. If folders of finished
    RUNs are given instead, nothing is trained and the others are compared with the first.
    """
    from memguard.workflows.compare import CompareRequest

    request = CompareRequest(
        given=(sweep, *(others or ())),
        out=out,
        jobs=jobs,
        fix=fix,
        num_processes=nproc,
        utility=utility,
    )
    request.check()
    if request.are_runs:
        count = len(request.given)
        say(f"compare: reading {count} {'run' if count == 1 else 'runs'}")
    from memguard.workflows.compare import compare as compare_request

    page, result = compare_request(request)
    print_result(as_json, result and result.model_dump(mode="json"), page)


def _write_next_steps(path: Path) -> str:
    """Return what to change in a new file, and the commands that follow."""
    name = shlex.quote(str(path))
    return (
        f"wrote {path}; fill in 'model.path' and 'data.train', all other settings may stay:\n"
        "  model.path   the model to fine-tune: a folder or a hub id\n"
        "  data.train   its documents: .jsonl, .csv, .parquet, .txt, a folder or a hub id\n"
        "then\n"
        f"  memguard plan {name}    reads the documents, estimates memory and time\n"
        f"  memguard train {name}   trains, then audits"
    )


def _load_run(config: str, overrides: list[str] | None) -> Any:
    from memguard.assets import find_asset
    from memguard.config import load_run_config

    return load_run_config(find_asset("configs", config, setting="CONFIG"), overrides or ())


def _load_model_alone(settings: list[str]) -> Any:
    from memguard.config import RunConfig, apply_overrides, validate
    from memguard.workflows.plan import MODEL_ALONE

    document = apply_overrides(MODEL_ALONE, settings)
    return validate(RunConfig, document.values, document)


for command in (
    *(finished.export, finished.report, finished.verify, finished.diff, finished.gate),
    *(finished.accept, finished.bundle, finished.track, doctor),
):
    app.command()(command)
for registered in app.registered_commands:
    registered.cls = help.Command
