"""Silences libraries as a run does, so that the output of a benchmark is its table.

The fork server of `harness` imports this first, before libraries that warn when they are imported.
"""

import warnings

from memguard.runtime import quiet_libraries

quiet_libraries()
# Of transformers' Trainer and peft, about each other.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
