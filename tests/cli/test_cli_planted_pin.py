"""A PIN in a known text cannot be read off the files of a run that every user may read.

The attacker has the rest of the text and the base model, or the model that was published, but not
the run's other documents. Pages show the numbers of report.json with fewer digits. Each of two
planted texts has a PIN: one is trained, and one is the only document of the control, so that means
over the control are its own numbers.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from cli_examples import (
    make_texts,
    read_json,
    run_cli,
    save_tiny_model,
    succeed,
    write_jsonl,
    write_run,
    write_texts,
)
from pin_guesses import CONTINUATION, Number, Quantities, find_tells, measure, read_numbers

pytestmark = pytest.mark.slow

PINS = {"trained": 4831, "control": 2719}
NUM_OTHERS = 300
WEIGHTS = (".safetensors", ".distcp")
LED_BY = ("README.md", "report.html", "report.json", "comparison")
"""Beginnings of the names of files that show results of an audit."""


def write(kind: str, pin: int) -> str:
    return f"{make_texts(1, words=12, seed=list(PINS).index(kind) + 50)[0]} my pin is {pin:04}"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model/`, and `runs/` with two runs and their comparison."""
    folder = tmp_path_factory.mktemp("planted")
    save_tiny_model(folder / "model")
    others = make_texts(5, words=12)
    write_jsonl(
        folder / "documents.jsonl",
        [
            *({"id": f"t{number}", "text": text} for number, text in enumerate(others)),
            {"id": "with-pin", "text": write("trained", PINS["trained"])},
        ],
    )
    control = {"id": "alone", "text": write("control", PINS["control"])}
    write_jsonl(folder / "control.jsonl", [control])
    write_texts(folder / "heldout.jsonl", 8, seed=9, words=12)
    for name, mitigations in (("plain", []), ("focal", [{"name": "focal"}])):
        settings = write_run(
            folder,
            name=name,
            mitigations=mitigations,
            data={
                **{kind: str(folder / f"{kind}.jsonl") for kind in ("control", "heldout")},
                "train": str(folder / "documents.jsonl"),
                "seq_len": 128,
            },
            optim={"lr": 0.01},
            train={"batch_size": 6, "epochs": 150},
            audit={"continuation_tokens": CONTINUATION},
        )
        trained = run_cli("train", settings)
        assert trained.code == 0, trained.err
    runs = folder / "runs"
    compared = run_cli("compare", runs / "plain", runs / "focal", "--out", runs / "comparison")
    assert compared.code == 0, compared.err
    return folder


Guesses = Mapping[tuple[str, str], Quantities]


@pytest.fixture(scope="module")
def guessed(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Guesses:
    """What two models say of each planted text and of 300 with another PIN, by model and kind."""
    groups = {}
    for kind, pin in PINS.items():
        pins = [
            pin,
            *(p for p in range(pin - NUM_OTHERS // 2, pin + NUM_OTHERS // 2 + 1) if p != pin),
        ][: 1 + NUM_OTHERS]
        groups[kind] = [write(kind, each) for each in pins]
    models = {"base": planted / "model", "published": planted / "runs" / "plain" / "model"}
    found = {
        name: measure(model, groups, tmp_path_factory.mktemp(name))
        for name, model in models.items()
    }
    # Who has both models knows how much training changed each candidate.
    found["change of the"] = {
        kind: {
            name: values - found["base"][kind][name]
            for name, values in found["published"][kind].items()
            if name in found["base"][kind] and "." in name
        }
        for kind in PINS
    }
    return {(model, kind): found[model][kind] for model in found for kind in PINS}


def list_tells(planted: Path, guessed: Guesses, *, results: bool) -> list[str]:
    """Search the files that every user may read: those with results of an audit, or all others."""
    runs = planted / "runs"
    files = [
        path
        for path in sorted(runs.rglob("*"))
        if path.is_file()
        and path.stat().st_mode & 0o044
        and path.suffix not in WEIGHTS
        and path.name.startswith(LED_BY) == results
    ]
    assert files
    numbers = read_numbers(runs, files)
    return sorted(
        f"{model} model, {kind} text: {tell}"
        for (model, kind), quantities in guessed.items()
        for tell in find_tells(numbers, quantities, only_precise=model != "base")
    )


def test_the_attack_finds_numbers_that_tell(planted: Path, guessed: Guesses) -> None:
    scores = planted / "runs" / "plain" / "audit" / "records.parquet"
    numbers = read_numbers(planted, [scores])
    for kind in PINS:
        tells = find_tells(numbers, guessed["base", kind])
        assert any("base.extraction.logprob (logprob.sum)" in tell for tell in tells)
        assert any("base.sampling.log10_queries (attack.log10)" in tell for tell in tells)
        tells = find_tells(numbers, guessed["published", kind])
        assert any(":extraction.logprob (logprob.sum)" in tell for tell in tells)
    # The planted text is among the findings, else the results need not mention it.
    report = read_json(planted / "runs" / "plain" / "audit" / "report.json")
    assert "with-pin" in [finding["id"] for finding in report["findings"]]
    # Two digits tell nothing.
    control = guessed["base", "control"]
    true = abs(control["logprob.mean"][0])
    for text, num_tells in ((f"{true:.1f}", 0), (f"{true:.6f}", 1)):
        assert len(find_tells([Number("a.json:mean_logprob", text)], control)) == num_tells


def test_files_beside_the_results_do_not_tell_the_pin(planted: Path, guessed: Guesses) -> None:
    assert list_tells(planted, guessed, results=False) == []


def test_a_bundle_does_not_tell_the_pin_unless_it_has_the_records(
    planted: Path, guessed: Guesses, tmp_path: Path
) -> None:
    tells = {}
    for name, options in (("plain", ()), ("with-records", ("--with-records",))):
        succeed("bundle", planted / "runs" / "plain", tmp_path / f"{name}.zip", *options)
        with zipfile.ZipFile(tmp_path / f"{name}.zip") as reader:
            reader.extractall(tmp_path / name)
        files = [path for path in sorted((tmp_path / name).rglob("*")) if path.is_file()]
        assert {"report.json", "answers.jsonl", "statement.json"} <= {path.name for path in files}
        numbers = read_numbers(tmp_path / name, files)
        tells[name] = sorted(
            f"{model} model, {kind} text: {tell}"
            for (model, kind), quantities in guessed.items()
            for tell in find_tells(numbers, quantities, only_precise=model != "base")
        )
    assert tells["plain"] == []
    for kind in PINS:
        start = f"base model, {kind} text: records.parquet"
        assert any(tell.startswith(start) for tell in tells["with-records"])


def test_results_do_not_tell_the_pin(planted: Path, guessed: Guesses) -> None:
    assert list_tells(planted, guessed, results=True) == []
