"""Loads and exports Hugging Face folders, whole or by shards; no other package does either.

checkpoint_files.py  selects and checks the files to read: names, index, headers; no torch
config_fields.py     refuses configuration fields that no model has; no torch
identity.py          hashes of all files that are read; no torch
checkpoint.py        configuration and tokenizer of a checkpoint, before its weights are read
load.py              a folder, or random weights, into a model: plain, over devices, or sharded
sharded.py           a sharded model: configuration -> meta -> shards -> storage -> weights
safetensors.py       reads rectangles of tensors; writes files of bounded size
export.py            a trained model, gathered tensor by tensor, into a folder
"""
