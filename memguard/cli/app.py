"""The commands and their arguments."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

import memguard
from memguard.workflows.launch import own_rank, run_on_processes

app = typer.Typer(
    name="memguard",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune causal language models, measure what they memorised, prevent it in the loss.",
)

_Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A run's YAML, or the name of a shipped one.")
]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, e.g. optim.lr=1e-4."),
]
# `--optim.lr=1e-4`, as other trainers write it, is taken for a setting.
_TAKES_SETTINGS = {"ignore_unknown_options": True}
# As the settings that they stand for.
_MAX_GPUS, _MAX_ROWS = 10**7, 10**9
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_Nproc = Annotated[
    int, typer.Option("--nproc", min=1, help="Run on this many processes of this machine.")
]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(memguard.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command()
def init(
    path: Annotated[
        Path | None, typer.Argument(help="File to write; standard output if left out.")
    ] = None,
    schema: Annotated[bool, typer.Option(help="The JSON Schema of a run instead.")] = False,
) -> None:
    """Write a commented YAML with every setting, its default and its unit."""
    import json

    from memguard.config import RunConfig, render_template
    from memguard.errors import ConfigError
    from memguard.records import write_atomically

    text = render_template()
    if schema:
        text = json.dumps(RunConfig.model_json_schema(), indent=2) + "\n"
    if path is None:
        typer.echo(text, nl=False)
    else:
        if path.exists():
            raise ConfigError(f"'{path}' exists already; choose another name or delete it")
        write_atomically(path, text.encode())
        hint = f"fill in 'model.path' and 'data.train', then: memguard train {path}"
        typer.echo(f"wrote {path}; {hint}")


@app.command(context_settings=_TAKES_SETTINGS)
def plan(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="A run's YAML, or the name of a shipped one."),
    ] = None,
    overrides: _Overrides = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A model's config.json, or the folder it is in; alone or for a CONFIG."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, max=_MAX_GPUS, help="How many; the mesh's or one machine's if left out."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="perlmutter, perlmutter-80gb, frontier, alps, dgx-h100, h200 or a YAML of yours; "
            "this-machine if left out."
        ),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Ask about this mesh, e.g. z=16,y=2,x=8.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=2**24,
            help="Without a CONFIG: length of a row (tokens) (2048 if left out).",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=_MAX_ROWS, help="Without a CONFIG: rows of an optimizer step."),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=_MAX_ROWS, help="Without a CONFIG: rows of one forward pass of a GPU."
        ),
    ] = None,
    checkpointing: Annotated[
        str | None, typer.Option(help="Without a CONFIG: none, selective or full.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Without a CONFIG: fp32 or bf16; bf16 if left out.")
    ] = None,
    documents: Annotated[
        bool, typer.Option(help="With a CONFIG: read its documents, as training would.")
    ] = True,
    as_json: _Json = False,
) -> None:
    """Tell which meshes fit, and what a run would do, before anything is started."""
    from memguard.workflows.requests import PlanRequest

    request = PlanRequest(**_pick(context, [field.name for field in fields(PlanRequest)]))
    request.check()
    run = None if config is None else _load_run(config, overrides)
    if run is not None and documents:
        _check(run)
        _say("plan: loading torch and transformers")
    from memguard.cli.screens import print_plan

    print_plan(request, run, with_documents=documents, as_json=as_json)


@app.command(context_settings=_TAKES_SETTINGS)
def prepare(config: _Config, overrides: _Overrides = None, as_json: _Json = False) -> None:
    """Read, tokenise and place the documents of a run; train nothing."""
    run = _load_run(config, overrides)
    _check(run)
    _check_folder(run)
    _say("prepare: loading torch and transformers")
    from memguard.workflows.train import prepare_run

    corpus = prepare_run(run).corpus
    _print(as_json, corpus.summary.model_dump(mode="json"), _run_folder(run) / "manifest.jsonl")


@app.command(context_settings=_TAKES_SETTINGS)
def train(
    config: _Config,
    overrides: _Overrides = None,
    nproc: _Nproc = 1,
    as_json: _Json = False,
) -> None:
    """Train a run and audit it; the same command goes on where it was interrupted."""
    from memguard.workflows.run_checks import count_processes

    run = _load_run(config, overrides)
    _check(run, num_processes=count_processes(nproc))
    _check_folder(run)
    run_on_processes(nproc)
    _say("train: loading torch and transformers")
    from memguard.workflows.train import train_run

    outcome = train_run(run)
    _print(as_json, outcome, _run_folder(run))


@app.command()
def audit(
    context: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Folder of a run memguard trained.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id of a model memguard did not train.")
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="The model it was fine-tuned from, for comparison; of a RUN, where it is now.",
        ),
    ] = None,
    no_base: Annotated[
        bool, typer.Option("--no-base", help="Leave out the model a RUN was trained from.")
    ] = False,
    members: Annotated[
        list[str] | None, typer.Option(help="Documents it was trained on (may be repeated).")
    ] = None,
    nonmembers: Annotated[
        list[str] | None, typer.Option(help="Documents of the same kind it never saw.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the report goes; the run's audit/ if left out.")
    ] = None,
    suite: Annotated[str | None, typer.Option(help="Shipped suite or its YAML.")] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Column that holds the text of plain documents.")
    ] = None,
    continuation_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the continuation (tokens).")
    ] = None,
    prefix_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the prefix (tokens); everything if left out."),
    ] = None,
    min_prefix_tokens: Annotated[
        int | None, typer.Option(min=1, help="Shorter prefixes are too short to audit (tokens).")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(help="Part audited of documents longer than a row or context: last or first."),
    ] = None,
    min_documents: Annotated[
        int | None, typer.Option(min=1, help="Refuse below this many members (documents).")
    ] = None,
    max_documents_per_bucket: Annotated[
        int | None,
        typer.Option("--max-documents", min=1, help="Sample at most this many of each bucket."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Another model of the same vocabulary, for membership.")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one forward pass; what fits if left out.")
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(help="auto: spread a model that is too large over GPUs, memory and disk."),
    ] = None,
    cache: Annotated[
        bool | None, typer.Option(help="Use scores that were made before, and keep new ones.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    excerpts: Annotated[
        bool | None,
        typer.Option(help="Write the worst findings' text to private/ (mode 0600)."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Decides which documents are sampled.")
    ] = 0,
    nproc: _Nproc = 1,
    mesh: Annotated[
        str | None,
        typer.Option(help="Mesh of the processes, e.g. z=2,x=2; the run's if left out."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Measure what a model recites of its training documents."""
    from memguard.config import AuditConfig
    from memguard.workflows.requests import AuditRequest

    given = _pick(context, AuditConfig.model_fields)
    settings = {name: value for name, value in given.items() if value is not None}
    request = AuditRequest(
        run=run,
        model=model,
        base=base_model,
        members=tuple(members or ()),
        nonmembers=tuple(nonmembers or ()),
        out=out,
        text_column=text_column or "text",
        mesh=mesh,
        settings=settings | ({"base": False} if no_base else {}),
        seed=seed,
    )
    checked = request.check()
    from memguard.workflows.requests import check_audit
    from memguard.workflows.run_checks import count_processes
    from memguard.workflows.run_folder import check_free

    check_audit(request, checked, count_processes(nproc))
    if own_rank() == 0:
        check_free(request.locked_folder)
    run_on_processes(nproc)
    _say("audit: loading torch and transformers")
    from memguard.workflows.audit import audit_request

    folder, report = audit_request(request, checked)
    _print(as_json, report.model_dump(mode="json", by_alias=True), folder / "report.html")


