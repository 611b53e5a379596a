"""A causal LM as the engine sees it: hidden states, per-token losses and scores, next tokens.

    causal_lm.py      hidden states of packed rows, and the LM head for chosen tokens only
    checks.py         refuses models that are not the kind of causal LM computed here
    lm_head.py        one rank's shard of the LM head
    loss.py           losses over a sharded vocabulary, few logits at a time
    token_scores.py   log-probability, argmax and margin of single tokens
    truncation.py     probability of a label under top-k and top-p; the largest logits of a row
    next_token.py     the most likely or a drawn next token
    kv_cache.py       rows that grow token by token; their keys and values are computed once

What is above this package requests hidden states and numbers per token, never logits, so a sharded
vocabulary is known only here and in `parallel`.
"""
