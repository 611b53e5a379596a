"""Sizes of published models."""

from memguard.parallel.mesh_shape import ModelSizes

# From the config.json published with meta-llama/Llama-3.1-405B.
LLAMA_405B = ModelSizes(
    hidden_size=16384,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=53248,
    vocab_size=128256,
    num_layers=126,
)
