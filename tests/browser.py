"""Headless Chromium, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """A browser with one page; what the page says on its console, throws or asks of a network is kept."""

    def __init__(self) -> None:
        assert CHROMIUM
        self._folder = tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True)
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        command = [
            CHROMIUM,
            *_OPTIONS,
            f"--user-data-dir={self._folder.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        redirected = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "browser", *command],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._number, self._rest = 0, b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        end_s = time.monotonic() + 60
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0, end_s - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, "the browser has ended" if ready else "the browser does not answer"
            self._rest += data
        first, self._rest = self._rest.split(b"\0", 1)
        return json.loads(first)

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file and waits until it is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())
        self.wait("document.documentElement.dataset.painted !== undefined")

    def value(self, expression: str) -> Any:
        """What a script's expression is."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> None:
        """Until the expression is true."""
        end_s = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end_s, expression
            time.sleep(0.02)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """A PNG of the page, or of what is in view."""
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])
        )

    def complaints(self) -> list[Any]:
        """Errors and warnings of the page, and requests of it other than the page itself and data."""
        self.value("0")
        found: list[Any] = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(parameters)
            if method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(parameters)
            if method == "Network.requestWillBeSent" and parameters["documentURL"] != parameters["request"]["url"]:
                found.append(parameters["request"]["url"])
        return found
