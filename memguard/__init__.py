"""memguard: fine-tune causal language models, measure what they memorised, prevent it.

Importing the package imports nothing else, so `import memguard.report` works without torch.
Layers, from the top; each imports only what stands below it (checked by import-linter):

    cli                           composition root: the only place that sees everything
    compare | report              read records (JSON, parquet); no torch
    train | audit                 engine | measurement
    data | mitigation | parallel  documents and batches | pure loss terms | weights and vocabulary
    runtime                       device, console, peak memory
    config | records | seeds | assets   what was asked | what was found | randomness | shipped files
    errors
"""

__version__ = "0.1.0"
