"""What the server of the ranks does once, when it imports this, and then none of its forks."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# The rules for names of weights are built for all families with the first use of one.
get_checkpoint_conversion_mapping("llama")

# A fork that collects garbage would look at, and so copy, all that the server has imported.
gc.collect()
gc.freeze()
