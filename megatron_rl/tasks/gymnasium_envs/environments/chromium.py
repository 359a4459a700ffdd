"""Headless Chromium that is controlled over pipes with the Chrome DevTools Protocol.

No port is opened, and Chromium ends when the process that started it ends, even by SIGKILL: the
pipe is closed, and the kernel sends SIGKILL (PR_SET_PDEATHSIG). Waiting has no limit of its own:
the process that runs an environment has one (task.options.step_timeout_s).
"""

import base64
import ctypes
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
from PIL import Image

from megatron_rl.tasks.process_server import PR_SET_PDEATHSIG

COMMANDS_FD, ANSWERS_FD = 3, 4
"""File descriptors at which Chromium expects its pipes (--remote-debugging-pipe)."""
EXIT_TIMEOUT_S = 10
"""Maximum time in seconds that Chromium's killed processes may need to exit."""
NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe")
# Pages are local files; nothing else is looked up.
OFFLINE = ("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND")
KEY_CODES = {"Enter": 13, "Tab": 9, "Backspace": 8, "Delete": 46, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
KEY_TEXTS = {"Enter": "\r", "Tab": "\t"}


class ChromiumPage:
    """One page of a Chromium process of its own."""

    def __init__(self, *, width: int, height: int) -> None:
        """Start Chromium with an empty page.

        Raises:
            ValueError: Chromium is not installed.
        """
        binary = next(filter(None, map(shutil.which, NAMES)), None)
        if binary is None:
            raise ValueError(f"needs Chromium, but none of {', '.join(NAMES)} is in PATH; Debian: apt-get install chromium")
        self._profile = tempfile.TemporaryDirectory(prefix="chromium_", ignore_cleanup_errors=True)
        self._process, self._commands, self._answers = _start([binary, *OPTIONS, *OFFLINE, f"--user-data-dir={self._profile.name}"])
        self._number, self._session, self._has_loaded = 0, "", False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        """Load a page and wait until it has loaded."""
        self._has_loaded = False
        error = self._call("Page.navigate", url=url).get("errorText")
        if error:
            raise OSError(f"{url}: {error}")
        while not self._has_loaded:
            self._read()

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, which must be storable as JSON."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"JavaScript: {answer['exceptionDetails']['text']} in {script}")
        return answer["result"].get("value")

    def click(self, x: float, y: float, *, count: int = 1) -> None:
        """Move the mouse to a point and click `count` times."""
        self.move(x, y)
        for number in range(1, count + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=number)

    def drag(self, start: tuple[float, float], stop: tuple[float, float], *, num_moves: int = 8) -> None:
        """Press the mouse at one point, move it in a straight line, and release it at another."""
        self.move(*start)
        self._call("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], button="left", clickCount=1)
        for number in range(1, num_moves + 1):
            x, y = (first + (last - first) * number / num_moves for first, last in zip(start, stop, strict=True))
            self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1)
        self._call("Input.dispatchMouseEvent", type="mouseReleased", x=stop[0], y=stop[1], button="left", clickCount=1)

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a point."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type_text(self, text: str) -> None:
        """Type characters into the element that has the focus."""
        for character in text:
            self._call("Input.dispatchKeyEvent", type="keyDown", key=character, text=character)
            self._call("Input.dispatchKeyEvent", type="keyUp", key=character)

    def press(self, key: str) -> None:
        """Press and release a key of KEY_CODES."""
        names = {"key": key, "code": key, "windowsVirtualKeyCode": KEY_CODES[key]}
        text = {"text": KEY_TEXTS[key]} if key in KEY_TEXTS else {}
        self._call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **names, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **names)

    def screenshot(self) -> np.ndarray:
        """Return the page as an array of uint8 (height, width, 3)."""
        png = base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])
        return np.array(Image.open(io.BytesIO(png)).convert("RGB"))

    def close(self) -> None:
        """End Chromium, with all processes that write to its profile, and remove the profile."""
        if self._process.poll() is None:
            browser = psutil.Process(self._process.pid)
            everyone = [browser, *browser.children(recursive=True)]
            for each in everyone:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            self._process.wait()
            psutil.wait_procs(everyone, timeout=EXIT_TIMEOUT_S)
        self._commands.close()
        self._answers.close()
        self._profile.cleanup()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(method, params)
        while True:
            message = self._read()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps({"id": self._number, "method": method, "params": params, **session}).encode() + b"\0")
        self._commands.flush()
        return self._number

    def _read(self) -> dict[str, Any]:
        """Read one message; note that a page has loaded, and close dialogs, which block scripts."""
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise OSError(f"Chromium ended with exit code {self._process.wait()}")
            text += byte
        message = json.loads(text)
        if message.get("method") == "Page.loadEventFired":
            self._has_loaded = True
        if message.get("method") == "Page.javascriptDialogOpening":
            self._send("Page.handleJavaScriptDialog", {"accept": True})
        return message


def _start(command: list[str]) -> tuple[subprocess.Popen[bytes], Any, Any]:
    """Start a process with the two pipes; return it, the file of commands and that of answers."""
    (commands_in, commands_out), (answers_in, answers_out) = os.pipe(), os.pipe()
    # The numbers of the copies differ from COMMANDS_FD and ANSWERS_FD, which may be in use here.
    theirs = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (commands_in, answers_out)]

    def prepare() -> None:
        os.dup2(theirs[0], COMMANDS_FD)
        os.dup2(theirs[1], ANSWERS_FD)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        process = subprocess.Popen(  # the process that runs an environment has one thread
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=prepare
        )
    finally:
        for each in (commands_in, answers_out, *theirs):
            os.close(each)
    return process, os.fdopen(commands_out, "wb"), os.fdopen(answers_in, "rb")
