"""scripts/example_documents.py: texts of the quickstart's run, by bucket."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from memguard.assets import find_asset
from memguard.compare.sweep import load_sweep

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "example_documents.py"


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_documents_of_a_run_are_written_by_bucket(tmp_path: Path) -> None:
    refused = run_script(tmp_path)
    assert refused.returncode == 1
    assert "start 'bash scripts/quickstart.sh' first" in refused.stderr
    sweep = load_sweep(find_asset("configs", "quickstart", setting="SWEEP"), ())
    run = tmp_path / "runs/quickstart/plain"
    assert run.name in {entry.setting for entry in sweep.runs}
    (run / "model").mkdir(parents=True)
    (run / "prepared").mkdir()
    (run / "trained.json").touch()
    words = {word: number for number, word in enumerate("abcdef")}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(run / "model/tokenizer.json"))
    study = sweep.runs[0].config.data.study
    assert study is not None
    buckets = ["control", "x48", "heldout", "background"]
    assert max(study.num_repetitions) == 48
    lines = (json.dumps({"bucket": bucket}) + "\n" for bucket in buckets)
    (run / "manifest.jsonl").write_text("".join(lines))
    np.save(run / "prepared/input_ids.npy", np.array([0, 1, 2, 3, 4, 5]))
    np.save(run / "prepared/offsets.npy", np.array([0, 1, 3, 4, 6]))
    written = run_script(tmp_path)
    assert written.returncode == 0, written.stderr
    texts = {path.stem: json.loads(path.read_text())["text"] for path in tmp_path.glob("*.jsonl")}
    assert texts == {"trained": "b c", "unseen": "d", "documents": "e f"}
