"""What a new user meets first: the commands that one needs, and settings to fill in."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

COMMANDS = """\
memguard fine-tunes causal language models and measures what they memorized.

  memguard compare quickstart   train tiny models on the CPU, to see a report
  memguard init run.yaml        write the settings of a run, to fill in
  memguard plan run.yaml        check them, and whether it fits this machine
  memguard train run.yaml       train, then audit; the same command resumes
  memguard audit --model DIR --members FILE --nonmembers FILE --out DIR
                                audit a model that was trained elsewhere

memguard doctor checks this installation; memguard --help lists all commands."""
"""What `memguard` alone prints."""


def init(
    path: Annotated[
        Path | None, typer.Argument(help="File to write; standard output if left out.")
    ] = None,
    schema: Annotated[bool, typer.Option(help="Write the JSON Schema of a run instead.")] = False,
) -> None:
    """Write a commented YAML template with all settings."""
    from memguard.config import RunConfig, render_template
    from memguard.errors import ConfigError
    from memguard.records import write_atomically

    text = render_template()
    if schema:
        text = json.dumps(RunConfig.model_json_schema(), indent=2) + "\n"
    if path is None:
        typer.echo(text, nl=False)
        return
    if path.exists():
        raise ConfigError(f"'{path}' exists already; choose another name or delete it")
    write_atomically(path, text.encode())
    typer.echo(f"wrote {path}" if schema else _write_next_steps(path))


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
