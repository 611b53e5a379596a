"""Sends files to a repository of the hub: one commit, none if the repository has them already.

    token         HF_TOKEN, or that of a login
    repository    made if it is not there; private unless said. Its visibility is never changed
    files         large ones first, one after the other; then one commit with all that changed

An upload that was interrupted goes on with the same call: the hub keeps the large files that it has
received. The library that sends them is huggingface_hub; its own bars, advice and user statistics
are off during the upload. No torch.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

import memguard
from memguard.errors import ConfigError, MemguardError, ModelError, RecordError
from memguard.hf.checkpoint_files import cut

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")
_LARGE = ".safetensors"
"""Ending of the files that are sent before the commit, and not again after an interruption."""
_LOGIN = "set HF_TOKEN, or log in with 'hf auth login'"
_MOST_CAUSES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """A file to send."""

    name: str
    content: Path | bytes
    """The file, or what is sent instead of one."""
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What became of an upload."""

    repo: str
    """With the name of its owner."""
    url: str
    commit: str
    is_new_repo: bool
    is_new_commit: bool
    """False: the repository had these files already."""


def make_hub_file(name: str, content: bytes) -> HubFile:
    """Return a file of bytes.

    Args:
        name: in the repository.
        content: of the file.
    """
    digest = hashlib.sha256(content).hexdigest()
    return HubFile(name=name, content=content, num_bytes=len(content), sha256=digest)


def is_in_hub_cache(name: str, kind: str = "model") -> bool:
    """Return whether a model or dataset was downloaded from the hub to this machine under an id.

    A setting may look like a hub id and be a folder of another working directory: only the cache
    tells.

    Args:
        name: id, ``org/name`` or ``name``.
        kind: ``model`` or ``dataset``.
    """
    folder = f"{kind}s--{name.replace('/', '--')}"
    return (Path(constants.HF_HUB_CACHE) / folder).is_dir()


def find_cached(name: str, file: str) -> Path | None:
    """Return a file of a hub model in the local cache; None if it is not there.

    Args:
        name: id of the model.
        file: in its repository.
    """
    found = huggingface_hub.try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def find_token() -> str:
    """Return the user's token.

    Raises:
        ConfigError: there is none, or the hub is switched off.
    """
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("'--to' needs the network, and HF_HUB_OFFLINE is set: unset it")
    token = huggingface_hub.get_token()
    if not token:
        raise ConfigError(f"'--to' needs a token of the hub, and there is none: {_LOGIN}")
    return token


def send_files(
    files: Sequence[HubFile],
    *,
    repo: str,
    token: str,
    is_public: bool,
    message: str,
    on_file: Callable[[HubFile, int], None],
) -> Sent:
    """Send files to a repository of the hub, which is made if it is not there.

    Args:
        files: README.md must be among them, and is validated by the hub first.
        repo: ``org/name``, or ``name`` for one of the user's own.
        token: from `find_token`.
        is_public: whether the repository is, or is made to be, public.
        message: of the commit.
        on_file: called with a file and 0 before it is sent, and with 1 afterwards.

    Raises:
        ConfigError: the token is refused or may not write here; the repository has another
            visibility, or weights that these files would be mixed with.
        ModelError: the hub cannot be reached, or fails.
        RecordError: a file was changed since it was checked.
    """
    api = HfApi(token=token, library_name="memguard", library_version=memguard.__version__)
    with _quiet(), _explained(repo):
        full = repo if "/" in repo else f"{api.whoami()['name']}/{repo}"
        info, is_new_repo = _find_repository(api, full, is_public=is_public)
        _refuse_mixture(full, info, files)
        card = next(file.content for file in files if file.name == "README.md")
        if isinstance(card, bytes):
            ModelCard(card.decode()).validate()
        operations = []
        for file in sorted(files, key=lambda file: file.num_bytes, reverse=True):
            on_file(file, 0)
            operation = CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file.content)
            if operation.upload_info.sha256.hex() != file.sha256:
                raise RecordError(
                    f"'{file.name}' was changed while it was read. Run the same command again"
                )
            if file.name.endswith(_LARGE):
                api.preupload_lfs_files(full, [operation], free_memory=False)
            operations.append(operation)
            on_file(file, 1)
        commit = api.create_commit(full, operations, commit_message=message, parent_commit=info.sha)
    return Sent(
        repo=full,
        url=f"{api.endpoint}/{full}",
        commit=commit.oid,
        is_new_repo=is_new_repo,
        is_new_commit=commit.oid != info.sha,
    )


