"""Loads and exports Hugging Face folders, whole or by shards; no other package does either.

checkpoint_files.py  selects and checks the files to read: names, index, headers; no torch
config_fields.py     refuses configuration fields that no model has; no torch
adapter_config.py    reads adapter_config.json, and locates the base that it names; no torch
adapter_files.py     reads and checks a peft folder: layers, ranks, base; no torch
identity.py          hashes of all files that are read; no torch
checkpoint.py        configuration and tokenizer of a checkpoint, before its weights are read
from_config.py       models of a configuration alone: without storage, reduced, random weights
load.py              the model of a checkpoint: plain, over devices, sharded, or tensor by tensor
nf4_base.py          the base of an adapter that was trained on 4-bit weights
merged_weights.py    base and adapter as one source of merged weights
load_as.py           a model as it may be shipped: its adapter merged, or quantised
stored_names.py      a checkpoint's tensors under the names and in the layouts of the modules
assembly.py          adapts a model for training or an audit: sharding, adapters, compilation
safetensors.py       reads rectangles of tensors; writes files of bounded size
export.py            a model, or tensors of a checkpoint, as transformers would store them
export_rehearsal.py  all of an export but the weights, tried and repaired before training
adapter_export.py    adapters, into a folder that peft loads or merged into their base
"""
