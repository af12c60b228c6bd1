"""Drives a headless Chromium over a pipe: real keys and clicks, any width, both themes, and pictures.

The DevTools protocol (https://chromedevtools.github.io/devtools-protocol/) as JSON, one message to a
zero byte, on the file descriptors 3 and 4 of `--remote-debugging-pipe`.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


def chromium() -> str:
    """The browser's path; without one the test is skipped, in CI it fails."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing = f"no Chromium found (looked for {', '.join(NAMES)}): nothing was drawn"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    return path


TIMEOUT = 60.0
KEYS = {
    "Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowUp": 38,
    "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "+": 187, "-": 189, "0": 48,
}  # fmt: skip
WITH_TEXT = {"Enter": "\r", " ": " ", "+": "+", "-": "-", "0": "0"}


class Browser:
    """One browser with one page."""

    def __init__(self, profile: Path) -> None:
        ours_out, theirs_in = os.pipe()[::-1]
        ours_in, theirs_out = os.pipe()
        # The shell moves the pipe's ends to the numbers that the browser expects.
        command = [chromium(), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.out, self.inn = ours_out, ours_in
        self.count, self.buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        self.session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.session = ""
            self.send("Browser.close")
        for end in (self.out, self.inn):
            os.close(end)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call one method and wait for its answer; what happens meanwhile is kept in `events`."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.events.append(answer)

    def open(
        self, page: Path, *, width: int = 1280, height: int = 800, dark: bool = False, at: str = "", wait: bool = True
    ) -> None:
        """Load a page in a window of that size, and wait until its charts are drawn.

        Args:
            at: what stands behind the address, such as "#verdict".
            wait: false for a file that is no page of ours.
        """
        self.resize(width, height)
        self.media(dark=dark)
        self.events.clear()
        self.send("Page.navigate", url=page.as_uri() + at)
        if not wait:
            return
        self.wait("document.readyState === 'complete' && document.documentElement.dataset.drawn !== undefined")

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, *, dark: bool = False, media: str = "") -> None:
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[theme])

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the page is loaded and the condition true: half a page may answer with an error, or nothing."""
        whole = f"document.readyState === 'complete' && document.body !== null && ({condition})"
        end = time.monotonic() + TIMEOUT
        while True:
            try:
                if self.run(whole):
                    return
                said = f"never true: {condition}"
            except AssertionError as error:
                said = f"{condition}: {error}"
            assert time.monotonic() < end, said
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key where the focus is."""
        common: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": WITH_TEXT[key]} if key in WITH_TEXT else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """A mouse click in the middle of the first element that matches."""
        at = self.run(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()")  # fmt: skip
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse from one point of the window to another."""
        steps = (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end))
        for kind, (x, y) in steps:
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def console(self) -> list[str]:
        """Everything that was written to the console or went wrong since the page was opened."""
        self.run("0")  # events before this answer have arrived
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"])[:500] for e in self.events if e.get("method") in kinds]

    def picture(self, path: Path, *, whole: bool = True) -> Path:
        """A PNG of the page, or of what is on the screen."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.inn], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self.inn, 1 << 16)
            assert piece, "the browser is gone"
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that is closed at the end, whatever happens."""
    opened = Browser(profile)
    try:
        yield opened
    finally:
        opened.close()
