"""The engine's interface to a causal LM: hidden states, per-token losses and scores, next tokens.

    causal_lm.py      hidden states of packed rows, and the LM head for selected tokens only
    checks.py         rejects models that are not causal LMs of the supported kind
    lm_head.py        one rank's shard of the LM head
    loss.py           losses over a sharded vocabulary, few logits at a time
    router_loss.py    load-balancing loss of a mixture of experts
    token_scores.py   log-probability, argmax and margin of single tokens
    truncation.py     probability of a label under top-k and top-p; the largest logits of a row
    next_token.py     the most likely or a drawn next token
    trainable.py      which weights are trained; lists or sets dropout
    evaluation.py     modes of modules and random numbers, as before at the end of a block
    fsdp_root.py      a model that another program has sharded by FSDP2
    kv_cache.py       rows that grow token by token; their keys and values are computed once

Packages above this one request hidden states and numbers per token, never logits, so only this
package and `parallel` handle a sharded vocabulary.
"""
