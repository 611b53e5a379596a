"""`memguard export RUN --to hub:NAME`: sends the model or adapter of a run to the hub.

    run  ->  checked as `verify` does  ->  files of an allow-list, and a new card  ->  one commit

Fields of JSON files that name places of this machine are left out, in memory. `--dry-run` lists the
files, byte for byte those that would be sent, and needs neither token nor network. No torch.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import RepositoryNotFoundError

import memguard
from memguard.config import RunConfig
from memguard.errors import ConfigError, MemguardError, ModelError, RecordError
from memguard.hf.adapter_files import ADAPTER_WEIGHTS
from memguard.hf.checkpoint_files import ADAPTER_CONFIG, CONFIG, INDEX, SINGLE, quote, read_json
from memguard.pages.formatting import is_hub_id
from memguard.records import AuditReport
from memguard.records.audit_files import has_audit, load_audit_report
from memguard.records.run_files import CARD
from memguard.report.model_card import render_hub_card
from memguard.runtime import Console
from memguard.runtime.children import call_interruptibly
from memguard.workflows.common.folder import RunFolder
from memguard.workflows.verify import OnRead, sum_shown

_NAME = re.compile(
    r"hub:(?!.*(?:\.\.|--|\.git$))([A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?)", re.ASCII
)
_JSON = (
    *(CONFIG, ADAPTER_CONFIG, "generation_config.json", "tokenizer_config.json"),
    "special_tokens_map.json",
)
"""Files whose fields are looked at."""
_ALLOWED = {
    *(*_JSON, SINGLE, INDEX, ADAPTER_WEIGHTS, "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")
_OF_THIS_MACHINE = frozenset(
    ("_name_or_path", "name_or_path", "tokenizer_file", "local_files_only", "is_local")
)
"""Fields that say where a model or tokenizer was read from; loading does not need them."""
_SHORTEST = 6
"""Shorter texts occur anywhere (characters)."""
_LOGIN = "set HF_TOKEN, or log in with 'hf auth login'"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubRequest:
    """The arguments of `memguard export --to`."""

    folder: Path
    """Of a run."""
    to: str
    """``hub:NAME`` or ``hub:ORG/NAME``."""
    public: bool = False
    dry_run: bool = False
    allow_extracted: bool = False
    allow_unaudited: bool = False
    base: str | None = None
    """Hub id of the base model, to name it."""

    def check(self) -> str:
        """Return the repository; refuse what cannot work, before anything is read."""
        name, sends = _NAME.fullmatch(self.to), not self.dry_run
        problems = {
            f"'--to' must be hub:NAME or hub:ORG/NAME; got {quote(self.to)}": name is None,
            f"'--to' needs the folder of a run: '{self.folder}' is none": not (
                self.folder / "config.yaml"
            ).is_file(),
            f"'--base' must be a hub id with '--to'; got {quote(str(self.base))}": (
                self.base is not None and (not is_hub_id(self.base) or Path(self.base).exists())
            ),
            "'--to' needs the network, and HF_HUB_OFFLINE is set: unset it": (
                sends and constants.HF_HUB_OFFLINE
            ),
            f"'--to' needs a token of the hub, and there is none: {_LOGIN}": (
                sends and not constants.HF_HUB_OFFLINE and not huggingface_hub.get_token()
            ),
        }
        found = [problem for problem, is_there in problems.items() if is_there]
        if found or name is None:
            raise ConfigError(*found)
        return name[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubExport:
    """What is or would be sent, and what was decided about it."""

    repo: str
    is_public: bool
    verdict: str | None
    """Level; None: no audit was made."""
    badges: tuple[str, ...]
    needs: str | None
    """Option without which it is not sent, because of its audit; None for none."""
    files: tuple[dict[str, Any], ...]
    """Name, num_bytes and sha256 of each file."""
    left_out: tuple[str, ...]
    """Files of the model's folder that are not sent."""
    card: str
    url: str | None = None
    """None: nothing was sent."""
    commit: str | None = None


