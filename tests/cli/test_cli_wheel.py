"""An installed wheel audits from an empty folder: suites and configurations travel with it."""

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_examples import read_json

from memguard.records import AuditReport, load_record

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("eval/suites", "eval/metrics", "configs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """The wheel in a folder of its own, and an empty folder to stand in."""

    site: Path
    here: Path
    names: frozenset[str]
    """Files in the wheel."""

    def run(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.here,
            env={**os.environ, "PYTHONPATH": str(self.site), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )


def pip(command: str, *arguments: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check",
         "--no-deps", "--no-index", *map(str, arguments)],
        check=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    pytest.importorskip("hatchling", reason="the build backend comes with the extra 'test'")
    pytest.importorskip("pip", reason="this environment has no pip to install a wheel with")
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("memguard_llm-*.whl")
    pip("install", "--target", folder / "site", wheel)
    (folder / "here").mkdir()
    with zipfile.ZipFile(wheel) as archive:
        names = frozenset(archive.namelist())
    return Installed(site=folder / "site", here=folder / "here", names=names)


def test_the_wheel_carries_suites_metrics_and_configurations(installed: Installed) -> None:
    for folder in SHIPPED:
        files = [file for file in (ROOT / folder).rglob("*") if file.suffix in (".yaml", ".py")]
        assert files, folder
        for file in files:
            assert f"memguard/_assets/{file.relative_to(ROOT)}" in installed.names
    assert any(name.endswith(".html.j2") for name in installed.names), "the pages' templates"
    allowed = ("memguard/", "memguard_llm-")
    assert all(name.startswith(allowed) for name in installed.names), "and nothing else"


def test_it_audits_where_nothing_else_is(installed: Installed, tiny_folder: Path) -> None:
    where = installed.run("-c", "import memguard; print(memguard.__file__)").stdout.strip()
    assert Path(where).is_relative_to(installed.site), "the wheel, not the checkout"
    ended = installed.run(
        "-m", "memguard", "audit", "--model", tiny_folder / "model", "--suite", "extraction",
        "--members", tiny_folder / "documents.jsonl", "audit.continuation_tokens=10",
        "--out", "report",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "report/report.html\n"
    out = installed.here / "report"
    assert {path.name for path in out.iterdir()} == {
        "report.json", "report.html", "records.parquet", "results.parquet",
        "findings.csv", "audit.json", ".lock",
    }  # fmt: skip
    report = load_record(AuditReport, out / "report.json")
    assert report.method.suite == "extraction"
    assert (
        report.tool_version
        in installed.site.joinpath(
            f"memguard_llm-{report.tool_version}.dist-info", "METADATA"
        ).read_text()
    )
    assert read_json(out / "report.json")["tables"]["buckets"]["num_documents"] == [60]


def test_it_finds_shipped_configurations_by_name(installed: Installed) -> None:
    ended = installed.run("-m", "memguard", "train", "quickstart")
    assert ended.returncode == 2
    sweep = installed.site / "memguard" / "_assets" / "configs" / "quickstart.yaml"
    assert ended.stderr == f"{sweep} contains a sweep, not a run: use 'memguard compare {sweep}'\n"
    ended = installed.run("-m", "memguard", "train", "quickstrat")
    assert "must be a YAML file or one of llama31-405b, llama31-70b, llama31-8b, " in ended.stderr
    assert "did you mean 'quickstart'?" in ended.stderr


def test_the_console_script_is_there(installed: Installed) -> None:
    (script,) = (installed.site / "bin").glob("memguard")
    ended = installed.run(script, "--version")
    assert (ended.returncode, ended.stdout) == (0, "0.1.0\n")
