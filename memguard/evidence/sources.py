"""Hashes of memguard's code, which a report records too, and of a suite's file, which none does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memguard.assets import find_asset
from memguard.config import load_yaml
from memguard.errors import ConfigError
from memguard.evidence.statement import hash_bytes
from memguard.records.audit import AuditReport
from memguard.records.sealed import sum_file

_PACKAGE = Path(__file__).parents[1]
_CODE_SUFFIXES = (".py", ".j2")
_LENGTHS = ("continuation_tokens", "prefix_tokens", "min_prefix_tokens")
"""Settings of a suite's extraction probe that an audit may change."""


def hash_code() -> str:
    """Return one hash of memguard's source files and templates.

    It equals the output of this shell command in the folder of the package:

        find * -name '*.py' -o -name '*.j2' | LC_ALL=C sort | xargs sha256sum | sha256sum
    """
    names = {
        path.relative_to(_PACKAGE).as_posix(): path
        for path in _PACKAGE.rglob("*")
        if path.suffix in _CODE_SUFFIXES and path.is_file()
    }
    lines = [f"{hash_bytes(names[name].read_bytes())}  {name}\n" for name in sorted(names)]
    return hash_bytes("".join(lines).encode())


def hash_suite(name_or_path: str, report: AuditReport) -> str | None:
    """Return the hash of a suite's file; None unless the file says what the audit ran.

    Args:
        name_or_path: the suite.
        report: of the audit. It does not record the file, but the settings of the probes.
    """
    try:
        path = find_asset("eval/suites", name_or_path, setting="audit.suite")
        values = load_yaml(path).values
    except ConfigError:
        return None
    ran = {"name": report.method.suite, "version": report.method.suite_version}
    probes = values.get("probes")
    if any(values.get(key) != value for key, value in ran.items()) or not isinstance(probes, list):
        return None
    described = [_drop_lengths(probe) for probe in report.method.probes]
    given = [_drop_lengths(probe) for probe in probes]
    return sum_file(path).sha256 if _is_part(given, described) else None


def _drop_lengths(probe: Any) -> Any:
    if not isinstance(probe, Mapping) or probe.get("name") != "extraction":
        return probe
    return {name: value for name, value in probe.items() if name not in _LENGTHS}


def _is_part(given: Any, described: Any) -> bool:
    """Return whether what a suite gives is in the description of a probe, which has defaults."""
    if isinstance(given, Mapping):
        return isinstance(described, Mapping) and all(
            key in described and _is_part(value, described[key]) for key, value in given.items()
        )
    if isinstance(given, list):
        return (
            isinstance(described, list)
            and len(given) == len(described)
            and all(map(_is_part, given, described))
        )
    return bool(given == described)