def export_to_hub(request: HubRequest, on_read: OnRead) -> HubExport:
    """Send the weights of a run to the hub, or list what would be sent."""
    repo, folder = request.check(), request.folder
    run = RunFolder(folder)
    trained = run.require_trained(without_documents=True, read=sum_shown(on_read))
    config = run.read_config()
    report = load_audit_report(folder / "audit") if has_audit(folder / "audit") else None
    if report is not None:
        run.check_audited(report)
    base = request.base or _find_base(config)
    places, allowed = _list_places(folder, config, base), sorted(filter(_is_allowed, trained.model))
    operations = []
    for name in allowed:
        path = folder / trained.folder / name
        cleaned = _clean_file(path, base, places)
        operation = CommitOperationAdd(name, path if cleaned is None else cleaned)
        was_changed = operation.upload_info.sha256.hex() != trained.model[name].sha256
        if was_changed and cleaned is None:
            raise RecordError(f"'{path}' was changed while it was read: run the command again")
        operations.append(operation)
    card = render_hub_card(
        report,
        title=repo.rpartition("/")[2],
        is_adapter=trained.folder == "adapter",
        base=base,
        has_base=config.model.path is not None,
        mitigations=[mitigation.name for mitigation in config.mitigations],
    )
    operations.append(CommitOperationAdd(CARD, card.encode()))
    if config.model.scratch is not None and config.model.scratch.tokenizer is None:
        Console().warn("the tokenizer was trained on the documents: its vocabulary has their words")
    export = HubExport(
        repo=repo,
        is_public=request.public,
        verdict=None if report is None else report.verdict.level,
        badges=() if report is None else tuple(b.describe() for b in report.verdict.badges),
        needs=_find_option(request, report),
        files=tuple(map(_describe_file, operations)),
        left_out=tuple(sorted(set(trained.model).difference(allowed))),
        card=card,
    )
    return export if request.dry_run else call_interruptibly(lambda: _send(export, operations))


def _describe_file(operation: CommitOperationAdd) -> dict[str, Any]:
    size, sha256 = operation.upload_info.size, operation.upload_info.sha256.hex()
    return {"name": operation.path_in_repo, "num_bytes": size, "sha256": sha256}


def _find_option(request: HubRequest, report: AuditReport | None) -> str | None:
    """Return the option that is missing: everybody may load a public model."""
    if report is None:
        return None if request.allow_unaudited else "--allow-unaudited"
    refused = ("red", "amber") if request.public else ("red",)
    is_refused = report.verdict.colour in refused and not request.allow_extracted
    return "--allow-extracted" if is_refused else None


# -- what may leave --------------------------------------------------------------------------------


def _is_allowed(name: str) -> bool:
    return name in _ALLOWED or _SHARD.fullmatch(name) is not None


def _clean_file(path: Path, base: str | None, places: frozenset[str]) -> bytes | None:
    """Return what is sent instead of a file; None sends the file itself."""
    if path.suffix == ".safetensors":
        return None
    if path.name not in _JSON:
        # A vocabulary may have short paths as words of its own.
        content, fields, cleaned = path.read_bytes(), None, None
        found = [place for place in places if place[0] == "/" and place.encode() in content]
    else:
        fields = read_json(path, name=str(path.parent))
        cleaned = _drop(fields)
        if path.name == ADAPTER_CONFIG:
            cleaned["base_model_name_or_path"] = base
            cleaned["revision"] = cleaned.get("revision") if base else None
        found = [text for text in _list_texts(cleaned) if _is_place(text, places)]
    if found:
        raise ModelError(
            f"'{path}' names {quote(found[0])}, a place of this machine: it is not sent"
        )
    return None if cleaned == fields else f"{json.dumps(cleaned, indent=2)}\n".encode()


def _drop(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop(item) for key, item in value.items() if key not in _OF_THIS_MACHINE}
    return [_drop(item) for item in value] if isinstance(value, list) else value


