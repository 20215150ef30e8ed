"""A real kernel of a notebook, for tests: runs cells as Jupyter does, and reacts to what they print."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

#: For cells that hang.
SECONDS = 180


@dataclass
class Ran:
    """What a cell has shown: the text of its streams, its displays with their updates, and its error."""

    out: str = ""
    err: str = ""
    shown: list[str] = field(default_factory=list)
    error: str = ""
    traceback: str = ""


@dataclass
class Kernel:
    """A kernel whose cells are run one after the other."""

    manager: KernelManager
    client: BlockingKernelClient

    def run(self, *lines: str, then: tuple[str, int, Callable[[], object]] | None = None) -> Ran:
        """Runs a cell; ``then``: calls a function as soon as the cell has printed a word so many times."""
        ran, waiting = Ran(), [then] if then else []

        def note(message: Mapping[str, Any]) -> None:
            content = message["content"]
            match message["msg_type"]:
                case "stream" if content["name"] == "stdout":
                    ran.out += content["text"]
                case "stream":
                    ran.err += content["text"]
                case "display_data" | "update_display_data":
                    ran.shown.append(content["data"]["text/plain"])
            if waiting and ran.out.count(waiting[0][0]) >= waiting[0][1]:
                waiting.pop()[2]()

        reply = self.client.execute_interactive("\n".join(lines), output_hook=note, timeout=SECONDS, allow_stdin=False)
        content = reply["content"]
        if content["status"] != "ok":
            ran.error, ran.traceback = content["ename"], "\n".join(content["traceback"])
        return ran


@contextmanager
def started_kernel() -> Iterator[Kernel]:
    """Starts a kernel, which is ended after the block."""
    manager = KernelManager(kernel_name="python3")
    # The kernel's own start is not choros': its warnings are no errors.
    manager.start_kernel(env={**os.environ, "PYTHONWARNINGS": "default"}, extra_arguments=["--log-level=ERROR"])
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=SECONDS)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
