"""A real browser, Chromium, without a window: it is sent messages of its protocol over a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """Shows one page; ``to`` and ``of`` are the ends of pipes."""

    def __init__(self, to: BinaryIO, of: BinaryIO) -> None:
        self._to, self._of = to, of
        self._number, self._rest, self._session = 0, b"", ""
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Network.enable")

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Asks the browser for something, and returns its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        message |= {"sessionId": self._session} if self._session else {}
        self._to.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._of.read(1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        text, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])
        return message

    def show(self, file: Path, width: int, *, scheme: str = "light", medium: str = "screen") -> None:
        """Shows a file on a screen of this width."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=medium, features=[feature])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Page.navigate", url=file.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def picture(self, file: Path) -> None:
        """Writes what the page looks like, as PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(taken))


@contextmanager
def browser() -> Iterator[Browser]:
    """A block with a browser, which is ended after it."""
    (to_read, to), (of, of_write) = os.pipe(), os.pipe()
    # The browser reads its descriptor 3 and writes 4.
    script = f'exec "$@" 3<&{to_read} 4>&{of_write}'
    with TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={directory}",
        ]
        command = ["bash", "-c", script, "bash", str(CHROMIUM), *flags]
        nothing = subprocess.DEVNULL
        pipes = (to_read, of_write)
        process = subprocess.Popen(command, pass_fds=pipes, stdin=nothing, stdout=nothing, stderr=nothing)
        os.close(to_read)
        os.close(of_write)
        try:
            with os.fdopen(to, "wb", buffering=0) as sent, os.fdopen(of, "rb", buffering=0) as received:
                shown = Browser(sent, received)
                yield shown
                shown.call("Browser.close")
        finally:
            process.kill()
            process.wait()
