"""What pip is told to install: never memguard from an index, where it is another project."""

import re
import subprocess
import tomllib
from pathlib import Path

import memguard
from memguard.errors import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FROM_AN_INDEX = re.compile(
    rf"\b(pip[3x]?|uv) (install|download|add)\b(?:[^\n]|\\\n)*?"
    rf"[\s'\"](memguard|{DISTRIBUTION})(?![\w./])"
    rf"|\b(memguard|{DISTRIBUTION})\[[a-z]"
)


def test_no_hint_installs_memguard_from_an_index() -> None:
    for wrong in (
        *("pip install 'memguard[bench]'", "pip install memguard", "memguard-llm[dp]"),
        *("pip install -U \\\n  memguard-llm", "pipx install memguard", "uv add memguard"),
    ):
        assert FROM_AN_INDEX.search(wrong)
    for right in ("pip install 'lm-eval>=0.4.13'", "pip install -c constraints.txt '.[plots]'"):
        assert not FROM_AN_INDEX.search(right)
    parts = ("*.md", "*.toml", "*.txt", "memguard", "eval", "configs", "scripts", ".ci")
    listed = subprocess.run(
        ["git", "ls-files", "-z", *parts], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert len(files) > 300
    hints = {
        f"{file.relative_to(ROOT)}: {hint[0]}"
        for file in files
        if file.is_file() and file.suffix != ".json"
        for hint in FROM_AN_INDEX.finditer(file.read_text(encoding="utf-8", errors="replace"))
    }
    assert not hints


def test_the_readme_names_the_tested_torch() -> None:
    (version,) = re.findall(
        r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert f"install torch=={version} " in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_name_for_pip_and_the_version_are_those_of_the_project() -> None:
    assert (PROJECT["name"], PROJECT["version"]) == (DISTRIBUTION, memguard.__version__)
    assert list(PROJECT["scripts"]) == ["memguard"]
