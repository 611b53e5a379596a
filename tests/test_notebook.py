"""`memguard.api` in a notebook, run by a real kernel: small outputs, and a card for each result."""

import json
import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from cli_examples import write_run

pytestmark = pytest.mark.long
"""A kernel that trains twice; the cards alone have tests beside the reports."""
ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = Path("/usr/bin/chromium")
"""Debian's package."""
PICTURE = re.compile(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]*")
LIMIT = 30_000
"""Bytes of a cell's outputs without pictures: a notebook is kept in git and sent around."""
CELLS = {
    "train": """
        import json
        from memguard import api
        settings = json.load(open("run.json"))
        plain = api.train(settings)
        plain
    """,
    "train again": """
        change = {"name": "goldfish", "mitigations": [{"name": "goldfish", "k": 4}]}
        goldfish = api.train(settings, change)
        print(goldfish)
    """,
    "audit": "api.audit(plain.folder, out='again')",
    "compare": "api.compare([plain.folder, goldfish.folder], out='compared')",
    "refused": """
        try:
            api.audit(plain.folder, seed='one')
        except Exception as error:
            print(error)
    """,
}


@pytest.fixture(scope="module")
def outputs(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Outputs of each cell."""
    folder = tmp_path_factory.mktemp("notebook")
    settings = json.loads(write_run(tiny_folder, name="plain").read_text())
    settings |= {"output_dir": "runs", "audit": {"continuation_tokens": 8, "min_documents": 4}}
    (folder / "run.json").write_text(json.dumps(settings))
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(code).strip()) for code in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(
        env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython")}
    )
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


def test_the_outputs_are_small(outputs: dict[str, list[dict[str, Any]]]) -> None:
    for name, shown in outputs.items():
        size = len(PICTURE.sub("", json.dumps(shown)).encode())
        assert 0 < size < LIMIT, name


@pytest.mark.parametrize("name", ["train", "audit", "compare"])
def test_progress_is_standard_error(name: str, outputs: dict[str, list[dict[str, Any]]]) -> None:
    kinds = {output["output_type"] for output in outputs[name]}
    assert kinds == {"stream", "execute_result"}
    said = "".join(output["text"] for output in outputs[name] if "text" in output)
    assert f"{'verdict' if name != 'compare' else 'comparison'}: " in said


@pytest.mark.parametrize("name", ["train", "audit", "compare"])
def test_a_result_is_a_line_and_a_card(name: str, outputs: dict[str, list[dict[str, Any]]]) -> None:
    (result,) = (each for each in outputs[name] if each["output_type"] == "execute_result")
    line, card = result["data"]["text/plain"], result["data"]["text/html"]
    assert line.startswith(f"<{'Train' if name == 'train' else name.capitalize()}Result ")
    assert "\n" not in line
    assert len(line) < 400
    assert len(PICTURE.findall(card)) == 1
    page = {
        "train": "runs/plain/audit/report.html",
        "audit": "again/report.html",
        "compare": "compared/comparison.html",
    }[name]
    assert f'href="{page}"' in card, "relative to the notebook, as notebooks serve files"


def test_a_refused_call_shows_no_bar(outputs: dict[str, list[dict[str, Any]]]) -> None:
    (stream,) = outputs["refused"]
    assert stream["text"] == "'seed' should be a valid integer; got the text 'one'\n"
    (printed,) = (o["text"] for o in outputs["train again"] if o.get("name") == "stdout")
    (line,) = printed.splitlines()
    assert line.startswith("<TrainResult goldfish: ")


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM})")
def test_the_outputs_fit_a_browser(
    outputs: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    shown = "".join(
        f"<div>{output['data']['text/html']}</div>"
        for cell in outputs.values()
        for output in cell
        if "text/html" in output.get("data", {})
    )
    measure = """<script>addEventListener("load", () => {
      const wide = [...document.querySelectorAll("main *")].filter(
        (one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth);
      const drawn = [...document.images].filter((one) => one.naturalWidth > 0);
      document.title = [wide.length, drawn.length, document.images.length].join(" ");
    });</script>"""
    page = tmp_path / "page.html"
    # As wide as the outputs of a notebook on a laptop, and beside a file browser.
    for width in (1000, 620):
        page.write_text(
            f"<!doctype html><meta charset=utf-8>{measure}"
            f'<main style="width:{width}px">{shown}</main>'
        )
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
        options += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000"]
        done = subprocess.run(
            [str(CHROMIUM), *options, "--dump-dom", page.as_uri()],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        found = re.search("<title>(.*?)</title>", done.stdout)
        assert found is not None
        assert found[1] == "0 3 3", "elements wider than their box, pictures drawn, pictures"
