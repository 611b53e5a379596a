"""What a model and a batch demand of the mesh: a table of rules, one an axis or two. No torch.

What each degree splits, and so must divide:

data x z   rows of an optimizer step                        batch_size
y          residual stream: in-features of q, k, v, gate,   hidden_size
           up and the head, out-features of o and down
x          heads and FFN width                              num_heads, intermediate_size
x          key/value heads: whole ones a rank, or equal     num_kv_heads % x == 0, or
           parts of one, gathered over x/num_kv_heads       x % num_kv_heads == 0 and
           ranks in forward                                 num_kv_heads * head_dim % x == 0

Weights stored over z and the vocabulary over x may fall into uneven pieces; of the vocabulary
none may be empty.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memguard.config import AxisName
from memguard.errors import ModelError

# Families whose every gradient is compared with one process's, mesh by mesh (tests/parallel).
COMPARED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

_MUST_SAY = {
    "mistral": ("num_key_value_heads",),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What of a model decides how it can be split, and what it takes and sends."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """FFN width."""
    vocab_size: int
    num_layers: int
    is_tied: bool = False
    """Whether head and embedding are one parameter."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    """Whether attention's output has one."""
    has_mlp_bias: bool = False
    has_head_norms: bool = False
    """Whether queries and keys are normalised head by head."""

    @classmethod
    def from_config(cls, hf_config: Any) -> "ModelSizes":
        """Read the sizes from a Hugging Face configuration, a composite one's text part.

        Raises:
            ModelError: a size is missing or no whole number.
        """
        text = hf_config.get_text_config()
        return cls._read(lambda field: getattr(text, field, None))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ModelSizes":
        """Read the sizes from a config.json, without the library that knows its defaults.

        Raises:
            ModelError: another family than `COMPARED_FAMILIES`, or a size that is missing.
        """
        family = fields.get("model_type")
        if family not in COMPARED_FAMILIES:
            raise ModelError(
                f"'model_type' must be one of {', '.join(COMPARED_FAMILIES)}, whose memory and "
                f"traffic are known; got {family!r}"
            )
        # What their configuration classes fill in is not what is filled in here.
        for name in _MUST_SAY.get(family, ()):
            if fields.get(name) is None:
                raise ModelError(f"'{name}' must be given for model_type '{family}'; it is missing")
        return cls._read(fields.get)

    @classmethod
    def _read(cls, get: Callable[[str], Any]) -> "ModelSizes":
        def read(field: str, default: int | None = None) -> int:
            value = get(field)
            if value is None:
                value = default
            if not isinstance(value, int) or value < 1:
                raise ModelError(
                    f"the model's configuration must give '{field}' as a whole number to be split "
                    f"over a mesh; got {value!r} (model_type {get('model_type')!r}). It can run "
                    "on one process."
                )
            return value

        family = get("model_type")
        hidden_size, num_heads = read("hidden_size"), read("num_attention_heads")
        return cls(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=read("num_key_value_heads", num_heads),
            head_dim=read("head_dim", hidden_size // num_heads),
            intermediate_size=read("intermediate_size"),
            vocab_size=read("vocab_size"),
            num_layers=read("num_hidden_layers"),
            is_tied=bool(get("tie_word_embeddings")),
            has_qkv_bias=family == "qwen2" or bool(get("attention_bias")),
            has_output_bias=family != "qwen2" and bool(get("attention_bias")),
            has_mlp_bias=bool(get("mlp_bias")),
            has_head_norms=family == "qwen3",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What the product of some degrees must satisfy."""

    axes: tuple[AxisName, ...]
    text: str
    """The predicate of a sentence about the axes."""
    holds: Callable[[int], bool]


def build_rules(sizes: ModelSizes | None, batch_size: int | None) -> list[Rule]:
    """Return the rules that a model and the rows of a step bring; None brings none."""
    rules = []
    if batch_size is not None:
        rules.append(
            _must_divide(("data", "z"), batch_size, f"'train.batch_size', {batch_size} rows")
        )
    if sizes is None:
        return rules
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
    kv_features, vocab_size = kv_heads * sizes.head_dim, sizes.vocab_size
    hidden, width = sizes.hidden_size, sizes.intermediate_size
    return [
        *rules,
        _must_divide(("y",), hidden, f"the model's hidden size of {hidden}"),
        _must_divide(("x",), heads, f"the model's {heads} attention heads"),
        Rule(
            axes=("x",),
            text=f"must divide the model's {kv_heads} key/value heads or be a multiple of them",
            holds=lambda x: kv_heads % x == 0 or x % kv_heads == 0,
        ),
        Rule(
            axes=("x",),
            text=f"above the number of key/value heads must divide their {kv_features} features",
            holds=lambda x: x <= kv_heads or kv_features % x == 0,
        ),
        _must_divide(("x",), width, f"the model's FFN width of {width}"),
        Rule(
            axes=("x",),
            text=f"must leave every rank some of the model's {vocab_size} vocabulary entries",
            # FSDP2 reduces no gradient without elements.
            holds=lambda x: (x - 1) * math.ceil(vocab_size / x) < vocab_size,
        ),
    ]


def _must_divide(axes: tuple[AxisName, ...], size: int, what: str) -> Rule:
    return Rule(axes=axes, text=f"must divide {what}", holds=lambda degree: size % degree == 0)


def allows(rules: list[Rule], axes: tuple[AxisName, ...], degree: int) -> bool:
    """Tell whether the rules about exactly these axes hold for the product of their degrees."""
    return all(rule.holds(degree) for rule in rules if rule.axes == axes)


def find_broken(
    degrees: Mapping[AxisName, int], rules: list[Rule], *, rest: AxisName | None = None
) -> list[str]:
    """Describe the broken rules: what must hold, what was given.

    Args:
        degrees: of the axes; a rule about an axis that is missing here is left out.
        rules: from `build_rules`.
        rest: the axis whose degree was filled in for -1.
    """
    problems = []
    for rule in rules:
        given = {axis: degrees[axis] for axis in rule.axes if axis in degrees}
        if len(given) == len(rule.axes) and not rule.holds(math.prod(given.values())):
            origin = f" ('parallel.{rest}' is -1, the rest of the ranks)" if rest in given else ""
            problems.append(
                f"{format_axes(given)} {rule.text}; got {format_product(given)}{origin}"
            )
    return problems


def format_axes(degrees: Mapping[AxisName, int]) -> str:
    """Write axes as a user's settings: ``'parallel.data' × 'parallel.z'``."""
    return " × ".join(f"'parallel.{axis}'" for axis in degrees)


def format_product(degrees: Mapping[AxisName, int]) -> str:
    """Write degrees with their product: ``3 × 2 = 6``."""
    factors = " × ".join(map(str, degrees.values()))
    return factors if len(degrees) == 1 else f"{factors} = {math.prod(degrees.values())}"