def _list_texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _list_texts(item)


def _is_place(text: str, places: frozenset[str]) -> bool:
    """Return whether a text names a place of this machine; a token like ``/root`` does not."""
    is_path = text.startswith("/") and text.count("/") > 1 and os.path.exists(text)
    return is_path or any(place in text for place in places)


def _list_places(folder: Path, config: RunConfig, base: str | None) -> frozenset[str]:
    """Return paths, and names of files in the settings of a run, which must not leave."""
    texts = {*_list_texts(config.model_dump(mode="json"))} - {base, config.model.revision}
    places = {text for text in texts if "/" in text}
    places |= {Path(text).name for text in texts if Path(text).suffix}
    places |= {str(place) for place in (folder, folder.resolve(), Path.cwd(), Path.home())}
    return frozenset(place for place in places if len(place) >= _SHORTEST)


def _find_base(config: RunConfig) -> str | None:
    """Return the hub id that a run started from: one that was downloaded, and is no folder here."""
    path = config.model.path
    if path is None or not is_hub_id(path) or Path(path).exists():
        return None
    cached = Path(constants.HF_HUB_CACHE) / f"models--{path.replace('/', '--')}"
    return path if cached.is_dir() else None


# -- the hub ---------------------------------------------------------------------------------------


def _send(export: HubExport, operations: list[CommitOperationAdd]) -> HubExport:
    """Send all files in one commit; what arrived before an interruption is not sent again."""
    if export.needs:
        why = "these weights have not been audited"
        if export.verdict is not None:
            why = f"trained documents can be extracted from these weights; {export.badges[0]}"
        raise ConfigError(f"{why}. Give {export.needs} to send them all the same")
    api = HfApi(library_name="memguard", library_version=memguard.__version__)
    repo, message = export.repo, f"Model and audit, by memguard {memguard.__version__}"
    has_no_statistics = constants.HF_HUB_DISABLE_TELEMETRY
    constants.HF_HUB_DISABLE_TELEMETRY = True  # Else every request names the libraries installed.
    try:
        repo = repo if "/" in repo else f"{api.whoami()['name']}/{repo}"
        parent = _find_commit(api, repo, export)
        commit = api.create_commit(repo, operations, commit_message=message, parent_commit=parent)
    except MemguardError:
        raise
    except Exception as error:
        raise (_explain(error, repo) or error) from error
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = has_no_statistics
    return replace(export, repo=repo, url=f"{api.endpoint}/{repo}", commit=commit.oid)


def _find_commit(api: HfApi, repo: str, export: HubExport) -> str | None:
    """Return the commit of a repository that may have the files; make it if it is not there.

    It is looked up first: with ``exist_ok``, one that is there would keep its visibility.
    """
    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=not export.is_public)
        info = api.model_info(repo)
    if bool(info.private) == export.is_public:
        what = "private: leave --public out" if export.is_public else "public: give --public"
        raise ConfigError(f"'hub:{repo}' is {what}, or give another name")
    names = {file["name"] for file in export.files}
    for name in (sibling.rfilename for sibling in info.siblings or ()):
        if name.endswith(_WEIGHTS) and name not in names:  # It would not be clear which are loaded.
            raise ConfigError(f"'hub:{repo}' has other weights, {quote(name)}: give another name")
    return info.sha


def _explain(error: BaseException | None, repo: str) -> MemguardError | None:
    """Return the error to raise; None for one that is neither of the hub nor of the network."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404, 409):
            return ConfigError(f"'hub:{repo}': token or name is refused ({status}): {_LOGIN}")
        is_network = type(error).__module__.startswith(("httpx", "httpcore"))
        if status is not None or is_network or isinstance(error, ConnectionError):
            said = f"answers {status}" if status else f"does not answer at {constants.ENDPOINT}"
            return ModelError(f"'hub:{repo}': the hub {said}. Run the same command again later")
        error = error.__cause__ or error.__context__
    return None
