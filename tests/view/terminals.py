"""A real terminal, for tests: tmux, whose screen can be read."""

import os
import shutil
import subprocess
import time
import uuid

import pytest

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux, Debian's package, is not installed")


class Terminal:
    """A window of tmux in which a shell runs ``script``; ``env``: more variables."""

    def __init__(self, script, width=100, height=30, env=None):
        self._server = f"choros-test-{uuid.uuid4().hex[:12]}"
        given = {"TERM": "screen-256color", **(env or {})}
        environ = {name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR")}
        size = ("-x", str(width), "-y", str(height))
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "sh", "-c", script, env={**environ, **given})

    def _tmux(self, *arguments, env=None):
        command = ["tmux", "-L", self._server, *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout

    @property
    def screen(self):
        """What it shows."""
        return self._tmux("capture-pane", "-p")

    def state(self, *names):
        """Values of tmux's variables."""
        return self._tmux("display-message", "-p", " ".join(f"#{{{name}}}" for name in names)).split()

    def wait_for(self, *texts, without="no such text", seconds=90):
        """Waits until it shows all of ``texts``, and not the one ``without``; returns the screen."""
        end = time.monotonic() + seconds
        while not all(text in (screen := self.screen) for text in texts) or without in screen:
            assert time.monotonic() < end, f"not {texts} in:\n{screen}"
            time.sleep(0.1)
        return screen

    def press(self, key):
        self._tmux("send-keys", key)

    def resize(self, width, height):
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def close(self):
        """Closes it, as a user closes a window."""
        subprocess.run(["tmux", "-L", self._server, "kill-server"], capture_output=True, check=False, timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
