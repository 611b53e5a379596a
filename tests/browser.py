"""Open a page in Debian's Chromium, headless: console, requests, print, screenshots, axe-core.

    with Browser(folder) as browser:
        page = browser.open(path, width=390, height=844)
        page.check_quiet()                     no console message, no request besides files
        page.evaluate("innerWidth")            the value of an expression
        page.list_violations()                 what axe-core finds
        page.count_printed_pages()

Commands and events are those of the DevTools protocol, over a pipe: JSON that ends with a null
byte. One browser serves many pages, each in a tab of its own.
"""

import base64
import contextlib
import importlib.util
import json
import os
import re
import select
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = Path("/usr/bin/chromium")
"""Debian's package."""
AXE_PACKAGE = "axe_core_python"
"""Package that contains `axe.min.js`."""
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
OPEN = "for (const part of document.querySelectorAll('details')) part.open = true; 0"
"""Expression that opens what is closed."""
_CUT_TABLES = "document.querySelectorAll('tbody tr:nth-child(n+4)').forEach((row) => row.remove())"
_RUN_AXE = """
axe.run(document, {resultTypes: ["violations"], selectors: false})
  .then((result) => result.violations)
"""
_LIMIT_S = 60
_QUIET = ("warning", "error", "assert")


def find_axe() -> Path | None:
    """Return the path of axe-core; None if its package is not installed."""
    spec = importlib.util.find_spec(AXE_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("axe.min.js")
    return path if path.is_file() else None


@dataclass(eq=False)
class Page:
    """A page in a tab."""

    browser: "Browser"
    session: str
    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to this tab and return its result."""
        return self.browser.send(method, parameters, self.session)

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression; a promise is awaited.

        The page's content security policy does not apply to it.
        """
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def list_messages(self) -> list[str]:
        """Return warnings and errors of the console, and uncaught exceptions."""
        texts = []
        for event in self.events:
            method, given = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                texts.append(given["exceptionDetails"]["text"])
            elif method == "Log.entryAdded" and given["entry"]["level"] in _QUIET:
                texts.append(given["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and given["type"] in _QUIET:
                texts.append(str([value.get("value") for value in given["args"]]))
        return texts

    def list_requests(self) -> list[str]:
        """Return the addresses of requests other than that of the page itself."""
        addresses = [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        own = (self.path.as_uri(), "data:")
        return [address for address in addresses if not address.startswith(own)]

    def check_quiet(self) -> None:
        """Check that the page logs nothing and requests nothing."""
        # An answer to a later command comes after all events of the load.
        assert self.evaluate("document.readyState") == "complete"
        assert any(e["method"] == "Network.requestWillBeSent" for e in self.events), "is recorded"
        assert self.list_messages() == []
        assert self.list_requests() == []

    def list_violations(self, *impacts: str) -> list[str]:
        """Return what axe-core finds: rule, help and the first element of each.

        What is hidden is not checked, so closed parts are opened. The contrast of each text takes
        milliseconds, so only three rows of each table are checked.

        Args:
            *impacts: which to return; none: serious and critical.
        """
        axe = find_axe()
        assert axe is not None, f"needs {AXE_PACKAGE}"
        self.evaluate(OPEN)
        self.evaluate(_CUT_TABLES)
        self.evaluate(f"{axe.read_text(encoding='utf-8')};0")
        found = self.evaluate(_RUN_AXE)
        return [
            f"{violation['id']} ({violation['impact']}): {violation['help']}: "
            f"{violation['nodes'][0]['html'][:200]}"
            for violation in found
            if violation["impact"] in (impacts or ("serious", "critical"))
        ]

    def print_pdf(self) -> bytes:
        """Return the page as printed on the paper that its style asks for."""
        answer = self.send("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return base64.b64decode(answer["data"])

    def count_printed_pages(self) -> int:
        """Return the number of printed pages."""
        return len(re.findall(rb"/Type\s*/Page\b(?!s)", self.print_pdf()))

    def save_screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


class Browser:
    """Chromium, running until the end of a `with` block."""

    def __init__(self, folder: Path) -> None:
        """Prepare a browser whose profile is in ``folder``."""
        self._folder = folder
        self._pages: dict[str, Page] = {}
        self._buffer = b""
        self._number = 0

    def __enter__(self) -> Self:
        """Start it."""
        read_end, self._out = os.pipe()
        self._in, write_end = os.pipe()
        arguments = [str(CHROMIUM), *_OPTIONS, f"--user-data-dir={self._folder / 'profile'}"]
        # The browser reads commands from descriptor 3 and writes to 4.
        script = f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, *arguments],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it."""
        with contextlib.suppress(Exception):
            self.send("Browser.close", {})
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, path: Path, *, width: int = 1280, height: int = 800, dark: bool = False) -> Page:
        """Open a file on a screen of this size (CSS pixels) and wait until it has loaded."""
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(browser=self, session=attached["sessionId"], path=path)
        self._pages[page.session] = page
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        page.send("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + _LIMIT_S
        while not any(event["method"] == "Page.loadEventFired" for event in page.events):
            assert time.monotonic() < deadline, f"{path} did not load"
            self._take(self._receive())
        return page

    def send(
        self, method: str, parameters: dict[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._take(answer)

    def _take(self, message: dict[str, Any]) -> None:
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.events.append(message)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], _LIMIT_S)
            assert ready, "Chromium does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "Chromium ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message
