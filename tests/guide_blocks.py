"""Blocks of the guides, and a shell that runs them as they are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TOOLS = {
    "memguard": "memguard",
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
    "python": "",
}
"""Commands of an environment, as modules of this Python."""


def list_blocks(guide: str, language: str) -> list[str]:
    """Return the blocks of a guide in a language; `guide` is a path in the checkout."""
    text = (ROOT / guide).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def list_lines(guide: str) -> list[str]:
    """Return the shell lines of a guide, those that go on joined, without comments."""
    blocks = "\n".join(list_blocks(guide, "sh")).replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in blocks.splitlines())
    return [line for line in lines if line]


def run_shell(
    block: str, folder: Path, *, expected: int = 0, **environment: object
) -> subprocess.CompletedProcess[str]:
    """Run a block with bash in a folder, as in an environment where this checkout is installed.

    Args:
        block: as it is printed.
        folder: the working directory.
        expected: exit code; another is an error that shows what was written.
        environment: variables beside those of this process.
    """
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    for name, module in _TOOLS.items():
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} {module and f"-m {module}"} "$@"\n')
        tool.chmod(0o755)
    result = subprocess.run(
        ["bash", "-eu", "-c", block],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            **{name: str(value) for name, value in environment.items()},
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    written = f"{block}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    assert result.returncode == expected, written
    return result
