"""README and guides: every command in them parses, and those that a small machine can run, run.

What is only parsed, and why: eight processes and clusters (a test has two cores), scripts
(tests/scripts runs them), installation and names of the hub (they need the network). The scripts
of memguard/integrations/README.md run in tests/integrations, the probes of eval/README.md in
tests/cli.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer.main
import yaml
from cli_examples import make_texts, run_cli, save_tiny_model, write_jsonl
from guide_blocks import ROOT, list_blocks, list_lines, run_shell
from preloaded import PreloadedChild
from ranks import RankPool

from memguard import api
from memguard.assets import find_asset
from memguard.audit import verdict
from memguard.cli.app import app
from memguard.compare.sweep import load_sweep
from memguard.config import load_run_config
from memguard.gate.policy import load_policy
from memguard.gate.triage import load_triage
from memguard.records.comparison import HELDOUT, load_comparison
from memguard.records.gate import EXIT_CODES
from memguard.runtime import children

pytestmark = pytest.mark.slow

GUIDES = (
    "README.md",
    "configs/README.md",
    "eval/README.md",
    "scripts/README.md",
    "memguard/integrations/README.md",
)
PLACES = {
    "RUN": "runs/lora",
    "N": "14",
    "500": "14",
    "DIR": "path/to/checkpoint",
    "ORIGINAL": "original",
}
WHOLE = ("adapter=null", "model.path=path/to/checkpoint")
"""Changes to README's run: it trains all weights."""
# From the config.json published with meta-llama/Llama-3.1-8B and 405B.
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA_405B = LLAMA_8B | {
    "hidden_size": 16384,
    "num_attention_heads": 128,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
}


def list_commands(*guides: str) -> list[tuple[str, ...]]:
    """Return the arguments of each `memguard` line of guides, also behind torchrun."""
    commands = []
    for guide in guides:
        for line in list_lines(guide):
            words = shlex.split(line)
            if words[0] == "torchrun" and "memguard" in words:
                words = words[words.index("memguard") :]
            if words[0] == "memguard":
                commands.append(tuple(PLACES.get(word, word) for word in words[1:]))
    return list(dict.fromkeys(commands))


def list_commands_in_sentences() -> list[tuple[str, ...]]:
    """Return the arguments of each `memguard` command that stands in a sentence of a guide."""
    commands = []
    for guide in GUIDES:
        text = (ROOT / guide).read_text(encoding="utf-8")
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for line in re.findall(r"`memguard\s([^`.]*(?:\.\w[^`.]*)*)`", prose):
            words = tuple(PLACES.get(word, word) for word in shlex.split(line))
            if len(words) > 1:  # A name alone stands for the command.
                commands.append(words)
    return list(dict.fromkeys(commands))


def is_large(command: tuple[str, ...]) -> bool:
    """Whether a command needs more processes than a test has, stands for others, or has a test."""
    # Documents of the user are counted with the tokenizer of the published model.
    is_published = len(command) > 1 and command[1].startswith("llama31-")
    is_tested = command[:2] == ("compare", "quickstart")
    return "--nproc" in command or "..." in command or is_published or is_tested


