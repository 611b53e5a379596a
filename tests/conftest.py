"""Fixtures shared by all tests: real data where it is there, tiny models where it is not.

What takes seconds to import is imported by fixtures, and by `pytest_sessionstart` in the processes
that run tests: the one that only divides them among workers starts without.
"""

import gc
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from ranks import RankPool

if TYPE_CHECKING:
    import torch

    from memguard.pages.page import FrontChart, LineChart

pytest_plugins = ["tiers", "case_sample", "changed", "costs"]

# No test judges how long something takes: a busy machine would fail it.
hypothesis.settings.register_profile("memguard", deadline=None)
hypothesis.settings.load_profile("memguard")

# A shell starts a background command with SIGINT ignored, and whatever the tests start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what most tests use before their modules, whose imports may not warn."""
    config = session.config
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # Libraries log a line or two.
        import cli_examples  # noqa: F401

        capture.suspend_global_capture()


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of what memguard keeps between runs, for this session alone: never the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMGUARD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def session_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The identity key of this session, the same in each: never the user's."""
    from memguard.data.identity_key import FILE_NAME

    folder = tmp_path_factory.mktemp("config")
    path = folder / "memguard" / FILE_NAME
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    path.write_text("5e" * 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real checkpoints and text kept beside the project; never part of it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real checkpoints and text (../shared/data) are not on this machine")
    return folder


@pytest.fixture(scope="session")
def fresh_ranks(session_cache: Path, session_key: Path) -> RankPool:
    """Runs a function on several ranks, each a fork of one process that has torch already.

    Where pytest-xdist runs the tests in several workers, each has its own.
    """
    pool = RankPool()
    # The server imports for seconds, which is part of no test.
    pool.start(os.getpid).join()
    return pool


# Ranks of these tests leave their processes as they found them.
_FOLDERS_OF_KEPT_RANKS = ("parallel", "hf", "model")


@pytest.fixture(scope="module")
def ranks(fresh_ranks: RankPool, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """`fresh_ranks`, or in some folders the same processes for all tests of a module.

    The first use of the engine costs a rank more than most calls do.
    """
    if request.path.parent.name not in _FOLDERS_OF_KEPT_RANKS:
        yield fresh_ranks
        return
    with fresh_ranks.keep() as kept:
        yield kept


@pytest.fixture(scope="session", autouse=True)
def _kept_templates() -> Iterator[None]:
    """Compile each template once, and draw each chart once, which is most of a page."""
    import jinja2

    from memguard.report import html
    from memguard.report.charts import draw_chart

    class KeptTemplates(jinja2.BytecodeCache):
        codes: dict[str, bytes] = {}  # noqa: RUF012

        def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            if bucket.key in self.codes:
                bucket.bytecode_from_string(self.codes[bucket.key])

        def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            self.codes[bucket.key] = bucket.bytecode_to_string()

    drawings: dict[tuple[str, str], str] = {}

    def draw_once(chart: "LineChart | FrontChart", key: str) -> str:
        drawing = (repr(chart), key)
        if drawing not in drawings:
            drawings[drawing] = draw_chart(chart, key)
        return drawings[drawing]

    with pytest.MonkeyPatch.context() as patch:
        kept = partial(jinja2.Environment, bytecode_cache=KeptTemplates())
        patch.setattr(html, "Environment", kept)
        patch.setattr(html, "draw_chart", draw_once)
        yield


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Leave what is imported by now out of the garbage collections that an audit begins with."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model/` (random weights) and `documents.jsonl` (60 texts); do not write here."""
    from cli_examples import save_tiny_model, write_texts

    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "model")
    write_texts(folder / "documents.jsonl")
    return folder


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """The same for one test, which may write there."""
    (tmp_path / "model").symlink_to(tiny_folder / "model")
    (tmp_path / "documents.jsonl").symlink_to(tiny_folder / "documents.jsonl")
    return tmp_path


# Libraries of a GPU warn of more than those of the CPU; none of that is an error.
_ON_GPU = (pytest.mark.gpu, pytest.mark.filterwarnings("default"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_ON_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> "torch.device":
    """Device of a test of a path that only a GPU takes in full.

    Each test runs on the CPU too, by default: what it does is then known to work, and `-m gpu` adds
    the GPU. A run that is started on the CPU does not see a GPU of the machine.
    """
    import torch

    if request.param == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        # Otherwise a machine with GPUs seems to have a driver that is too old.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch.device(request.param)
