"""Shipped files are found by name, a user's own by path."""

from pathlib import Path

import pytest

from memguard import assets
from memguard.errors import ConfigError


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An installed package's folder of shipped files, and a checkout's."""
    installed, checkout = tmp_path / "_assets", tmp_path
    monkeypatch.setattr(assets, "_ROOTS", (installed, checkout))
    return installed, checkout


def ship(root: Path, name: str) -> Path:
    path = root / "eval" / "suites" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("probes: []")
    return path


def test_shipped_files_are_listed_by_name(roots: tuple[Path, Path]) -> None:
    paths = {name: ship(roots[1], name) for name in ("extraction", "a-second")}
    assert assets.list_assets("eval/suites") == paths
    assert list(assets.list_assets("eval/suites")) == ["a-second", "extraction"]
    assert assets.list_assets("no such folder") == {}


def test_the_installed_ones_come_first(roots: tuple[Path, Path]) -> None:
    ship(roots[1], "extraction")
    installed = ship(roots[0], "extraction")
    assert assets.find_asset("eval/suites", "extraction", setting="audit.suite") == installed


def test_a_file_comes_before_a_name(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(roots[0], "extraction")
    monkeypatch.chdir(tmp_path)
    Path("extraction").write_text("probes: []")
    found = assets.find_asset("eval/suites", "extraction", setting="audit.suite")
    assert found == Path("extraction")


def test_neither_file_nor_name(roots: tuple[Path, Path], tmp_path: Path) -> None:
    ship(roots[0], "extraction")
    with pytest.raises(ConfigError) as caught:
        assets.find_asset("eval/suites", "extractoin", setting="audit.suite")
    (problem,) = caught.value.problems
    assert problem == (
        "'audit.suite' must be a YAML file or one of extraction; got 'extractoin', which is "
        "neither a file nor a shipped name; did you mean 'extraction'?"
    )
    with pytest.raises(ConfigError, match="which is a folder, not a file"):
        assets.find_asset("eval/suites", tmp_path, setting="audit.suite")
    with pytest.raises(ConfigError, match=r"one of \(none found\)"):
        assets.find_asset("configs", "quickstart", setting="CONFIG")


def test_the_extraction_suite_is_shipped() -> None:
    assert "extraction" in assets.list_assets("eval/suites")