def write_sweep(folder: Path) -> None:
    values = {
        "name": "sweep",
        "output_dir": "sweep",
        "run": {
            "model": {"path": "path/to/checkpoint"},
            "data": {"train": ["mails.jsonl"], "seq_len": 512},
            "train": {"batch_size": 16},
        },
        "settings": [
            {"name": "plain"},
            {"name": "goldfish", "mitigations": [{"name": "goldfish", "k": 4}]},
        ],
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(values))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the guides' names are: checkpoints, documents, a sweep, three runs."""
    folder = tmp_path_factory.mktemp("guides")
    save_tiny_model(folder / "path/to/checkpoint", max_position_embeddings=1024)
    original = save_tiny_model(
        folder / "original", max_position_embeddings=1024, initializer_range=0.03
    )
    quickstart = folder / "runs/quickstart"
    (quickstart / "base").mkdir(parents=True)
    (quickstart / "base/model").symlink_to(original)
    (quickstart / "plain").symlink_to(folder / "runs/plain")
    (quickstart / "goldfish-k3-k8").symlink_to(folder / "runs/goldfish")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    for seed, name in enumerate(("mails", "trained", "unseen", "documents")):
        texts = make_texts(60, seed=seed, words=40)
        write_jsonl(folder / f"{name}.jsonl", ({"text": text} for text in texts))
    erase = ({"text": text} for text in make_texts(60, seed=3, words=40)[:5])
    write_jsonl(folder / "erase.jsonl", erase)
    write_sweep(folder)
    (run,) = (block for block in list_blocks("README.md", "yaml") if "run.yaml" in block)
    (folder / "run.yaml").write_text(run)
    before = Path.cwd()
    os.chdir(folder)
    try:
        for changes in ((), (*WHOLE, "name=plain", "mitigations=[]"), (*WHOLE, "name=goldfish")):
            assert run_cli("train", "run.yaml", *changes).code == 0
        yield folder
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "command", [*list_commands(*GUIDES), *list_commands_in_sentences()], ids=" ".join
)
def test_every_command_parses(command: tuple[str, ...]) -> None:
    name, *arguments = (word for word in command if word != "...")
    parser: Any = typer.main.get_command(app)
    subcommand = parser.commands[name]
    context = subcommand.make_context(name, arguments)
    unknown = [word for word in context.args if word.startswith("-")]
    assert not unknown


def run_commands(ranks: RankPool, guide: str) -> None:
    ranks.start(1)  # Its server forks the children of a sweep.
    for command in list_commands(guide):
        if is_large(command):
            continue
        with contextlib.ExitStack() as stack:
            if command[0] == "compare":
                change = mock.patch.object(children.subprocess, "Popen", PreloadedChild)
                stack.enter_context(change)
            outcome = run_cli(*command)
        is_judged = command[0] == "gate" and "--init" not in command
        codes = EXIT_CODES.values() if is_judged else [0]
        assert outcome.code in codes, f"memguard {' '.join(command)}\n{outcome.err}"


def test_the_commands_of_the_readme_run(folder: Path, ranks: RankPool) -> None:
    run_commands(ranks, "README.md")
    assert (folder / "report" / "report.html").is_file()
    assert (folder / "evidence.zip").is_file()


@pytest.mark.long
@pytest.mark.parametrize("guide", ["configs/README.md", "eval/README.md", "scripts/README.md"])
def test_the_commands_of_a_guide_run(folder: Path, ranks: RankPool, guide: str) -> None:
    run_commands(ranks, guide)


IN_SENTENCES: dict[str, dict[str, str]] = {
    "plan run.yaml --machine dgx-h100 --gpus 8": {},
    "audit RUN --base DIR": {"RUN": "runs/lora", "DIR": "original"},
    "export RUN OUT --merge --base DIR": {"RUN": "runs/lora", "OUT": "merged", "DIR": "original"},
    "export FOLDER OUT --merge": {"FOLDER": "runs/lora/adapter", "OUT": "merged-peft"},
    "export RUN --to hub:NAME": {"RUN": "runs/lora", "hub:NAME": "hub:acme/notes --dry-run"},
    "audit --list-probes": {},
    "audit RUN --load-as int8 --out DIR": {"RUN": "runs/plain", "DIR": "int8"},
    "diff DIR DIR": {"DIR": "int8"},
    "gate RUN --init --policy policy.yaml": {"RUN": "runs/goldfish", "policy.yaml": "first.yaml"},
    "diff OLD NEW": {"OLD": "runs/plain", "NEW": "runs/goldfish"},
    "bundle RUN OUT.zip": {"RUN": "runs/plain", "OUT.zip": "plain.zip"},
    "verify OUT.zip": {"OUT.zip": "plain.zip"},
    "audit --model DIR --members FILE --out DIR": {
        "--model DIR": "--model original",
        "FILE": "trained.jsonl",
        "--out DIR": "--out alone",
    },
    "audit --model DIR ... audit.device_map=auto": {
        "DIR": "original",
        "...": "--members trained.jsonl --out placed",
    },
}
"""Commands in the sentences and comments of the guides, and what stands for their names."""


