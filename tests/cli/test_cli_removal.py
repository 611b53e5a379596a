"""A probe can be removed with its file, its tests, its line in suites and one in suite.py."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from cli_examples import save_tiny_model, succeed, write_run, write_texts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def copy_without(name: str, folder: Path) -> Path:
    """Copy memguard without a probe; return the folder that has the package."""
    kept = folder / "copy"
    shutil.copytree(
        ROOT / "memguard", kept / "memguard", ignore=shutil.ignore_patterns("__pycache__")
    )
    for part in ("eval/suites", "configs"):
        shutil.copytree(ROOT / part, kept / part)
    (kept / "memguard/audit/probes" / f"{name}.py").unlink()
    places = kept / "memguard/audit/suite.py"
    lines = places.read_text().splitlines(keepends=True)
    left = [line for line in lines if not re.match(rf'    "{name}\.\w+",\n', line)]
    assert len(lines) - len(left) == 1
    places.write_text("".join(left))
    for path in (kept / "eval/suites").iterdir():
        suite = yaml.safe_load(path.read_text())
        suite["probes"] = [probe for probe in suite["probes"] if probe["name"] != name]
        path.write_text(yaml.safe_dump(suite))
    return kept


def run_copy(kept: Path, commands: list[tuple[object, ...]]) -> None:
    """Run commands of the copy in one process of its own."""
    code = (
        "import sys\n"
        "from memguard.cli.errors import run_app\n"
        f"assert sys.modules['memguard'].__file__.startswith({str(kept)!r})\n"
        f"for arguments in {[[str(word) for word in command] for command in commands]!r}:\n"
        "    sys.argv = ['memguard', *arguments]\n"
        "    try:\n"
        "        run_app()\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0, (arguments, end.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=kept,
        env={**os.environ, "PYTHONPATH": str(kept)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs to compare."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "model").symlink_to(tiny_folder / "model")
    (folder / "documents.jsonl").symlink_to(tiny_folder / "documents.jsonl")
    for name, lr in (("one", 1e-3), ("two", 1e-4)):
        settings = {"train": {"max_steps": 1}, "optim": {"lr": lr}}
        succeed("train", write_run(folder, name=name, **settings))
    return [folder / "runs" / name for name in ("one", "two")]


@pytest.mark.parametrize("name", ["generation", pytest.param("attacks", marks=pytest.mark.long)])
def test_a_probe_is_removed_with_its_file_and_one_line(
    folder: Path, tmp_path: Path, runs: list[Path], name: str
) -> None:
    kept = copy_without(name, tmp_path)
    others = write_texts(folder / "others.jsonl", 20, seed=1)
    given = ("--members", folder / "documents.jsonl", "--nonmembers", others)
    base = save_tiny_model(folder / "base", initializer_range=0.03)
    model = ("--model", folder / "model", "--base", base, "--suite", "full")
    small = ("audit.continuation_tokens=6", "audit.max_documents_per_bucket=5")
    run_copy(
        kept,
        [
            ("audit", *model, *given, *small, "--out", folder / "out"),
            ("report", folder / "out"),
            ("compare", *runs, "--out", folder / "compared"),
        ],
    )
    results = pq.read_table(folder / "out" / "results.parquet").to_pandas()
    ran = {"extraction", "grid", "sampling", "membership", "generation", "attacks"}
    assert set(results.probe) == ran - {name}
    assert (folder / "out" / "report.html").is_file()
    rows = pq.read_table(folder / "compared" / "comparison.parquet").to_pandas()
    assert set(rows.setting.dropna()) == {"one", "two"}
    assert (folder / "compared" / "comparison.html").is_file()
