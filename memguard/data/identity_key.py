"""The identity key: one secret a project, under which equal texts have equal hashes.

    identity of a document    HMAC-SHA256(key, text as it was read), see `tokenization.hmac_text`
    fingerprint               a hash of the key, which runs and reports store in its place
    noise of dp_sgd           HMAC-SHA256(key, purpose and the run's key)

Two audits can be matched where both used the same key. Who has the key and a manifest can test
whether a guessed text was trained on: the key is therefore made with mode 0600, and refused in the
folder of a run, which is handed on; the default key is refused below a folder with `.git`.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from memguard.errors import MAX_PATH, ConfigError, DataError, shorten
from memguard.records.audit_files import AUDIT_FILES
from memguard.records.record import flush, make_private_folder
from memguard.records.run_files import has_begun, has_prepared, load_summary
from memguard.runtime import Console

SETTING = "data.identity_key"
FILE_NAME = "memguard-identity.key"
_BYTES = 32
_FINGERPRINT_DIGITS = 32
_LONGEST = 1024
"""A key's file is 65 bytes; of another file no more than this is read."""
_START_OVER = "; if it is lost, train again under another 'name'"
_NUM_TRIES, _PAUSE_S = 20, 0.01
"""Another process creates a key and writes it at once: an empty file is read again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdentityKey:
    """A key and where it is."""

    key: bytes = field(repr=False)
    path: Path

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digits that identify the key; it cannot be computed from them."""
        digest = hashlib.sha256(b"memguard identity key\0" + self.key).hexdigest()
        return digest[:_FINGERPRINT_DIGITS]

    def derive_secret(self, purpose: str, run_key: str) -> int:
        """Return 256 secret bits for one purpose in one run; the same whenever it is resumed.

        Runs with other settings or documents have another run key, and other secrets.
        """
        # Texts are hashed as JSON, which begins with a brace: no text has one of these hashes.
        message = f"memguard\0{purpose}\0{run_key}".encode()
        return int.from_bytes(hmac.new(self.key, message, hashlib.sha256).digest())


def find_key_path(named: str | Path | None, *, setting: str = SETTING) -> Path:
    """Return the path of the key: the named one, else that in the user's configuration folder.

    Raises:
        ConfigError: none is named, and the user has no home folder.
    """
    if named is not None:
        return Path(os.path.abspath(os.path.expanduser(named)))
    try:
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError as error:
        raise ConfigError(
            f"this user has no home folder for the identity key: name its file in '{setting}'"
        ) from error
    return Path(os.path.abspath(folder / "memguard" / FILE_NAME))


def load_identity_key(
    named: str | Path | None,
    *,
    setting: str = SETTING,
    outside: Sequence[Path] = (),
    expected: str | None = None,
    of: str = "",
    say: Callable[[str], None] | None = None,
) -> IdentityKey:
    """Return the identity key at the path ``named``; None: in the user's configuration folder.

    It must not be in the folders ``outside``, nor in those of runs and audits. ``expected`` is the
    fingerprint of the key that documents were hashed with, which belongs to ``of``, e.g. the folder
    of a run; None accepts any key. ``say`` is called with one line if the key was missing and has
    been made; None makes none. A key that is expected is never made.

    Raises:
        ConfigError: it may not be where it is, see `check_key_place`; it cannot be made; others can
            read it; it is not the expected one.
        DataError: it is missing, cannot be read, or is not a key.
    """
    path = find_key_path(named, setting=setting)
    start_over = _START_OVER if setting == SETTING else ""
    check_key_place(path, setting=setting, outside=outside)
    if not os.path.lexists(path):
        if expected is not None or say is None:
            whose = f" of {of or 'the documents'} (fingerprint {expected})" if expected else ""
            raise DataError(
                f"'{setting}': the identity key{whose} is missing: '{_show(path)}'. Restore it "
                f"from a copy, or name its file in '{setting}'{start_over if expected else ''}"
            )
        if _make(path, setting):
            say(
                f"identity key: made {path}, keep it: only with it can later audits be matched, "
                "and a guess be tested against the hashes"
            )
    identity = IdentityKey(key=_read(path, setting), path=path)
    if expected is not None and identity.fingerprint != expected:
        raise ConfigError(
            f"'{setting}': the identity key '{_show(path)}' has the fingerprint "
            f"{identity.fingerprint}, and {of or 'the documents'} the key of fingerprint "
            f"{expected}: name that key in '{setting}'{start_over}"
        )
    return identity


