"""Reads TensorBoard's event files: records of a length, its checksum, an ``Event``, its checksum."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["scalars", "values"]


def values(path: Path) -> Iterator[tuple[int, Any]]:
    """The step of each value in a file, and the value."""
    from tensorboardX.proto.event_pb2 import Event

    content = memoryview(path.read_bytes())
    while content:
        (length,) = struct.unpack_from("<Q", content)
        event = Event.FromString(bytes(content[12 : 12 + length]))
        yield from ((event.step, value) for value in event.summary.value)
        content = content[16 + length :]


def scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    """The numbers of each tag, with their steps."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step, value in values(path):
        if value.WhichOneof("value") == "simple_value":
            found.setdefault(value.tag, []).append((step, value.simple_value))
    return found
