"""The tests of what has changed: by name, by imports, through packages and helpers."""

import subprocess
from pathlib import Path

import pytest
from changed import find_tests, list_changed

FILES = {
    "memguard/__init__.py": "",
    "memguard/config/__init__.py": "from memguard.config.schema import RunConfig",
    "memguard/config/schema.py": "class RunConfig: ...",
    "memguard/audit/verdict.py": "",
    "memguard/train/verdict.py": "",
    "configs/quickstart.yaml": "name: quickstart",
    "tests/helper.py": "from memguard.config import RunConfig",
    "tests/train/conftest.py": "",
    "tests/audit/test_verdict.py": "",
    "tests/audit/test_audit_verdict_sentences.py": "",
    "tests/audit/test_other.py": "from memguard.audit import verdict",
    "tests/train/test_step.py": "import helper",
    "tests/test_shipped.py": "PATH = 'configs/quickstart.yaml'",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            "memguard/audit/verdict.py",
            ["audit/test_audit_verdict_sentences", "audit/test_other", "audit/test_verdict"],
        ),
        ("memguard/config/schema.py", ["train/test_step"]),
        ("tests/helper.py", ["train/test_step"]),
        ("tests/train/conftest.py", ["train/test_step"]),
        ("tests/test_shipped.py", ["test_shipped"]),
        ("configs/quickstart.yaml", ["test_shipped"]),
        ("memguard/train/verdict.py", []),
    ],
)
def test_tests_are_found_by_name_and_by_imports(
    root: Path, changed: str, expected: list[str]
) -> None:
    found = find_tests({changed}, root)
    assert sorted(path.as_posix() for path in found) == [f"tests/{name}.py" for name in expected]


def test_what_differs_from_main_has_changed(root: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)

    with pytest.raises(pytest.UsageError, match="--changed: git merge-base"):
        list_changed(root)
    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "all")
    git("checkout", "-b", "work")
    (root / "tests/helper.py").write_text("committed")
    git("commit", "-am", "one")
    (root / "tests/test_shipped.py").write_text("changed")
    (root / "new.py").write_text("untracked")
    assert list_changed(root) == {"tests/helper.py", "tests/test_shipped.py", "new.py"}
