"""`memguard plan`: what fits, then, for a run, what training would feed, save and measure."""

import json
import sys
from typing import Any

import rich.console

from memguard.cli.screens import render_plan
from memguard.config import RunConfig
from memguard.errors import ModelError
from memguard.parallel.mesh_shape import COMPARED_FAMILIES, ModelSizes
from memguard.planner.plan import Plan
from memguard.workflows.plan import make_plan, refuse_misfit
from memguard.workflows.requests import PlanRequest, ask_about_model, ask_about_run, read_model_file


def run_plan(
    request: PlanRequest, run: RunConfig | None, *, with_documents: bool, as_json: bool
) -> None:
    """Make a plan, print it, and refuse what does not fit.

    Args:
        request: the arguments; checked.
        run: the training run asked about; None where it is a model alone.
        with_documents: whether documents are read, for a run.
        as_json: whether to print JSON.

    Raises:
        ConfigError: nothing fits, or not what was asked for; after it has been printed.
        DataError: as training.
        ModelError: as training, or a family whose memory is not known.
    """
    out = rich.console.Console(file=sys.stdout, highlight=False)
    printed: dict[str, Any] = {}
    plan = None
    if run is None:
        plan = make_plan(ask_about_model(request))
    else:
        sizes = _read_known_sizes(run) if request.model is None else read_model_file(request.model)
        if sizes is not None:
            plan = make_plan(ask_about_run(request, run, sizes))
        else:
            unknown = (
                f"memory is known for {', '.join(COMPARED_FAMILIES)} only, without eager attention"
            )
            if not with_documents:
                raise ModelError(f"{unknown}; leave out --no-documents for the dry run alone")
            print(f"{unknown}: left out", file=sys.stderr)
    if plan is not None:
        printed |= plan.model_dump(mode="json")
        if not as_json:
            render_plan(plan, out)
    if run is not None and with_documents:
        # Here, because a model alone is answered without loading torch.
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
        _refuse(plan)


def _refuse(plan: Plan) -> None:
    sys.stdout.flush()  # The reason comes after the table.
    refuse_misfit(plan)


def _read_known_sizes(run: RunConfig) -> ModelSizes | None:
    """Return the sizes of a run's model; None where what it takes is not known."""
    if run.model.attn_implementation == "eager":
        return None  # It keeps scores of all pairs of tokens.
    from memguard.workflows.setup import read_model_config

    config = read_model_config(run)
    if config.get_text_config().model_type not in COMPARED_FAMILIES:
        return None
    return ModelSizes.from_config(config)
