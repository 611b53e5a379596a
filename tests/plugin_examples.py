"""Packages that define a probe, installed in a folder without pip; that of eval/README.md is one.

installed(folder, ...)   a context in which the package can be found and imported
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from guide_blocks import list_blocks

MODULE = "first_word"
PACKAGE = "first-word 1.2"
"""Name and version that reports give."""


def read_example(kind: str = "FirstWordProbe") -> str:
    """Return the code of a probe in the guide."""
    blocks = list_blocks("eval/README.md", "python")
    (code,) = (block for block in blocks if f"class {kind}(Probe)" in block)
    return code


def write_package(
    folder: Path,
    code: str | None = None,
    *,
    probe: str = "first_word",
    module: str = MODULE,
    kind: str = "FirstWordProbe",
) -> Path:
    """Write a module and the metadata that an installation leaves beside it; return the folder.

    Args:
        folder: to install into.
        code: of the module; that of the guide if None.
        probe: name of the entry point.
        module: name of the module and, with ``-``, of the package.
        kind: class of the probe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = read_example(kind) if code is None else code
    (folder / f"{module}.py").write_text(text, encoding="utf-8")
    metadata = folder / f"{module}-1.2.dist-info"
    metadata.mkdir()
    name = module.replace("_", "-")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    points = f"[memguard.probes]\n{probe} = {module}:{kind}\n"
    (metadata / "entry_points.txt").write_text(points)
    return folder


@contextmanager
def installed(folder: Path, module: str = MODULE) -> Iterator[None]:
    """Let this process and its children find the packages of a folder; forget them afterwards."""
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with (
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        mock.patch.dict(os.environ, {"PYTHONPATH": paths}),
    ):
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.modules.pop(module, None)


def write_suite(path: Path, *probes: str) -> Path:
    """Write a suite of the extraction probe and others, each as YAML."""
    lines = "".join(f"  - {probe}\n" for probe in ("{name: extraction}", *probes))
    path.write_text(f"name: mine\nversion: 1\nprobes:\n{lines}", encoding="utf-8")
    return path
