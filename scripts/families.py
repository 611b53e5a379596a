"""Compare every family on meshes with one process, and write the table of families.

python scripts/families.py                         every model type of transformers; half an hour
python scripts/families.py llama gpt2              these
python scripts/families.py --jobs 2 --json out.json
python scripts/families.py --groups                 which meshes each type can use, without training

A tiny random model of each type trains two steps on four CPU processes and, independently, in
plain transformers on one, both in float64, on the same rows with goldfish loss. Rows hold several
documents if the family keeps them apart. A figure is the largest relative difference of loss,
gradient norm and each gradient. Columns are meshes (data, z, y, x); in (1,1,1,4) two ranks share a
key/value head where the family has two of them. `export` is the largest difference of logits
(float32) between the model and the folder that a mesh wrote, loaded by plain transformers.

The last line is a verdict: FAIL if a figure is above its limit, or if fewer families are compared
than README.md says.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Read by transformers in each process when it is imported.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parallel")]

from family_groups import list_lines, list_model_types, survey_families  # noqa: E402
from mesh_export import export_layer  # noqa: E402
from parity import Case, case_of, compare  # noqa: E402
from ranks import RankPool  # noqa: E402
from tiny_families import build  # noqa: E402

from memguard.errors import ConfigError, ModelError  # noqa: E402
from memguard.hf.assembly import Assembly, build_meta_layer, fill_layer  # noqa: E402
from memguard.hf.safetensors import ModuleWeights  # noqa: E402
from memguard.parallel.hf_plan import plan_sharding  # noqa: E402
from memguard.parallel.mesh import build_mesh  # noqa: E402
from memguard.parallel.mesh_shape import MeshShape  # noqa: E402
from memguard.parallel.model_sizes import COMPARED_FAMILIES  # noqa: E402

Degrees = tuple[int, int, int, int]
STORAGE: Degrees = (2, 2, 1, 1)
SPLIT: tuple[Degrees, ...] = ((1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 1, 2), (1, 1, 1, 4))
# float64 has 16 digits; sums in another order lose up to four of them.
LIMIT = 1e-10
# Weights are written as they are read; logits of both sides come from the same code.
EXPORT_LIMIT = 1e-6
NUM_SPLIT, NUM_STORAGE = 50, 169
# Configurations with names of their own for sizes stay large.
MAX_PARAMETERS = 30_000_000
TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was seen of one model type."""

    family: str
    group: str
    """`any mesh`, `data and z`, `differs` from one process, `refused` by memguard, or `not run`."""
    errors: dict[str, float] = field(default_factory=dict)
    """Largest relative difference by mesh."""
    export: float | None = None
    packed: bool | None = None
    reason: str = ""
    """Why it is not in the first group."""


def compare_mesh(degrees: Degrees, case: Case) -> float:
    """Return the largest error on one mesh; on every rank."""
    (worst,) = compare(degrees, [case])
    return max(worst.loss, worst.gradient, worst.norm)


def export(family: str, degrees: Degrees, folder: str) -> None:
    """Write the untrained model from a mesh; on every rank."""
    model = build(family)
    mesh = build_mesh(MeshShape(**dict(zip(("data", "z", "y", "x"), degrees, strict=True))), "cpu")
    layer = build_meta_layer(model.config, Assembly(mesh=mesh, device=torch.device("cpu")))
    fill_layer(layer, ModuleWeights(model), name=family)
    export_layer(layer, _NoTokenizer(), Path(folder), dtype=torch.float32, card="")
    dist.barrier()


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """Write nothing."""


def measure_export(pool: RankPool, family: str, degrees: Degrees) -> float:
    """Return the largest difference of logits between a model and its exported folder."""
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "model")
        pool(export, 4, family, degrees, folder, timeout_s=TIMEOUT_S)
        # In a process of its own: threads of `--jobs` share the generator that draws the weights.
        (difference,) = pool(compare_logits, 1, family, folder, timeout_s=TIMEOUT_S)
    return float(difference)


@torch.no_grad()
def compare_logits(family: str, folder: str) -> float:
    """Load an exported folder in plain transformers; on one rank."""
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    if info["missing_keys"] or info["unexpected_keys"]:
        raise RuntimeError(f"missing {info['missing_keys']}, unexpected {info['unexpected_keys']}")
    ids = torch.arange(3, 19).reshape(2, 8)
    # Caches of some families with recurrent layers fail.
    models = (build(family), loaded.eval())
    logits = [model(input_ids=ids, use_cache=False).logits for model in models]
    return float((logits[0] - logits[1]).abs().max())


