"""memguard: fine-tune causal language models, measure what they memorised, prevent it.

Importing the package imports nothing else, so `import memguard.report` works without torch.
Layers, from the top; each imports only those below it (checked by import-linter):

    cli                           arguments, text and exit codes of the commands
    api | integrations            the commands as Python functions | memguard in other programs
    workflows                     one function for each command
    compare | report | planner    comparisons | pages | memory and time
    audit | train | hf            measurement | engine | Hugging Face folders in and out
    model                         a causal LM as hidden states, losses, scores and next tokens
    data | mitigation | parallel  documents and batches | loss terms | the 4D algorithm
    runtime                       processes, device, console
    config | records | seeds | assets   settings | results | randomness | shipped files
    errors

`compare`, `report` and the layers below `runtime` work without torch.
"""

__version__ = "0.1.0"
