"""Looks for numbers by which a guessed text is told from others.

An attacker knows a text but for one part, and has a model. For every candidate of that part they
compute what memguard computes of the text, and compare it with the numbers in files. A number tells
the true candidate if it agrees with it, to as many digits as are printed, and with at most 1 % of
the others.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
import transformers
from cli_examples import succeed, write_jsonl
from numpy.typing import NDArray

CONTINUATION = 8
Quantities = Mapping[str, NDArray[np.float64]]
"""[1 + candidates] by name; the true text comes first."""

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
_ENOUGH_DIGITS = 5
"""Numbers with fewer significant digits are compared only with the quantity that they are named
for: among thousands, some agree by chance."""
_ROUNDING = 2e-6
"""Relative difference of the same quantity between batches of fp32 arithmetic."""
_NAMES = {
    "attack": re.compile(r"log10_queries(:\w+:value)?$"),
    "floor": re.compile(r"log10_floor(:\w+:value)?$"),
    "logprob": re.compile(r"(logprob|nll|loss)(:\w+:value|:value)?$"),
    "num_correct": re.compile(r":base\.extraction\.num_correct$"),
}
"""Places in JSON that are named for a quantity, by the beginning of its name."""
_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a file."""

    place: str
    text: str

    @property
    def value(self) -> float:
        return abs(float(self.text))

    @property
    def num_digits(self) -> int:
        return len(re.sub(r"e.*|\D", "", self.text).lstrip("0"))

    @property
    def half_unit(self) -> float:
        """Half of the last printed digit."""
        mantissa, _, exponent = self.text.lower().partition("e")
        return 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def measure(
    model: Path, groups: Mapping[str, Sequence[str]], folder: Path
) -> dict[str, Quantities]:
    """Compute what an attacker with a model can compute of each group's texts.

    `memguard audit` helps them: it computes the same quantities of the guessed texts.
    """
    texts = [text for group in groups.values() for text in group]
    rows = ({"id": f"{number:04}", "text": text} for number, text in enumerate(texts))
    source = write_jsonl(folder / "guesses.jsonl", rows)
    out, length = folder / "guesses", (f"audit.continuation_tokens={CONTINUATION}",)
    succeed("audit", "--model", model, "--members", source, "--out", out, *length)
    scores = pyarrow.parquet.read_table(out / "records.parquet").to_pandas().set_index("id")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    found, first = {}, 0
    for name, group in groups.items():
        own = scores.loc[[f"{first + number:04}" for number in range(len(group))]]
        columns = {
            column.partition(".")[2]: own[column].to_numpy(float)
            for column in (
                *("extraction.logprob", "extraction.min_margin", "extraction.num_correct"),
                *("sampling.log10_queries", "sampling.log10_floor"),
            )
        }
        nll_RT = _measure_nll(loaded, tokenizer, group)
        values = {
            "logprob.sum": columns["logprob"],
            "logprob.mean": columns["logprob"] / CONTINUATION,
            "attack.log10": columns["log10_queries"],
            "floor.log10": columns["log10_floor"],
            "margin.min": columns["min_margin"],
            "num_correct": columns["num_correct"],
            "logprob.document": nll_RT.sum(axis=1),
            "logprob.document_mean": nll_RT.mean(axis=1),
            **{f"logprob.token-{back}": nll_RT[:, -back] for back in range(1, 7)},
        }
        # Quantities that all candidates share tell nothing.
        found[name] = {each: v for each, v in values.items() if len(np.unique(v)) > 1}
        first += len(group)
    return found


def _measure_nll(loaded: Any, tokenizer: Any, texts: Sequence[str]) -> NDArray[np.float64]:
    """Return ``[R, T-1]`` losses of texts that have equally many tokens, with EOS."""
    ids = [[*row, tokenizer.eos_token_id] for row in tokenizer(list(texts))["input_ids"]]
    assert len({len(row) for row in ids}) == 1, "a manifest tells the number of tokens"
    ids_RT = torch.tensor(ids)
    with torch.no_grad():
        logprobs = loaded(ids_RT).logits[:, :-1].float().log_softmax(-1)
    nll_RT: NDArray[np.float64] = -logprobs.gather(-1, ids_RT[:, 1:, None])[..., 0].double().numpy()
    return nll_RT


def find_tells(
    numbers: Sequence[Number], quantities: Quantities, *, only_precise: bool = False
) -> set[str]:
    """Return `place (quantity)` of the numbers that tell the true text from the others.

    With ``only_precise`` rounded numbers are left out: a model that recites a text tells by itself
    which candidate it was trained on, roughly.
    """
    tells = set()
    value_M = np.array([number.value for number in numbers])
    half_M = np.array([number.half_unit for number in numbers])
    for name, values in quantities.items():
        size = np.abs(values)
        # Few numbers agree with the true text; only these are compared with all others.
        near = np.abs(value_M - size[0]) <= np.maximum(half_M, _ROUNDING * size[0])
        for number in (numbers[index] for index in np.flatnonzero(near)):
            expression = _NAMES.get(name.split(".")[0])
            is_named = expression is not None and expression.search(number.place)
            is_precise = number.num_digits >= _ENOUGH_DIGITS and "." in name
            if not (is_precise or (is_named and not only_precise)):
                continue
            agree = np.abs(number.value - size) <= np.maximum(number.half_unit, _ROUNDING * size)
            if agree[0] and agree[1:].sum() <= _SHARE * (len(size) - 1):
                tells.add(f"{number.place} ({name})")
    return tells


def read_numbers(folder: Path, files: Sequence[Path]) -> list[Number]:
    """Return the numbers in files; a number's place is its file and, in JSON, its fields."""
    numbers = []
    for path in files:
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".parquet":
            for row in pyarrow.parquet.read_table(path).to_pylist():
                numbers += _walk(row, name)
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            numbers += _walk(_parse(text), name)
        elif path.suffix == ".jsonl":
            for line in text.splitlines():
                numbers += _walk(_parse(line), name)
        else:
            plain = re.sub(r"(?<=\d)[,\u202f\u2009](?=\d{3})", "", text)
            # A hash such as 63e5123 reads as a number without a value.
            numbers += [
                Number(name, match[0])
                for match in _NUMBER.finditer(plain)
                if math.isfinite(float(match[0]))
            ]
    return numbers


def _parse(text: str) -> Any:
    return json.loads(text, parse_float=_Printed, parse_int=_Printed)


class _Printed(str):
    """A number as it is printed, which tells its precision."""


def _walk(value: Any, place: str) -> Iterator[Number]:
    match value:
        case {"metric": list(), "statistic": list()}:
            for row in zip(*value.values(), strict=True):
                yield from _walk(dict(zip(value, row, strict=True)), place)
        case {"metric": metric, "statistic": statistic, **numbers}:
            # A row of results or of their metrics is named for its metric.
            yield from _walk(numbers, f"{place}:{metric}:{statistic}")
        case dict():
            for key, each in value.items():
                yield from _walk(each, f"{place}:{key}")
        case list():
            for each in value:
                yield from _walk(each, place)
        case _Printed():
            yield Number(place, value)
        case float():
            yield Number(place, repr(value))