@app.command(context_settings=_TAKES_SETTINGS)
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
            help="Settings of the sweep to change, e.g. run.optim.lr=1e-4; or more runs.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Of RUNs: where the comparison goes; beside the first if left out."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Of a sweep: runs trained at a time; 1 if left out.")
    ] = None,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="Of one RUN: train it again, changed by what its report found; compare."
        ),
    ] = False,
    keep_weights: Annotated[
        bool,
        typer.Option(
            "--keep-weights", help="With --fix: train the model on until it forgets, and audit it."
        ),
    ] = False,
    nproc: _Nproc = 1,
    as_json: _Json = False,
) -> None:
    """Train and audit every setting of a sweep on the same documents, then compare them.

    Given folders of finished runs it trains nothing and holds the others against the first.
    """
    from memguard.workflows.requests import CompareRequest

    request = CompareRequest(
        given=(sweep, *(others or ())),
        out=out,
        jobs=jobs,
        fix=fix,
        keep_weights=keep_weights,
        num_processes=nproc,
    )
    request.check()
    if request.are_runs:
        count = len(request.given)
        _say(f"compare: reading {count} {'run' if count == 1 else 'runs'}")
    from memguard.workflows.compare import compare as compare_request

    page, result = compare_request(request)
    _print(as_json, result and result.model_dump(mode="json", by_alias=True), page)


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(help="A run, an audit folder or a sweep; its JSON is rendered anew.")
    ],
) -> None:
    """Render report.html or comparison.html again from the JSON beside it."""
    from memguard.workflows.compare import render_folder

    typer.echo(render_folder(folder))


@app.command()
def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or of an audit with --out.")
    ],
    as_json: _Json = False,
) -> None:
    """Tell what of a run is still what was written, and what mends the rest."""
    import json

    import rich.console

    from memguard.cli.verify_screen import render_verified, shown_reading
    from memguard.workflows.verify import verify as verify_folder

    with shown_reading() as on_read:
        found = verify_folder(folder, on_read)
    if as_json:
        typer.echo(json.dumps(found.describe(), indent=2))
    else:
        render_verified(found, rich.console.Console(highlight=False))
    if not found.is_whole:
        raise typer.Exit(3)


def _pick(context: typer.Context, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of a command that have these names."""
    return {name: context.params[name] for name in names if name in context.params}


def _load_run(config: str, overrides: list[str] | None) -> Any:
    from memguard.assets import find_asset
    from memguard.config import load_run_config

    return load_run_config(find_asset("configs", config, setting="CONFIG"), overrides or ())


def _check(run: Any, *, num_processes: int | None = None) -> None:
    from memguard.workflows.requests import check_run

    check_run(run, num_processes=num_processes)


def _check_folder(run: Any) -> None:
    """Look at the run's folder before torch is imported; of several processes one does."""
    from memguard.workflows.run_folder import check_free

    if own_rank() == 0:
        check_free(_run_folder(run))


def _say(text: str) -> None:
    """Print what is being done before a wait; on standard error, by rank 0."""
    if own_rank() == 0:
        typer.echo(text, err=True)


def _run_folder(run: Any) -> Path:
    return Path(run.output_dir) / str(run.name)


def _print(as_json: bool, result: Any, path: Path) -> None:
    import json

    if own_rank() == 0:
        typer.echo(json.dumps(result, indent=2) if as_json else str(path))