def examine(pool: RankPool, family: str, checkpointing: str = "none") -> Row:
    """Compare one model type on every mesh that it can use."""
    try:
        with torch.device("meta"):
            num_parameters = sum(parameter.numel() for parameter in build(family).parameters())
        if num_parameters > MAX_PARAMETERS:
            raise ValueError(f"its small form has {num_parameters:,} parameters")
        case = case_of(family, num_steps=2, checkpointing=checkpointing)
    except ModelError as error:
        return Row(family=family, group="refused", reason=_say(error))
    except Exception as error:
        return Row(family=family, group="not run", reason=_say(error))
    group, reason = "any mesh", ""
    try:
        plan_sharding(build(family))
    except Exception as error:
        group, reason = "data and z", _say(error)
    meshes = (*SPLIT, STORAGE) if group == "any mesh" else (STORAGE,)
    errors: dict[str, float] = {}
    try:
        for degrees in meshes:
            name = ",".join(map(str, degrees))
            errors[name] = max(pool(compare_mesh, 4, degrees, case, timeout_s=TIMEOUT_S))
        difference = measure_export(pool, family, meshes[0])
    except Exception as error:
        return Row(
            family=family, group="not run", errors=errors, packed=case.packed, reason=_say(error)
        )
    worst = max(errors.values())
    if not worst < LIMIT and family not in COMPARED_FAMILIES:
        # fp32 arithmetic inside its code, or a forward that depends on the other rows of a batch.
        group, reason = "differs", f"largest difference {worst:.0e}"
    return Row(
        family=family,
        group=group,
        errors=errors,
        export=difference,
        packed=case.packed,
        reason=reason,
    )


def _say(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:160]


def main() -> int:
    """Print the table; return the exit code."""
    summary, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="model types; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument(
        "--json", type=Path, help="also write the rows to this file; those in it are not repeated"
    )
    parser.add_argument(
        "--checkpointing",
        choices=("none", "full", "selective"),
        default="none",
        help="what backward recomputes; over x, inputs of blocks are then stored in parts",
    )
    parser.add_argument(
        "--groups", action="store_true", help="print which meshes each type can use; train nothing"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    families = arguments.families or list_model_types()
    if arguments.groups:
        return print_groups(families, arguments.json)
    pool = RankPool()
    rows: list[Row] = []
    if arguments.json and arguments.json.exists():
        rows = [Row(**row) for row in json.loads(arguments.json.read_text(encoding="utf-8"))]
    missing = [family for family in families if family not in {row.family for row in rows}]
    with ThreadPoolExecutor(arguments.jobs) as executor:
        for row in executor.map(
            lambda family: examine(pool, family, arguments.checkpointing), missing
        ):
            rows.append(row)
            progress = f"{len(rows)}/{len(families)} {row.family}: {row.group} {row.reason}"
            print(progress, file=sys.stderr, flush=True)
            if arguments.json:
                text = json.dumps([asdict(row) for row in rows], indent=1)
                arguments.json.write_text(text, encoding="utf-8")
    print("\n".join(format_table(rows)))
    # Some types that only share storage have no checkpointing in transformers.
    is_whole = not arguments.families and arguments.checkpointing == "none"
    return judge(rows, is_whole=is_whole)


def print_groups(families: list[str], json_path: Path | None) -> int:
    """Print which meshes each type can use; return the exit code."""
    try:
        table = survey_families(
            families, on_done=lambda name: print(name, file=sys.stderr, flush=True)
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("\n".join(list_lines(table)))
    if json_path:
        json_path.write_text(table.model_dump_json(indent=1), encoding="utf-8")
    return 0


def format_table(rows: list[Row]) -> list[str]:
    """Return a Markdown table of the types on any mesh, and a paragraph for each other group."""
    rows = sorted(rows, key=lambda row: row.family)
    meshes = [",".join(map(str, degrees)) for degrees in (*SPLIT, STORAGE)]
    lines = [
        f"| family | {' | '.join(meshes)} | export | packed rows |",
        f"|---|{'---|' * (len(meshes) + 2)}",
    ]
    for row in (row for row in rows if row.group == "any mesh"):
        cells = [f"{row.errors[mesh]:.0e}" for mesh in meshes]
        packed = "yes" if row.packed else "no"
        lines.append(f"| {row.family} | {' | '.join(cells)} | {row.export:.0e} | {packed} |")
    stored = [row for row in rows if row.group == "data and z"]
    if stored:
        largest = max(max(row.errors.values()) for row in stored)
        export = max(row.export or 0 for row in stored)
        names = ", ".join(row.family for row in stored)
        lines += [
            "",
            f"On data and z, compared on ({meshes[-1]}): {names}. Largest difference "
            f"{largest:.0e}, of exported logits {export:.0e}.",
        ]
    differing = [f"{row.family} ({row.reason})" for row in rows if row.group == "differs"]
    if differing:
        lines += ["", f"Differ from one process on ({meshes[-1]}): {', '.join(differing)}."]
    for group, lead in (("refused", "Not causal, and refused"), ("not run", "Did not run")):
        names = [row.family for row in rows if row.group == group]
        if names:
            lines += ["", f"{lead}: {', '.join(names)}."]
    return lines


def judge(rows: list[Row], *, is_whole: bool) -> int:
    """Print the verdict; return the exit code."""
    problems = []
    for row in (row for row in rows if row.group in ("any mesh", "data and z")):
        for mesh, error in row.errors.items():
            if not error < LIMIT:
                problems.append(f"{row.family} on ({mesh}): {error:.0e}")
        if row.export is not None and not row.export < EXPORT_LIMIT:
            problems.append(f"{row.family}: export {row.export:.0e}")
    num_split = sum(row.group == "any mesh" for row in rows)
    num_storage = num_split + sum(row.group == "data and z" for row in rows)
    print(f"\n{num_split} on any mesh, {num_storage} on data and z, of {len(rows)} model types")
    if is_whole and (num_split < NUM_SPLIT or num_storage < NUM_STORAGE):
        problems.append(f"fewer than {NUM_SPLIT} and {NUM_STORAGE}")
    print(f"FAIL: {'; '.join(problems)}" if problems else "PASS")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
