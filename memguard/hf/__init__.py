"""A Hugging Face folder in and out, whole or by shards: the only place where either happens.

checkpoint_files.py  which files are read, and whether they can be: names, index, headers; no torch
config_fields.py     fields of a configuration that no model has; no torch
identity.py          hashes of all that is read; no torch
checkpoint.py        configuration and tokenizer of a checkpoint, before its weights are read
load.py              a folder, or random weights, into a model: plain, over devices, or sharded
sharded.py           a sharded model: configuration -> meta -> shards -> storage -> weights
safetensors.py       rectangles of tensors read; files of bounded size written
export.py            a trained model, gathered tensor by tensor, into a folder
"""
