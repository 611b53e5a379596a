"""Whether the decoder blocks of a run are compiled, and why. No torch.

It is the entry "compile" of environment.json, which training writes when it starts. Resumed runs
keep it, and `memguard compare` names the settings that differ in it. No hash protects that file: if
it is damaged, the choice is made again.
"""

import json
from pathlib import Path

from pydantic import ValidationError

from memguard.records.record import Record

ENVIRONMENT = "environment.json"
_ENTRY = "compile"


class CompileChoice(Record):
    """A choice and its reason."""

    is_on: bool
    reason: str
    """Part of a sentence, e.g. "the run is planned to take 3:05 h"."""

    def add_to(self, environment: dict[str, str]) -> dict[str, object]:
        """Return the contents of environment.json.

        Args:
            environment: versions and hardware, by name.
        """
        return {**environment, _ENTRY: self.model_dump(mode="json")}


def load_compile_choice(run_folder: Path) -> CompileChoice | None:
    """Return the choice of a run; None if it is not recorded, or cannot be read.

    Args:
        run_folder: of a run that was started.
    """
    try:
        environment = json.loads((run_folder / ENVIRONMENT).read_bytes())
        return CompileChoice.model_validate(environment[_ENTRY])
    except (OSError, ValueError, RecursionError, LookupError, TypeError, ValidationError):
        return None