@pytest.mark.long
def test_commands_in_sentences_run(folder: Path) -> None:
    texts = [(ROOT / guide).read_text(encoding="utf-8") for guide in GUIDES]
    printed = " ".join(" ".join(texts).split())
    for command, values in IN_SENTENCES.items():
        assert f"memguard {command}" in printed
        written = command
        for name, value in values.items():
            written = written.replace(name, value)
        outcome = run_cli(*shlex.split(written))
        assert outcome.code == 0, f"memguard {written}\n{outcome.err}"


def test_the_start_of_a_configuration_is_written_as_the_guide_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = " ".join((ROOT / "configs/README.md").read_text(encoding="utf-8").split())
    for command in ("init run.yaml", "init --all", "init --schema"):
        assert f"`memguard {command}`" in text
        outcome = run_cli(*command.split())
        assert outcome.code == 0, outcome.err
    assert len(yaml.safe_load((tmp_path / "run.yaml").read_text())) > 3
    json.loads(outcome.out)


@pytest.mark.long
def test_a_bundle_is_signed_as_the_guide_says(folder: Path, tmp_path: Path) -> None:
    """`~` is that of the password database, which $HOME does not change: the key's path differs."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("OpenSSH is not installed")
    (block,) = list_blocks("eval/README.md", "text")
    (commands,) = (b for b in list_blocks("eval/README.md", "sh") if "bundle RUN" in b)
    run_shell("ssh-keygen -q -t ed25519 -N '' -f id_ed25519", tmp_path)
    key = " ".join((tmp_path / "id_ed25519.pub").read_text().split()[:2])
    (tmp_path / "allowed").write_text(f"you@example.org {key}\n")
    run_shell(commands.replace("RUN", str(folder / "runs/plain")), tmp_path)
    assert "~/.ssh/id_ed25519" in block
    result = run_shell(block.replace("~/.ssh/", ""), tmp_path)
    assert "Good" in result.stdout


def test_a_key_is_written_in_ci_as_the_guide_says(folder: Path, tmp_path: Path) -> None:
    text = " ".join((ROOT / "eval/README.md").read_text(encoding="utf-8").split())
    (command,) = re.findall(r"`(\(umask.*?)`", text)
    run_shell(command, tmp_path, MEMGUARD_KEY="5e" * 32, RUNNER_TEMP=tmp_path)
    path = tmp_path / "identity.key"
    assert path.stat().st_mode & 0o777 == 0o600
    changes = (f"data.identity_key={path}", "name=keyed", "train.epochs=1")
    outcome = run_cli("train", folder / "run.yaml", *WHOLE, "mitigations=[]", *changes)
    assert outcome.code == 0, outcome.err


@pytest.mark.long
def test_a_budget_is_kept_as_the_guide_says(folder: Path) -> None:
    (block,) = (b for b in list_blocks("configs/README.md", "yaml") if "budget:" in b)
    run, part = yaml.safe_load((folder / "run.yaml").read_text()), yaml.safe_load(block)
    values = {**run, **part, "train": {**run["train"], **part["train"]}, "name": "budget"}
    (folder / "budget.yaml").write_text(yaml.safe_dump(values))
    outcome = run_cli("train", "budget.yaml", "train.epochs=18", "mitigations=[]", *WHOLE)
    assert outcome.code == 0, outcome.err
    lines = (folder / "runs/budget/metrics.jsonl").read_text().splitlines()
    events = [event for line in lines if (event := json.loads(line))["event"] == "audit"]
    assert [event["step"] for event in events] == [0, 25, 50, 75, 79]


def test_405b_fits_as_the_guide_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    monkeypatch.chdir(tmp_path)
    (plan, _) = (c for c in list_commands("scripts/README.md") if c[:2] == ("plan", "llama31-405b"))
    outcome = run_cli(*plan)
    assert outcome.code == 0, outcome.err
    text = (ROOT / "scripts/README.md").read_text(encoding="utf-8")
    (mesh,) = re.findall(r"yours is (\(data=.*?\))", text)
    (needed,) = re.findall(r", ([\d.]+ GiB) of 77", text)
    assert mesh in outcome.out
    assert needed in outcome.out


def test_the_settings_of_the_guides_are_valid(folder: Path) -> None:
    run = yaml.safe_load((folder / "run.yaml").read_text())
    blocks = [block for guide in GUIDES for block in list_blocks(guide, "yaml")]
    # That of axolotl is a part of axolotl's settings; policies are tested below.
    others = ("plugins:", "# policy.yaml", "accepted:")
    blocks = [block for block in blocks if not block.startswith(others)]
    assert len(blocks) == 5
    for number, block in enumerate(blocks):
        values = yaml.safe_load(block)
        if "name" not in values:  # A part of a run's settings.
            parts = {key: {**run[key], **values[key]} for key in ("data", "train") if key in values}
            values = {**run, **values, **parts}
        path = folder / f"block{number}.yaml"
        path.write_text(yaml.safe_dump(values))
        load_run_config(path)


def test_the_policy_of_the_guide_is_valid(tmp_path: Path) -> None:
    blocks = list_blocks("eval/README.md", "yaml")
    (policy,) = (block for block in blocks if block.startswith("# policy.yaml"))
    (tmp_path / "policy.yaml").write_text(policy)
    (triage,) = (block for block in blocks if block.startswith("accepted:"))
    (tmp_path / "triage.yaml").write_text(triage)
    loaded = load_policy(tmp_path / "policy.yaml")
    assert len(loaded.policy.gate) == 5
    assert len(load_triage(loaded.folder / str(loaded.policy.triage)).accepted) == 1


def test_the_policy_of_the_guide_is_judged_where_all_are_trained_equally_often(
    folder: Path, tmp_path: Path
) -> None:
    blocks = list_blocks("eval/README.md", "yaml")
    for name, start in (("policy", "# policy.yaml"), ("triage", "accepted:")):
        (block,) = (block for block in blocks if block.startswith(start))
        (tmp_path / f"{name}.yaml").write_text(block)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/v1").symlink_to(folder / "runs/plain")
    outcome = run_cli(
        *("gate", folder / "runs/lora", "--policy", tmp_path / "policy.yaml"),
        *("--out", tmp_path / "gate"),
    )
    gate = json.loads((tmp_path / "gate/gate.json").read_text())
    assert "cannot-be-judged" not in {one["outcome"] for one in gate["judgements"]}, outcome.out
    assert len(gate["judgements"]) == 6


def test_the_ci_example_ends_with_the_code_of_the_gate(folder: Path, tmp_path: Path) -> None:
    (block,) = list_blocks("eval/README.md", "bash")
    (tmp_path / "policy.yaml").write_text("gate: [{metric: absent, at_most: 0.1}]\n")
    summary = tmp_path / "step.md"
    result = run_shell(
        block.replace("RUN", str(folder / "runs/plain")),
        tmp_path,
        expected=EXIT_CODES["cannot-be-judged"],
        GITHUB_STEP_SUMMARY=summary,
    )
    assert "names what the audit lacks" in result.stdout
    assert summary.read_text() == (tmp_path / "gate/summary.md").read_text()


@pytest.mark.long
def test_forgetting_runs_as_the_guide_says(folder: Path) -> None:
    (block,) = (b for b in list_blocks("configs/README.md", "yaml") if "mine-without" in b)
    (folder / "forget.yaml").write_text(block)
    changes = ("name=mine", "mitigations=[]", "train.epochs=1")
    for command in (
        ("train", "run.yaml", *WHOLE, *changes),
        ("train", "forget.yaml", "data.seq_len=512"),
    ):
        outcome = run_cli(*command)
        assert outcome.code == 0, outcome.err


def list_names(folder: Path) -> dict[str, Any]:
    """Return the variables that the guides' code takes as given."""
    import datasets
    import transformers

    path = folder / "path/to/checkpoint"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = make_texts(60, words=40)
    rows = datasets.Dataset.from_dict({"text": texts}).map(
        lambda row: tokenizer(row["text"]), remove_columns=["text"]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    arguments = transformers.TrainingArguments(
        str(folder / "trainer"), max_steps=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    unseen = make_texts(60, words=40, seed=1)
    names = {"model": model, "tokenizer": tokenizer, "texts": texts, "unseen_texts": unseen}
    return names | {"trainer": trainer, "unseen": unseen}


def test_the_python_of_readme_and_guide_runs(folder: Path) -> None:
    names = list_names(folder)
    (code,) = list_blocks("README.md", "python")
    exec(code, names)
    assert (folder / "audits/step-1/report.html").is_file()
    (code,) = (block for block in list_blocks("eval/README.md", "python") if "api.audit" in block)
    exec(code, names)
    assert isinstance(names["result"], api.AuditResult)


def test_the_figures_of_the_readme_are_those_of_the_quickstart() -> None:
    comparison = load_comparison(ROOT / "eval/studies/quickstart.json")
    sweep = load_sweep(find_asset("configs", "quickstart", setting="SWEEP"), ())
    assert [run.setting for run in comparison.runs] == [run.setting for run in sweep.runs]
    assert comparison.command == "memguard compare quickstart --jobs 2"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"runs/quickstart/([\w-]+)[ /\n]", text))
    assert named == {"base", *(run.setting for run in sweep.runs)}
    (rows,) = re.findall(r"\| 48 repetitions.*?\n\|[-|]+\n((?:\|.*\n)+)", text)
    for run, line in zip(comparison.runs, rows.splitlines(), strict=True):
        _, near, sampled, cost, loss = (cell.strip() for cell in line.strip("|").split("|"))
        key: dict[str, Any] = {"setting": run.setting, "seed": run.seed}
        for shown, metric in (
            (near, ("extraction", "near_verbatim")),
            (sampled, ("sampling", "within_limit")),
        ):
            row = comparison.tables.find(*metric, "x48", **key)
            assert row is not None
            assert shown == f"{row.num_matched} of {row.num_documents}"
        assert loss == f"{comparison.find_mean(HELDOUT, run.setting):.2f}"
        key |= {"model": "trained", "bucket": "x48", "against": None, "statistic": "median"}
        (median,) = comparison.tables.select("sampling", "log10_queries", **key)
        exponent = f"{median.value:.0f}".translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
        assert cost == (f"10{exponent}" if median.value else "1")


def test_scripts_that_guides_name_are_there() -> None:
    for guide in GUIDES:
        for line in list_lines(guide):
            for name in re.findall(r"\bscripts/[\w/]+\.(?:sh|py)", line):
                assert (ROOT / name).is_file(), f"{guide}: {name}"


@pytest.mark.parametrize("guide", GUIDES)
def test_links_lead_somewhere(guide: str) -> None:
    text = (ROOT / guide).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)\)", text)
    for target in targets:
        if not target.startswith("https://"):
            assert ((ROOT / guide).parent / target).exists(), target


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_guide_states_the_rule_of_the_verdict_word_for_word() -> None:
    _, rule = (verdict.__doc__ or "").split("\n\n", 1)
    text = (ROOT / "eval/README.md").read_text(encoding="utf-8")
    section = text.split("## Verdict\n")[1].split("\n## ")[0]
    quoted = [line[1:] for line in section.splitlines() if line.startswith(">")]
    assert " ".join(quoted).split() == rule.split()
    assert len(rule.split()) <= 270
