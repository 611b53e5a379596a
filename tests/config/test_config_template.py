"""What memguard writes as YAML, it reads back."""

import itertools
import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from memguard.config import (
    BudgetConfig,
    CanaryConfig,
    RunConfig,
    StudyConfig,
    dump_yaml,
    load_run_config,
    render_template,
)
from memguard.config.mitigations import GoldfishConfig

PLAIN = {"name": "my-run", "model": {"path": "path/to/checkpoint"}}


def load_text(text: str, folder: Path) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_run_config(path)


def test_the_template_is_a_run_of_defaults(tmp_path: Path) -> None:
    config = load_text(render_template(with_all=True), tmp_path)
    assert config == RunConfig.model_validate(
        {**PLAIN, "data": {"train": ["documents.jsonl"]}, "mitigations": [{"name": "goldfish"}]}
    )


def test_commented_settings_show_the_default(tmp_path: Path) -> None:
    text = render_template(with_all=True)
    uncommented, count = re.subn(r"(?m)^( *)# (\w+: (?:null|true|false|[-\"\[\d]))", r"\1\2", text)
    assert count > 40
    assert load_text(uncommented, tmp_path) == load_text(text, tmp_path)


def test_the_template_names_every_setting() -> None:
    text = render_template(with_all=True)
    blocks = [RunConfig, GoldfishConfig, CanaryConfig]
    names = ("model", "data", "optim", "train", "parallel", "audit")
    blocks += [RunConfig.model_fields[name].annotation for name in names]
    for block in blocks:
        for name in block.model_fields:
            assert re.search(rf"(?m)^[ #-]*{name}:", text), name
    assert max(map(len, text.splitlines())) <= 100


def test_blocks_that_are_left_out_show_their_keys(tmp_path: Path) -> None:
    text = render_template(with_all=True)
    assert "# study: null\n  #   # One bucket for each" in text
    # What a user does who wants one: the marks away, a value for what has none.
    for block, indent in (("study", "  "), ("budget", "")):
        commented = text[text.index(f"{indent}# {block}: null\n") :]
        lines = commented.splitlines()[1:]
        keys = list(itertools.takewhile(lambda line: re.match(" *#   ", line), lines))
        assert any("num_repetitions:" in key or "metric:" in key for key in keys)
        written = "\n".join([f"{indent}{block}:", *(key.replace("#  ", "  ", 1) for key in keys)])
        text = text.replace("\n".join([f"{indent}# {block}: null", *keys]), written)
    text = text.replace("# audit_every_steps: null", "audit_every_steps: 5")
    config = load_text(text, tmp_path)
    assert config.data.study == StudyConfig()
    assert config.budget == BudgetConfig()


TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30
)
FRACTION = st.floats(0, 1, allow_subnormal=False)
RUNS = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
        "output_dir": TEXT,
        "seed": st.integers(0, 2**63 - 1),
        "model": st.fixed_dictionaries({"path": TEXT}, optional={"revision": TEXT})
        | st.fixed_dictionaries(
            {
                "scratch": st.fixed_dictionaries(
                    {"config": st.just({"model_type": "llama", "x": 1.5})}
                )
            }
        ),
        "data": st.fixed_dictionaries(
            {"train": st.lists(TEXT, min_size=1, max_size=3)},
            optional={
                "control_fraction": st.floats(0, 0.1),
                "append_eos": st.booleans(),
                "canaries": st.fixed_dictionaries(
                    {},
                    optional={
                        "count": st.just(0) | st.integers(8, 99),
                        "secret_digits": st.just(7),
                    },
                ),
            },
        ),
        "optim": st.fixed_dictionaries(
            {"lr": st.floats(1e-12, 1e3), "betas": st.tuples(FRACTION, FRACTION)}
        ),
        "parallel": st.fixed_dictionaries(
            {"y": st.integers(1, 99), "order": st.permutations(["data", "z", "y", "x"])}
        ),
        "mitigations": st.lists(
            st.fixed_dictionaries({"name": st.just("goldfish"), "k": st.integers(2, 99)}),
            max_size=1,
        ),
    }
)


@settings(max_examples=50)
@given(values=RUNS)
def test_a_dump_reads_back_equal(tmp_path_factory, values) -> None:
    config = RunConfig.model_validate(values)
    assert load_text(dump_yaml(config), tmp_path_factory.getbasetemp()) == config
