"""Scores and generation of a part of 8B in fp32 and bf16: a step of the GPU check."""

import time
from dataclasses import replace

import numpy as np
import torch
from gpu_facts import Place, attempt, fact, read_gb
from gpu_sizes import TINY, Sizes, draw_llama

from memguard.audit.decoding import Decoder
from memguard.audit.passages import Passage
from memguard.audit.requests import Prompt
from memguard.audit.scoring import ModelScorer
from memguard.model.checks import build_causal_lm


def audit(place: Place) -> None:
    """Measure both; each figure follows a first call, which starts libraries."""
    scores: dict[str, float] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        attempt(f"audit in {name}", _measure, place, name, dtype, scores)


def _measure(place: Place, name: str, dtype: torch.dtype, scores: dict[str, float]) -> None:
    sizes = TINY if place.is_dry else replace(Sizes(), num_layers=8)
    length, count, num_new = (40, 8, 8) if place.is_dry else (512, 192, 50)
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, sizes.lm, length).astype(np.int32) for _ in range(count)]
    torch.manual_seed(0)
    lm = build_causal_lm(draw_llama(sizes, place.device).to(dtype))

    passages = [Passage(input_ids=ids, first_label=1, first_choice=length // 2) for ids in texts]
    scorer = ModelScorer(lm)
    scorer.score(passages[:4])
    begin_s = time.perf_counter()
    results = scorer.score(passages)
    seconds = time.perf_counter() - begin_s
    scores[name] = float(np.mean([np.mean(result.logprob) for result in results]))
    fact(
        f"scores, {name}",
        tokens_per_s=count * length / seconds,
        peak_gb=read_gb("max_memory_allocated"),
        mean_logprob=scores[name],
        **({"off_fp32": scores[name] - scores["fp32"]} if name != "fp32" else {}),
    )

    prompts = [Prompt(input_ids=ids[: length // 2], num_new=num_new) for ids in texts[:64]]
    decoder = Decoder(lm)
    decoder.continue_greedily(prompts[:2])
    begin_s = time.perf_counter()
    decoder.continue_greedily(prompts)
    seconds = time.perf_counter() - begin_s
    fact(
        f"generation, {name}",
        tokens_per_s=len(prompts) * num_new / seconds,
        ms_per_step_and_layer=1e3 * seconds / num_new / sizes.num_layers,
    )
