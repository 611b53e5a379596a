"""A program that trains a run, and kills itself after a step: SETTINGS STEP."""

import os
import signal
import sys

from run_examples import acting_after, train_checked

from memguard.config import RunConfig

if __name__ == "__main__":
    config = RunConfig.model_validate_json(sys.argv[1])
    with acting_after(int(sys.argv[2]), lambda _: os.kill(os.getpid(), signal.SIGKILL)):
        train_checked(config)
