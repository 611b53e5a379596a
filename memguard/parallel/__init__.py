"""From a checkpoint folder to hidden states and per-token losses.

    weights.py  the only place where a folder (or a random draw) becomes a module, and back
    vocab.py    the vocabulary layer: per-token loss and scores, few logits at a time

One process uses Hugging Face's plain modules. Everything above this package asks for hidden
states of packed rows and for numbers per token, never for logits, so that sharding stays in here.
"""
