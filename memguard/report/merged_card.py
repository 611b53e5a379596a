"""README.md of a merged model: its adapter and base, and how far its logits differ from theirs."""

from collections.abc import Mapping
from typing import Any

import yaml

from memguard.report import formatting as fmt
from memguard.report.model_card import HOW_TO_LOAD, name_base


def render_merged_card(result: Mapping[str, Any]) -> str:
    """Write the card.

    Args:
        result: of `memguard export --merge --json`.
    """
    base, difference = name_base(result["base"]), result["difference"]
    entries: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base:
        entries["base_model"] = base
    entries["tags"] = ["memguard"]
    named = f"`{base}`" if base else "a local base model"
    sections = [
        f"---\n{yaml.safe_dump(entries, sort_keys=False)}---",
        "# Merged model",
        f"A causal language model: an adapter ({result['adapter']}, weights "
        f"`{fmt.hash(result['adapter_sha256'])}`), merged by memguard into {named} (weights "
        f"`{fmt.hash(result['base_sha256'])}`).",
        f"Compared with adapter and base on {difference['num_tokens']:,} tokens in fp32, logits "
        f"differ by at most {difference['largest']:.2g}, and the KL divergence is "
        f"{difference['mean_kl']:.2g} nats a token. The merged weights are stored in "
        f"{result['dtype']}.",
        "What these weights memorized has not been measured; `memguard audit --model` measures it.",
        "## How to load",
        HOW_TO_LOAD,
    ]
    return "\n\n".join(sections) + "\n"
