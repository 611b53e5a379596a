"""A Hugging Face folder in and out, whole or by shards: the only place where either happens.

checkpoint_files.py  is there a checkpoint at all? by the names in its folder; no torch
checkpoint.py        configuration and identity of a checkpoint, before its weights are read
load.py              a folder, or random weights, into a model: plain, over devices, or sharded
sharded.py           a sharded model: configuration -> meta -> shards -> storage -> weights
safetensors.py       rectangles of tensors read; files of bounded size written
export.py            a trained model, gathered tensor by tensor, into a folder
"""
