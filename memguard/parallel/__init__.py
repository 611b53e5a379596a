"""The 4D parallel algorithm: modules sharded over the axes data, z, y and x.

    hf_plan.py            the role of each module of a Hugging Face model
    family_styles.py      roles in families for which transformers has no usable plan
    shard.py              applies the roles; activation checkpointing; units of storage (FSDP2)
    stored_inputs.py      inputs of checkpointed blocks, stored in parts over x
    linear.py             linear layers, alone and in groups
    linear_function.py    their products over y and x, with overlapped collectives
    fused.py              order of features in parameters that are several projections
    lora.py               low-rank adapters of linear layers
    nf4.py                frozen weights in 4-bit NormalFloat
    embedding.py          token embedding over y and x
    experts.py            mixture-of-experts blocks over y and x together
    norm.py               norms over sharded features
    attention.py          chooses the attention kernel; flash attention of packed rows
    flash_attention_3.py  flash attention 3 instead of 2, where it is installed and agrees
    attention_flex.py     attention with a soft cap or sinks, by blocks
    attention_pieces.py   where the documents of packed rows begin; attention with a mask of all
                          pairs, without most masked pairs
    mesh_shape.py         validates a mesh, or lists the nearest valid ones; no torch
    model_sizes.py        sizes of a model, under the names that families have; no torch
    mesh.py               the process groups
    collectives.py        collectives over one axis and their gradients
    layout.py             which rectangle of each full tensor a rank stores
    local_parameters.py   parameters as the optimizer and checkpoints see them: local tensors

A single process uses Hugging Face's plain modules.

    ranks = data x z x y x x
    x      heads, FFN width, vocabulary             out-features of q, k, v, gate, up, head
    y      the residual stream's features           their in-features; the reverse for o and down
    z      storage of weights, and the batch        FSDP2
    data   the batch                                FSDP2

Communication of one step. On each rank a micro-batch has t tokens and is processed in chunks of
c labels. An element takes a bytes as an activation (bf16: 2) and w = max(4, a) bytes as a sum.
H: hidden size; Q, K: features of queries and of keys; D: features of a head; F: FFN width;
V: vocabulary; P: elements of a unit of storage after sharding over y and x, padded to a multiple
of z rows.

                  forward                           backward
    each decoder block
    x all-reduce  outputs of o, down:  2 of taH/y   inputs of q|k|v, gate|up:  2 of taH/y
                                                    head norms (Qwen3):  2 of aD
    x all-gather                                    the block's input, if it is checkpointed:
                                                    taH/y, with t rounded up to a multiple of x
    y all-reduce  outputs of q|k|v:  ta(Q+2K)/x     input of o:  taQ/x
                  outputs of gate|up:  ta 2F/x      input of down:  taF/x
                  two norms:  2 of tw               two norms:  2 of tw
    a block of experts instead of gate, up and down
    y             hidden states, all-gather:  taH   gradient of output, all-gather:  taH
                  output, reduce-scatter:  taH      of hidden states, reduce-scatter:  taH
    x all-reduce  output:  taH/y                    gradient of hidden states:  taH/y
    y, x          gradients of routers, R elements with those of the other blocks, all-reduce over
                  each axis:  8R/z, once a step
    if x exceeds the number of key/value heads, over the x/kv_heads ranks that share one
                  keys, values, all-gather:         their gradients, reduce-scatter:
                  2 of taD                          2 of taD
    embedding, last norm
    x all-reduce  embeddings:  taH/y
    y all-reduce  norm:  tw                         norm:  tw
    head, each chunk, gradients in the same pass (`sum_nll`)
    x all-reduce  maxima, sums, dX:  cw, 2cw, caH/y
    y all-reduce  logits:  caV/x
    head, each chunk, one loss per token (`token_terms`)
    x all-reduce  maxima, sums:  cw, 4cw            dX:  caH/y
    y all-reduce  logits:  caV/x                    logits:  caV/x
    each unit of storage: a block, embedding, head, last norm (tied: the last three together)
    z             weights, all-gather:  Pa          a block's, if freed, again:  Pa
                                                    gradients, reduce-scatter:  Pw
    data                                            gradients, all-reduce:  Pw/z, once a step
    y all-reduce  gradients of biases of q|k|v, gate|up and of head norms, C elements with those of
                  the other blocks:  8C/z, once a step
    world         loss with the labels of the next step and requests to stop; gradient norm, once
                  a step:  40 and w bytes

Full recomputation repeats a block's forward collectives over x and y in backward, except that of
the output of down; selective recomputation repeats none. In a ring of R ranks, each rank sends
2(R-1)/R of the bytes of an all-reduce and (R-1)/R of those of the other two collectives.

Llama-3.1-405B (H 16,384) at (x=8, y=1): 4H = 65,536 elements per token and block, forward and
backward, of which a rank sends 114,688 in the ring; separate all-reduces for q, k, v, gate and up
would make these 7H = 114,688 and 200,704. At 32 ranks, a block in bf16 at (x=8, y=4) sends 49 %
less than at (x=32, y=1).
"""
