"""Loads and exports Hugging Face folders, whole or by shards; no other package does either.

checkpoint_files.py  selects and checks the files to read: names, index, headers; no torch
small_config.py      reduced configurations of a family, for trials
config_fields.py     refuses configuration fields that no model has; no torch
adapter_config.py    reads adapter_config.json, and locates the base that it names; no torch
adapter_files.py     reads and checks a peft folder: layers, ranks, base; no torch
identity.py          hashes of all files that are read; no torch
hub.py               asks once whether the hub answers, before a download
tokenizer_files.py   checks the files of a tokenizer; names the file and the field
checkpoint.py        configuration and tokenizer of a checkpoint, before its weights are read
load.py              a folder, or random weights, into a model: plain, over devices, or sharded
stored_model.py      a checkpoint that is read tensor by tensor, or an adapter with its base
nf4_base.py          the base of an adapter that was trained on 4-bit weights
merged_weights.py    base and adapter as one source of merged weights
load_as.py           a model as it may be shipped: its adapter merged, or quantised
meta_build.py        a model on the meta device, whose buffers have their values
stored_names.py      a checkpoint's tensors under the names and in the layouts of the modules
stored_form.py       the reverse: what transformers would store for a model
assembly.py          adapts a model for training or an audit: sharding, adapters, compilation
safetensors.py       reads rectangles of tensors; writes files of bounded size
export_merged.py     an adapter merged into its base, tensor by tensor, and its logits compared
export.py            a trained model, gathered tensor by tensor, into a folder
adapter_export.py    trained adapters, into a folder that peft loads
"""
