"""From a checkpoint folder to hidden states and per-token losses, on one process or on a mesh.

    checkpoint_files.py   is there a checkpoint at all? by the names in its folder; no torch
    checkpoint_folder.py  what a checkpoint says before its weights are read
    weights.py            the only place where a folder becomes a module
    scratch.py            models that start from nothing
    assemble.py           a sharded model: configuration -> meta -> shards -> storage -> weights
    hf_plan.py            which role each module of a Hugging Face model plays
    shard.py              roles applied; what is computed again; units of storage (FSDP2)

    linear.py             linear layers over y and x
    embedding.py          token embedding over y and x
    norm.py               norms over sharded features
    attention.py          attention of packed rows without the pairs that nobody sees
    masks.py              one attention mask for all decoder blocks
    vocab.py              the vocabulary layer: hidden states, and a head for chosen tokens only
    vocab_checks.py       is this a causal LM as we understand it? asked of the model
    head.py               one rank's piece of the LM head
    nll.py                losses over a sharded vocabulary, few logits at a time
    token_scores.py       log-probability, argmax and margin of single tokens
    truncation.py         probability of a label under top-k and top-p sampling

    mesh_shape.py         which mesh runs, or the nearest that would do; no torch
    mesh_rules.py         what a model and a batch demand of it
    mesh.py               the groups of processes
    collectives.py        collectives over one axis and their gradients
    units.py              which parameters are stored and sent together; no torch
    traffic.py            the formula below; no torch
    simulated.py          one rank of any mesh, without the others and without memory
    allocations.py        how much memory tensors take, operation by operation

    rectangles.py         which rectangle of each full tensor a rank stores
    slices.py             reads rectangles from a folder or from memory
    gather.py             a sharded tensor put together on one rank
    safetensors_files.py  files of bounded size, written one tensor at a time
    export.py             writes a Hugging Face folder
    local_parameters.py   parameters as the optimizer sees them: plain local tensors

One process uses Hugging Face's plain modules. Everything above this package asks for hidden
states of packed rows and for numbers per token, never for logits, so that sharding stays in here.

    ranks = data x z x y x x
    x      heads, FFN width, vocabulary             out-features of q, k, v, gate, up, head
    y      the residual stream's features           their in-features; o and down the other way
    z      storage of weights, and the batch        FSDP2
    data   the batch                                FSDP2

What one step sends. On a rank a micro-batch has t tokens, and chunks of c labels. a bytes an
element of activations (bf16: 2), w = max(4, a) of sums over many. H hidden size, Q and K features
of queries and of keys, D those of a head, F FFN width, V vocabulary; P elements of a unit of
storage, as it lies over y and x, padded to a multiple of z row by row.

                  forward                           backward
    each decoder block
    x all-reduce  outputs of o, down:  2 of taH/y   inputs of q|k|v, gate|up:  2 of taH/y
                                                    head norms (Qwen3):  2 of aD
    y all-reduce  outputs of q|k|v:  ta(Q+2K)/x     input of o:  taQ/x
                  outputs of gate|up:  ta 2F/x      input of down:  taF/x
                  two norms:  2 of tw               two norms:  2 of tw
    where x exceeds the number of key/value heads, over the x/kv_heads ranks that share one
                  keys, values, all-gather:         their gradients, reduce-scatter:
                  2 of taD                          2 of taD
    embedding, last norm
    x all-reduce  embeddings:  taH/y
    y all-reduce  norm:  tw                         norm:  tw
    head, each chunk, gradients in the same pass (`sum_nll`)
    x all-reduce  maxima, sums, dX:  cw, 2cw, caH/y
    y all-reduce  logits:  caV/x
    head, each chunk, losses one by one (`token_terms`)
    x all-reduce  maxima, sums:  cw, 4cw            dX:  caH/y
    y all-reduce  logits:  caV/x                    logits:  caV/x
    each unit of storage: a block, embedding, head, last norm (tied: the last three together)
    z             weights, all-gather:  Pa          a block's, if freed, again:  Pa
                                                    gradients, reduce-scatter:  Pw
    data                                            gradients, all-reduce:  Pw/z, once a step
    world         counts of labels, loss, gradient norm, once a step:  16, 8 and w bytes

Full recomputation repeats a block's forward over x and y in backward, but for the output of down;
selective repeats none of it. Around a ring each of R ranks sends 2(R-1)/R of an all-reduce,
(R-1)/R of the other two.

Llama-3.1-405B (H 16,384) at (x=8, y=1): 4H = 65,536 elements a token and block, forward and
backward, which are 114,688 around the ring; q, k, v, gate and up one by one would be 7H = 114,688
and 200,704. At 32 ranks a block in bf16, (x=8, y=4) sends 49 % less than (x=32, y=1).
"""
