"""`--help`: options in groups, an example of each command, plain lines of at most 80 columns.

rich's panels are not used: at 80 columns they cut the names of long options.
"""

import re
from typing import Any

from typer.core import TyperCommand

_OPTIONS = {
    "Model and documents (audit)": "model base members nonmembers format load_as",
    "Probes (audit)": "suite list_probes",
    "Machine and mesh (plan)": "gpus machine mesh",
    "Short for settings (plan)": "seq_len batch micro_batch checkpointing precision lora_r",
    "For a sweep (compare)": "jobs",
    "For finished runs (compare)": "out fix utility",
    "To write a policy (gate)": "init every",
    "To merge (export)": "merge dtype base",
    "From seeds (export)": "from_seeds",
    "To the hub (export)": "to dry_run public allow_extracted allow_unaudited",
}
_EXAMPLES = {
    "init": "init run.yaml",
    "plan": "plan run.yaml --machine dgx-h100 --gpus 8",
    "train": "train run.yaml optim.lr=1e-5 name=slow",
    "audit": "audit --model DIR --members a.jsonl --nonmembers b.jsonl --out DIR",
    "compare": "compare quickstart --jobs 2",
    "prepare": "prepare run.yaml",
    "export": "export runs/my-run --to hub:me/my-model --dry-run",
    "track": "track runs/my-run --to tensorboard",
    "diff": "diff runs/old runs/new",
    "gate": "gate runs/my-run --policy policy.yaml",
    "accept": "accept runs/my-run DOCUMENT --by 'A. Writer' --reason 'public text'",
    "bundle": "bundle runs/my-run evidence.zip",
    "doctor": "doctor --nproc 4",
}
_VALUE = re.compile(r" <(\w+)[^>]*>")
"""How newer versions of typer write a type: ``<list[str]>``."""
_VALUES = {"int": "N", "path": "PATH", "list": "PATH"}


class Command(TyperCommand):
    """A command whose help has its options in groups and ends with an example."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options and the example; options of no group are the last."""
        end = f" ({self.name})"
        own = {title[: -len(end)]: keys for title, keys in _OPTIONS.items() if title.endswith(end)}
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{key: [] for key in own}}
        for parameter in self.get_params(ctx):
            name, text = parameter.get_help_record(ctx) or ("", "")
            group = next((key for key in own if parameter.name in own[key].split()), "Options")
            if parameter.param_type_name == "argument":
                group, name = "Arguments", _VALUE.sub("", name)
            name = _VALUE.sub(lambda found: f" {_VALUES.get(found[1], 'TEXT')}", name)
            groups.setdefault(group, []).append((name, text))
        for group, rows in groups.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)
        with formatter.section("Example"):
            example = _EXAMPLES.get(self.name or "", f"{self.name} runs/my-run")
            formatter.write(f"  memguard {example}\n")
