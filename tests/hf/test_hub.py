"""A hub that does not answer: one line at once, instead of five attempts with a warning each."""

import http.server
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from memguard.errors import ModelError
from memguard.hf.checkpoint import get_folder, load_config, load_tokenizer


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    # Another session of its HTTP client could remember the proxy of the environment.
    huggingface_hub.close_session()


@pytest.mark.parametrize("load", [load_config, load_tokenizer, lambda path: get_folder(path, None)])
def test_a_hub_that_does_not_answer_is_told_at_once(
    load: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Nothing listens on the port for discarded data.
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    assert callable(load)
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError) as caught:
        load("someone/model")
    message = str(caught.value)
    assert "someone/model" in message
    assert "it does not answer (" in message
    assert message.endswith(
        "Check the connection, or download the model elsewhere and give its folder"
    )
    assert "\n" not in message
    assert waited == [], "it was requested again"
    assert caplog.records == []


class NotFound(http.server.BaseHTTPRequestHandler):
    """Answers that there is no such file."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), NotFound) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_the_hub_answers_is_told_by_the_download(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, hub, tmp_path)
    with pytest.raises(ModelError, match="'someone/model' is not a local folder") as caught:
        load_config("someone/model")
    assert "does not answer" not in str(caught.value)