def _find_repository(api: HfApi, repo: str, *, is_public: bool) -> tuple[Any, bool]:
    """Return what the hub says of a repository, and whether it was made here."""
    try:
        info, is_new = api.model_info(repo), False
    except RepositoryNotFoundError:
        api.create_repo(repo, private=not is_public)
        info, is_new = api.model_info(repo), True
    if info.private and is_public:
        raise ConfigError(
            f"'hub:{repo}' is private, and --public was given: leave --public out, or make it "
            "public in its settings on the hub first. Nothing was sent"
        )
    if not info.private and not is_public:
        raise ConfigError(
            f"'hub:{repo}' is public, and private was meant: give --public if everyone may have "
            "the model, or another name. Nothing was sent"
        )
    return info, is_new


def _refuse_mixture(repo: str, info: Any, files: Sequence[HubFile]) -> None:
    """Refuse to add weights to others: it would not be clear which are loaded."""
    names = {file.name for file in files}
    present = (sibling.rfilename for sibling in info.siblings or ())
    others = [name for name in present if name.endswith(_WEIGHTS) and name not in names]
    if others:
        raise ConfigError(
            f"'hub:{repo}' has the weights {cut(others[0])}, which would be mixed with these: "
            "choose another name, or delete them there. Nothing was sent"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence huggingface_hub for the time of a block, and its statistics of users."""
    level, had_no_bars = hub_logging.get_verbosity(), are_progress_bars_disabled()
    has_no_statistics = constants.HF_HUB_DISABLE_TELEMETRY
    hub_logging.set_verbosity(logging.ERROR)
    disable_progress_bars()
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = has_no_statistics
        hub_logging.set_verbosity(level)
        if not had_no_bars:
            enable_progress_bars()


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Convert errors of the hub, of its client and of the network to one line."""
    try:
        yield
    except MemguardError:
        raise
    except Exception as error:
        explained = _explain(error, repo)
        if explained is None:
            raise
        raise explained from error


def _explain(error: BaseException, repo: str) -> MemguardError | None:
    """Return the error to raise; None for one that is neither of the hub nor of the network."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(causes) < _MOST_CAUSES:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    for cause in causes:
        if isinstance(cause, OfflineModeIsEnabled):
            return ConfigError("'--to' needs the network, and HF_HUB_OFFLINE is set: unset it")
        response = getattr(cause, "response", None)
        if (status := getattr(response, "status_code", None)) is not None:
            return _explain_status(int(status), cause, repo)
        # Those of the HTTP client, whose name differs between versions of the library.
        is_network = type(cause).__module__.startswith(("httpx", "httpcore", "requests"))
        if is_network or isinstance(cause, ConnectionError | TimeoutError):
            return ModelError(
                f"'hub:{repo}': the hub does not answer at {constants.ENDPOINT} "
                f"({_say(cause)}). Check the connection and run the same command again: what has "
                "arrived is not sent twice"
            )
    if isinstance(error, ValueError):
        return ModelError(f"'hub:{repo}': the hub refuses a file: {_say(error)}")
    return None


def _explain_status(status: int, error: BaseException, repo: str) -> MemguardError:
    if status == 401:
        return ConfigError(f"the hub does not accept the token (401): {_LOGIN}")
    if status == 403:
        return ConfigError(
            f"the token may not write to 'hub:{repo}' (403): use one with write access to it, or "
            "another name"
        )
    if status == 404:
        return ConfigError(
            f"'hub:{repo}' is not there, or this token may not see it (404): correct the name, or "
            "use another token"
        )
    if status == 409:
        return ConfigError(
            f"'hub:{repo}' exists, and this token may not see it (409): choose another name"
        )
    if status == 412:
        return ModelError(
            f"'hub:{repo}' was changed by somebody else during the upload (412): run the same "
            "command again"
        )
    return ModelError(
        f"'hub:{repo}': the hub answers {status} ({_say(error)}). Run the same command again later"
    )


def _say(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".:") or type(error).__name__
    return cut(text, 200)
