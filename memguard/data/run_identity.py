"""The identity key of one run: made for its first documents, and expected for all later ones."""

from dataclasses import dataclass
from pathlib import Path

from memguard.data.identity_key import (
    SETTING,
    IdentityKey,
    draw_identity_key,
    find_identity_key,
    find_key_path,
    load_identity_key,
)
from memguard.records.run_files import load_summary
from memguard.runtime import Console


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Where a run's key is, and which key its documents were prepared with."""

    named: str | None
    """`data.identity_key`."""
    run_folder: Path
    expected: str | None
    """Fingerprint of the key of the prepared documents; None if there are none."""

    @classmethod
    def of_run(cls, named: str | None, run_folder: Path) -> "RunIdentity":
        """Return the expectations of a folder, whose documents may be missing or damaged."""
        summary = load_summary(run_folder)
        expected = None if summary is None else summary.identity_key
        return cls(named=named, run_folder=run_folder, expected=expected)

    def find(self, console: Console, *, makes_key: bool, needs_key: bool) -> IdentityKey | None:
        """Return the key; None if the one that is expected is missing.

        Args:
            console: says that a key was made, or that an expected one is missing.
            makes_key: whether a missing key is made; False draws one that is not kept. None is made
                where one is expected.
            needs_key: whether the run cannot go on without it.

        Raises:
            ConfigError, DataError: see `load_identity_key`.
        """
        if self.expected is None:
            if makes_key:
                return load_identity_key(self.named, outside=[self.run_folder], say=console.info)
            found = find_identity_key(self.named, outside=[self.run_folder])
            return draw_identity_key() if found is None else found
        if needs_key:
            return self.require()
        return find_identity_key(
            self.named,
            outside=[self.run_folder],
            expected=self.expected,
            of=f"'{self.run_folder}'",
        )

    def require(self) -> IdentityKey:
        """Return the key that the documents were prepared with.

        Raises:
            ConfigError, DataError: see `load_identity_key`; it is missing.
        """
        return load_identity_key(
            self.named,
            outside=[self.run_folder],
            expected=self.expected,
            of=f"'{self.run_folder}'",
        )

    def warn_of_missing(self, console: Console) -> None:
        """Say that the run goes on without its key."""
        console.warn(
            f"the identity key of '{self.run_folder}' (fingerprint {self.expected}) is missing: "
            f"'{find_key_path(self.named)}'. The run goes on without it; restore it, or name its "
            f"file in '{SETTING}', to match later audits with this run"
        )
