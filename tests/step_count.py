"""Counts the optimizer steps of the tests' own process and of those that are forked for them."""

import os

VARIABLE = "MEMGUARD_TEST_STEPS"


def count_steps() -> None:
    """Count the optimizer steps of this process from now on, where the session measures costs."""
    if path := os.environ.get(VARIABLE):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        # One byte a step: appended whole, whatever the number of processes, and never lost.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        register_optimizer_step_post_hook(lambda *_: os.write(descriptor, b".") and None)
