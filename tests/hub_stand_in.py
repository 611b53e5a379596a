"""A hub of one user on this machine: it keeps what is committed and all that it receives."""

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml

TOKEN = "hf_notatoken"


@dataclass
class Repo:
    is_private: bool = True
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])


@dataclass
class HubStandIn:
    """State of the hub, and its requests: request line and headers, body."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    received: list[tuple[str, bytes]] = field(default_factory=list)
    answer: Callable[[str, str], int | None] = lambda method, path: None
    """Status to answer with instead; None answers as the hub does."""

    def list_texts(self) -> Iterator[bytes]:
        """Yield all that was received, with what was sent as base64 decoded."""
        for head, body in self.received:
            yield head.encode()
            yield body
            if "/preupload/" in head.split("\n")[0]:
                yield from (base64.b64decode(f["sample"]) for f in json.loads(body)["files"])
            if "/commit/" in head.split("\n")[0]:
                lines = map(json.loads, body.splitlines())
                values = (line["value"] for line in lines if line["key"] == "file")
                yield from (base64.b64decode(value["content"]) for value in values)

    def count(self, text: str) -> int:
        """Return the number of requests with a text in their first line."""
        return sum(text in head.split("\n")[0] for head, _ in self.received)

    def reply(self, method: str, path: str, head: str, body: bytes) -> tuple[int, Any]:
        """Return status and JSON."""
        repo_id = path.removeprefix("/api/models/").split(".git/")[0].strip("/")
        repo_id = "/".join(repo_id.split("/")[:2])
        repo = self.repos.get(repo_id)
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": "ada", "orgs": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or 'ada'}/{asked['name']}"
            self.repos[name] = Repo(is_private=asked.get("visibility") == "private")
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---")[1])
            return 200, {"errors": [], "warnings": []}
        if path.startswith("/objects/"):
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if repo is None:
            return 404, {"error": "Repository not found"}
        if "/preupload/" in path:
            return 200, {
                "files": [self._choose(repo, asked) for asked in json.loads(body)["files"]]
            }
        if path.endswith("/objects/batch"):
            return 200, {"objects": [self._allow(item) for item in json.loads(body)["objects"]]}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    repo.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    repo.files[value["path"]] = self.objects[value["oid"]]
            repo.commits.append(hashlib.sha1(body).hexdigest())
            return 200, {"commitOid": repo.commits[-1], "commitUrl": f"{self.url}/{repo_id}"}
        siblings = [{"rfilename": name} for name in repo.files]
        info = {"id": repo_id, "private": repo.is_private, "sha": repo.commits[-1]}
        return 200, {**info, "siblings": siblings}

    def _choose(self, repo: Repo, asked: dict[str, Any]) -> dict[str, Any]:
        is_large = asked["path"].endswith(".safetensors")
        content = repo.files.get(asked["path"])
        kind = "lfs" if is_large else "regular"
        chosen = {"path": asked["path"], "uploadMode": kind, "shouldIgnore": False}
        if content is not None:
            header = b"" if is_large else f"blob {len(content)}\0".encode()
            digest = hashlib.sha256 if is_large else hashlib.sha1
            chosen["oid"] = digest(header + content).hexdigest()
        return chosen

    def _allow(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["oid"] in self.objects:
            return dict(item)
        return {**item, "actions": {"upload": {"href": f"{self.url}/objects/{item['oid']}"}}}


@contextmanager
def serve_hub() -> Iterator[HubStandIn]:
    """Serve a hub without repositories until the block ends."""
    hub = HubStandIn()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, head = self.path.split("?")[0], f"{self.requestline}\n{self.headers}"
            hub.received.append((head, body))
            status = hub.answer(self.command, path)
            if status is None and TOKEN not in head and "validate-yaml" not in path:
                # The address of an object has the permission in it, and no token is sent there.
                status = None if path.startswith("/objects/") else 401
            code, values = (status, {}) if status else hub.reply(self.command, path, head, body)
            content = json.dumps(values).encode()
            self.send_response(code)
            if code == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            if code == 401:
                message = "Invalid credentials in Authorization header"
                self.send_header("X-Error-Message", message)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
