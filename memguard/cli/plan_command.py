"""`memguard plan`: what fits, then, for a run, what training would feed, save and measure."""

import json
import sys
from typing import Any

import rich.console

from memguard.cli.screens import render_plan
from memguard.config import RunConfig
from memguard.errors import ModelError
from memguard.workflows.plan import MemoryUnknown, make_plan, refuse_misfit
from memguard.workflows.requests import PlanRequest


def print_plan(
    request: PlanRequest, run: RunConfig | None, *, with_documents: bool, as_json: bool
) -> None:
    """Make a plan, print it, and refuse what does not fit.

    Args:
        request: the arguments; checked.
        run: the training run; None for a model alone.
        with_documents: whether documents are read, for a run.
        as_json: whether to print JSON.

    Raises:
        ConfigError: nothing fits, or not the mesh that was given; after it has been printed.
        DataError: as training.
        ModelError: as training, or a family whose memory is not known.
    """
    out = rich.console.Console(file=sys.stdout, highlight=False)
    printed: dict[str, Any] = {}
    plan = None
    try:
        plan = make_plan(request, run)
    except MemoryUnknown as error:
        if not with_documents:
            text = f"{error}; leave out --no-documents for the dry run alone"
            raise ModelError(text) from error
        print(f"{error}: left out", file=sys.stderr)
    if plan is not None:
        printed |= plan.model_dump(mode="json")
        if not as_json:
            render_plan(plan, out)
    if run is not None and with_documents:
        # Here, because a model alone is answered without importing torch.
        from memguard.cli.screens import render_dry_run
        from memguard.runtime import Console
        from memguard.workflows.dry_run import dry_run

        result = dry_run(run, Console())
        printed["dry_run"] = result.record.model_dump(mode="json")
        if not as_json:
            out.print()
            render_dry_run(result, out)
    if as_json:
        sys.stdout.write(json.dumps(printed, indent=2) + "\n")
    if plan is not None:
        sys.stdout.flush()  # The reason comes after the table.
        refuse_misfit(plan)
