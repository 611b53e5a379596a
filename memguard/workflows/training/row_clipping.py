"""Clipping and noise of a run with dp_sgd; the noise is derived from the user's identity key."""

from memguard.config import RunConfig
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.data.identity_key import load_identity_key
from memguard.data.loader import Loader
from memguard.runtime import Console, Runtime
from memguard.train.dp_sgd import RowClipping
from memguard.workflows.training.data import PreparedRun


def build_row_clipping(
    config: RunConfig,
    prepared: PreparedRun,
    loader: Loader,
    run_key: str,
    runtime: Runtime,
    console: Console,
) -> RowClipping | None:
    """Return the clipping and noise of a run with dp_sgd; None for others.

    Args:
        config: of the run.
        prepared: its documents.
        loader: of its rows.
        run_key: of the run, from which the noise is derived.
        runtime: of this rank.
        console: warns of a delta that is too large.

    Raises:
        ConfigError, DataError: see `load_identity_key`.
    """
    dp_sgd = find_mitigation(config.mitigations, DpSgdConfig)
    if dp_sgd is None:
        return None
    num_rows = len(loader.rows)
    if dp_sgd.delta >= 1 / num_rows:
        console.warn(
            f"'delta' of dp_sgd is {dp_sgd.delta:g}, not below 1/rows = {1 / num_rows:.1g} "
            f"({num_rows:,} rows): at this value even a mechanism that publishes a whole row would "
            "count as private"
        )

    def derive_seed() -> int:
        identity = load_identity_key(
            config.data.identity_key,
            outside=[prepared.folder],
            expected=prepared.corpus.summary.identity_key,
            of=f"'{prepared.folder}'",
        )
        return identity.derive_secret("noise of dp_sgd", run_key)

    # Only rank 0 needs the file of the key.
    seed: int = runtime.broadcast_object(runtime.only_on_main(derive_seed))
    return RowClipping(dp_sgd, noise_seed=seed)
