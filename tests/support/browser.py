"""A headless Chromium that tests control over its DevTools protocol: keys, window size and color
scheme, JavaScript values, and console messages.
"""

import base64
import io
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image as pil
from PIL.Image import Image as Picture
from websockets.sync.client import ClientConnection, connect

OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
TIMEOUT_S = 30.0


class BrowserPage:
    """One tab of the browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._number = connection, 0
        self.console_messages: list[str] = []
        """Console messages and uncaught errors."""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            told = json.loads(self._connection.recv(timeout=TIMEOUT_S))
            if told.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.console_messages.append(json.dumps(told["params"])[:2000])
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                return told["result"]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression as JSON data."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Wait until the expression is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (expression, self.evaluate("document.body.innerText")[:3000], self.console_messages)
            time.sleep(0.05)

    def set_window(self, *, width: int, scheme: str = "light") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def navigate(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait_until("document.body?.dataset.shown")

    def take_screenshot(self) -> Picture:
        """Return the visible part of the page."""
        return pil.open(io.BytesIO(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])))

    def press_key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)


@contextmanager
def open_browser(program: str, profile_dir: Path) -> Iterator[BrowserPage]:
    chromium = subprocess.Popen([program, *OPTIONS, f"--user-data-dir={profile_dir}", "about:blank"], stderr=subprocess.DEVNULL)
    try:
        file, deadline = profile_dir / "DevToolsActivePort", time.monotonic() + TIMEOUT_S
        while not (file.is_file() and file.read_text().count("\n")):
            assert time.monotonic() < deadline and chromium.poll() is None, "the browser did not start"
            time.sleep(0.05)
        port = file.read_text().splitlines()[0]
        (tab, *_) = [each for each in httpx.get(f"http://127.0.0.1:{port}/json", trust_env=False).json() if each["type"] == "page"]
        with connect(tab["webSocketDebuggerUrl"], max_size=None, proxy=None) as connection:
            yield BrowserPage(connection)
    finally:
        chromium.terminate()
        chromium.wait(timeout=TIMEOUT_S)
