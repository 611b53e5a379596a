"""The commands and their arguments; those on finished folders are in `finished`."""

from pathlib import Path
from typing import Annotated, Any

import typer

import memguard
from memguard.cli import bundles, finished, first_minutes, options
from memguard.cli.doctor import doctor
from memguard.cli.options import (
    TAKES_SETTINGS,
    Config,
    Json,
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
    # Plain help wraps at 80 columns; rich's table cuts the names of long options there.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune causal language models, measure memorization, and prevent it in the loss.",
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(memguard.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(first_minutes.COMMANDS)
        raise typer.Exit


app.command()(first_minutes.init)


@app.command(context_settings=TAKES_SETTINGS)
def plan(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="A run's YAML, or the name of a shipped one."),
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
    if config is not None and "=" in config and not Path(config).exists():
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
    from memguard.workflows.training.train import prepare_run

    summary = prepare_run(run).corpus.summary
    print_result(as_json, summary.model_dump(mode="json"), run.folder / "manifest.jsonl")


@app.command(context_settings=TAKES_SETTINGS)
def train(
    config: Config,
    overrides: Overrides = None,
    nproc: TrainNproc = None,
    as_json: Json = False,
) -> None:
    """Train a run and audit it.

    After an interruption the same command resumes.
    """
    from memguard.workflows.training.checks import check_run

    run = check_run(_load_run(config, overrides), nproc=nproc)
    for note in run.notes:
        say(f"train: {note}")
    if run.num_to_start > 1:
        run_on_processes(run.num_to_start)
    say("train: loading torch and transformers")
    from memguard.workflows.training.train import train_run

    print_result(as_json, train_run(run), run.folder)


@app.command()
def audit(
    context: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Folder of a run trained by memguard.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of any other model.")] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="The base model, for comparison; for a RUN, its present location.",
        ),
    ] = None,
    no_base: Annotated[
        bool, typer.Option("--no-base", help="Do not score the base model of a RUN.")
    ] = False,
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
    columns: options.Columns = None,
    template: options.Template = None,
    tags: options.Tags = None,
    text_column: Annotated[str | None, typer.Option(hidden=True)] = None,
    continuation_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the continuation (tokens).")
    ] = None,
    prefix_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the prefix (tokens); unlimited if left out."),
    ] = None,
    min_prefix_tokens: Annotated[
        int | None, typer.Option(min=1, help="Shortest prefix to audit (tokens).")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(help="Part to audit of documents longer than the context: last or first."),
    ] = None,
    min_documents: Annotated[
        int | None, typer.Option(min=1, help="Fewest members to accept (documents).")
    ] = None,
    max_documents_per_bucket: Annotated[
        int | None,
        typer.Option("--max-documents", min=1, help="Largest sample per bucket (documents)."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Reference model of the same vocabulary, for membership inference."),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per forward pass; as many as fit if left out."),
    ] = None,
    max_generation_minutes: Annotated[
        float | None,
        typer.Option(
            help="Longest time of generation whose weights are gathered for each token (minutes)."
        ),
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(help="auto: distribute a large model over GPUs, memory and disk."),
    ] = None,
    cache: Annotated[
        bool | None, typer.Option(help="Reuse cached scores, and cache new ones.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    excerpts: Annotated[
        bool | None,
        typer.Option(help="Write the text of the worst findings to private/ (mode 0600)."),
    ] = None,
    utility: Annotated[
        str | None,
        typer.Option(
            help="Benchmark tasks of lm-eval, by name or YAML: hellaswag:200,./my_task.yaml runs "
            "200 items of the first; '' runs none."
        ),
    ] = None,
    allow_download: Annotated[
        bool | None, typer.Option(help="Let --utility download datasets from the hub.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Random seed of the document samples.")
    ] = 0,
    load_as: options.LoadAs = "stored",
    identity_key: Annotated[
        Path | None,
        typer.Option(
            help="Key under which equal texts have equal hashes; your project's if left out."
        ),
    ] = None,
    nproc: Nproc = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Mesh of the processes, e.g. z=2,x=2; the run's if left out."),
    ] = None,
    list_probes: Annotated[
        bool,
        typer.Option("--list-probes", help="List the probes that a suite can name; audit nothing."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure what a model memorized of its training data."""
    if list_probes:
        from memguard.cli.probes_screen import print_probes

        print_probes(as_json=as_json)
        return
    from memguard.config import AuditConfig
    from memguard.workflows.auditing.checks import AuditRequest
    from memguard.workflows.common.format_arguments import read_format_options

    settings = {
        name: value
        for name, value in context.params.items()
        if name in AuditConfig.model_fields and value is not None
    }
    request = AuditRequest(
        run=run,
        model=model,
        base=base_model,
        members=tuple(members or ()),
        nonmembers=tuple(nonmembers or ()),
        out=out,
        form=read_format_options(format, columns, template, tags, text_column),
        mesh=mesh,
        settings=settings | ({"base": False} if no_base else {}),
        seed=seed,
        load_as=load_as,
        identity_key=identity_key,
    )
    checked = request.check()
    from memguard.workflows.auditing.checks import check_audit, check_identity_place
    from memguard.workflows.common.checks import count_processes, count_usable_gpus
    from memguard.workflows.common.folder import check_free

    check_audit(request, checked, count_processes(nproc or 1))
    if own_rank() == 0:
        check_free(request.locked_folder)
        check_identity_place(request)
    if nproc is None and (num_gpus := count_usable_gpus()) > 1:
        say(f"audit: 1 of {num_gpus} visible GPUs is used; --nproc splits the model over more")
    run_on_processes(nproc or 1)
    say("audit: loading torch and transformers")
    from memguard.workflows.auditing.audit import audit_request

    folder, report = audit_request(request, checked)
    print_result(as_json, report.model_dump(mode="json", by_alias=True), folder / "report.html")


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
            metavar="[KEY=VALUE | RUN]...",
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
    print_result(as_json, result and result.model_dump(mode="json", by_alias=True), page)


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
    *(bundles.bundle, doctor),
):
    app.command()(command)
