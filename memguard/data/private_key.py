"""A run's own secret: behind the hashes of its texts, and the noise of dp_sgd."""

import secrets
from pathlib import Path

from memguard.records import write_atomically


def load_private_key(run_folder: Path) -> bytes:
    """Return the run's own key, made at the first call.

    Without it neither the texts behind hashes nor the noise of dp_sgd can be guessed at.
    """
    path = run_folder / "audit" / "private" / "hmac.key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        write_atomically(path, secrets.token_hex(32).encode(), mode=0o600)
    return bytes.fromhex(path.read_text().strip())
