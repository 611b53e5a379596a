"""Sizes of a model that determine its valid meshes, memory and communication; no torch.

Families have different names for a size: num_key_value_heads, num_kv_heads or multi_query (one
head); intermediate_size, ffn_dim, ffn_hidden_size or n_inner.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memguard.config.optimizers import OPTIMIZERS
from memguard.errors import ModelError

# Families whose memory and traffic the planner can estimate; all have the layers of Llama.
ESTIMATED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Families for which tests/parallel compares every gradient on meshes with that of one process.
_OTHERS = """
    arcee cohere cohere2 cwm dots1 ernie4_5 ernie4_5_moe exaone4 falcon flex_olmo gemma gemma2
    gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss granite granitemoe helium
    hyperclovax internlm3 iquestcoder jais2 ministral ministral3 mixtral nemotron olmo2 olmo3
    olmoe opt persimmon phi phi3 qwen2_moe qwen3_moe seed_oss smollm3 stablelm starcoder2
    vaultgemma
"""
COMPARED_FAMILIES = (*ESTIMATED_FAMILIES, *_OTHERS.split())

Get = Callable[[str], Any]
"""Returns a field of a configuration; None if it has no such field."""

# Families that have a key head for each query head, whatever fields their configuration has.
_UNGROUPED = frozenset({"falcon", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "persimmon"})
_FFN_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
# Families whose FFN is four times as wide as the residual stream unless their field is set.
_FOUR_TIMES = {"gpt2": "n_inner", "gpt_bigcode": "n_inner", "falcon": "ffn_hidden_size"}
EXPERT_COUNTS = ("num_local_experts", "num_experts")
_REQUIRED_FIELDS = {
    "mistral": ("num_key_value_heads",),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
}


def read_num_kv_heads(get: Get) -> Any:
    """Return the number of key/value heads; None if it is that of the query heads."""
    if get("new_decoder_architecture"):
        return get("num_kv_heads")
    if get("multi_query"):
        return 1
    return None if get("model_type") in _UNGROUPED else get("num_key_value_heads")


def read_ffn_width(get: Get) -> Any:
    """Return the width of the FFN; None if no field has it."""
    field = _FOUR_TIMES.get(get("model_type"))
    if field is not None:
        return get(field) or 4 * get("hidden_size")
    return next((get(name) for name in _FFN_WIDTHS if get(name) is not None), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """The sizes of a model that determine its valid meshes, memory and communication."""

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
    """Whether attention's output projection has a bias."""
    has_mlp_bias: bool = False
    has_head_norms: bool = False
    """Whether queries and keys are normalised head by head."""
    expert_width: int | None = None
    """FFN width of an expert, which y and x split together; None without experts."""
    expert_unit: int = 8
    """A rank's part of the width is a multiple of this: kernels for all experts at once take rows
    of a multiple of 16 bytes."""
    shared_expert_width: int | None = None
    block: int = 1
    """Elements of the last dimension of a matrix that the optimizer needs on one rank."""

    def for_optimizer(self, name: str) -> "ModelSizes":
        """Return the sizes with what an optimizer, by its name, needs on one rank."""
        return replace(self, block=OPTIMIZERS[name].block)

    @classmethod
    def from_config(cls, hf_config: Any) -> "ModelSizes":
        """Read the sizes from a Hugging Face configuration; from the text part of a composite one.

        Raises:
            ModelError: a size is missing or is not a whole number.
        """
        text = hf_config.get_text_config()
        return cls._read(lambda field: getattr(text, field, None))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ModelSizes":
        """Read the sizes from the fields of a config.json, without importing transformers.

        Raises:
            ModelError: the family is not in `ESTIMATED_FAMILIES`, or a size is missing.
        """
        family = fields.get("model_type")
        problem = ""
        if family not in ESTIMATED_FAMILIES:
            problem = (
                f"'model_type' must be one of {', '.join(ESTIMATED_FAMILIES)}, for which memory "
                f"and traffic can be estimated; got {family!r}"
            )
        # The defaults of these families' configuration classes differ from the defaults below.
        elif missing := [n for n in _REQUIRED_FIELDS.get(family, ()) if fields.get(n) is None]:
            problem = f"'{missing[0]}' must be given for model_type '{family}'; it is missing"
        if problem:
            raise ModelError(problem)
        return cls._read(fields.get)

    @classmethod
    def _read(cls, get: Get) -> "ModelSizes":
        family = get("model_type")

        def read(field: str, default: int | None = None) -> int:
            return check(field, get(field) if get(field) is not None else default)

        def check(field: str, value: Any) -> int:
            if not isinstance(value, int) or value < 1:
                raise ModelError(
                    f"the model's configuration must give '{field}' as a whole number to be split "
                    f"over a mesh; got {value!r} (model_type {family!r}). It can run on one process"
                )
            return value

        hidden_size, num_heads = read("hidden_size"), read("num_attention_heads")
        return cls(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=check("num_key_value_heads", read_num_kv_heads(get) or num_heads),
            head_dim=read("head_dim", hidden_size // num_heads),
            intermediate_size=check("intermediate_size", read_ffn_width(get)),
            vocab_size=read("vocab_size"),
            num_layers=read("num_hidden_layers"),
            is_tied=bool(get("tie_word_embeddings")),
            has_qkv_bias=family == "qwen2" or bool(get("attention_bias")),
            has_output_bias=family != "qwen2" and bool(get("attention_bias")),
            has_mlp_bias=bool(get("mlp_bias")),
            has_head_norms=family == "qwen3",
            expert_width=get("moe_intermediate_size") or get("intermediate_size")
            if any(get(field) for field in EXPERT_COUNTS)
            else None,
            # Its matrices have gate and up, or features, as the last dimension.
            expert_unit=4 if family == "gpt_oss" else 8,
            shared_expert_width=get("shared_expert_intermediate_size"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageOnly:
    """A model whose layers are not split over y and x; data and z take any."""

    family: str
    """Its ``model_type``."""


Sizes = ModelSizes | StorageOnly

NF4_BASE = StorageOnly(family="a base in nf4")
"""A model whose linear layers are stored in NF4: blocks of weights do not end with columns."""