def check_key_place(path: Path, *, setting: str = SETTING, outside: Sequence[Path] = ()) -> None:
    """Check that a key is not where it would be handed on with other files; it need not exist.

    Raises:
        ConfigError: it is in one of the folders ``outside``, in the folder of a run or an audit, or
            the user's configuration folder is in a git work tree.
    """
    real = Path(os.path.realpath(path))
    refused = {os.path.realpath(folder) for folder in outside}
    # As it is given too: a folder in a run may be a link to another disk.
    places = (*real.parents, *Path(os.path.abspath(path)).parents)
    place = next((p for p in places if os.path.realpath(p) in refused or _is_handed_on(p)), None)
    why = "a folder of a run or an audit, which may be handed on"
    # The person who names a file knows whether it is committed.
    if place is None and path.name == FILE_NAME and path == find_key_path(None, setting=setting):
        place = next((p for p in real.parents if os.path.lexists(p / ".git")), None)
        why = "a git work tree, whose files are committed"
    if place is not None:
        raise ConfigError(
            f"'{setting}': the identity key must not be in '{_show(place)}', {why}; got "
            f"'{_show(path)}'. Name another file in '{setting}'"
        )


def _is_handed_on(folder: Path) -> bool:
    """Return whether a folder is that of a run or of an audit."""
    with contextlib.suppress(OSError):
        is_run = (folder / "config.yaml").is_file() and (has_prepared(folder) or has_begun(folder))
        return is_run or (folder / AUDIT_FILES).is_file()
    return False


def _make(path: Path, setting: str) -> bool:
    """Write a new key unless another process is first; return whether this one made it."""
    try:
        make_private_folder(path.parent)
        with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
            try:
                file.write(f"{secrets.token_hex(_BYTES)}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                path.unlink(missing_ok=True)  # Half a key would be refused for ever.
                raise
        flush(path.parent)
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(path):
            return False
        raise ConfigError(
            f"'{setting}': the identity key '{_show(path)}' cannot be made "
            f"({os.strerror(error.errno or 0)}): make its folder writable, or name another file"
        ) from error
    return True


def _read(path: Path, setting: str) -> bytes:
    """Return the bytes of a key, after checking that no other user can read them."""
    text, problem = b"", ""
    try:
        status = path.stat()
        # As ssh does: a file of another owner, e.g. a mounted secret, has their mode.
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and status.st_uid == os.getuid() and status.st_mode & 0o077:
            raise ConfigError(
                f"'{setting}': others can read or change the identity key '{_show(path)}' "
                f"(mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 '{_show(path)}'"
            )
        if not is_file:
            problem = "is not a file, and so no identity key"
        else:
            for _ in range(_NUM_TRIES):
                with path.open("rb") as file:
                    text = file.read(_LONGEST).strip()
                if text:
                    break
                time.sleep(_PAUSE_S)
            if re.fullmatch(rb"[0-9a-fA-F]{%d}" % (2 * _BYTES), text) is None:
                size = f"{len(text)} bytes" if len(text) < _LONGEST else f"{_LONGEST} bytes or more"
                has = size if len(text) != 2 * _BYTES else "other characters"
                rule = f"which is {2 * _BYTES} hexadecimal digits"
                problem = f"is no identity key, {rule}; it has {has}"
    except OSError as error:
        problem = f"cannot be read ({os.strerror(error.errno or 0)})"
    if problem:
        raise DataError(
            f"'{setting}': '{_show(path)}' {problem}. Restore it from a copy, or name another file"
        )
    return bytes.fromhex(text.decode())


def _show(path: Path) -> str:
    return shorten(str(path), MAX_PATH)


class RunIdentity:
    """Where a run's key is, and which key its documents were prepared with."""

    def __init__(self, named: str | None, run_folder: Path) -> None:
        """Read a folder, whose documents may be missing or damaged.

        ``named`` is `data.identity_key`.
        """
        self.named, self.run_folder = named, run_folder
        summary = load_summary(run_folder)
        self.expected = None if summary is None else summary.identity_key
        """Fingerprint of the key of the prepared documents; None if there are none."""

    def find(self, console: Console, *, makes_key: bool, needs_key: bool) -> IdentityKey | None:
        """Return the key; None if the one that is expected is missing; see `load_identity_key`.

        `makes_key`: a missing key is made, unless one is expected; False draws one that is not
        kept. `needs_key`: the run cannot go on without it.
        """
        if self.expected is None and makes_key:
            return load_identity_key(self.named, outside=[self.run_folder], say=console.info)
        path = find_key_path(self.named)
        if os.path.lexists(path) or (self.expected is not None and needs_key):
            return self.require()
        check_key_place(path, outside=[self.run_folder])
        if self.expected is not None:
            return None
        return IdentityKey(key=secrets.token_bytes(_BYTES), path=Path(os.devnull))

    def require(self) -> IdentityKey:
        """Return the key that the documents were prepared with; see `load_identity_key`."""
        return load_identity_key(
            self.named, outside=[self.run_folder], expected=self.expected, of=f"'{self.run_folder}'"
        )

    def warn_of_missing(self, console: Console) -> None:
        """Say that the run goes on without its key."""
        console.warn(
            f"the identity key of '{self.run_folder}' (fingerprint {self.expected}) is missing: "
            f"'{find_key_path(self.named)}'. The run goes on without it; restore it, or name its "
            f"file in '{SETTING}', to match later audits with this run"
        )
