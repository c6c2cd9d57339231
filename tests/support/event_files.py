"""TensorBoard's event files as it reads them."""

from __future__ import annotations

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def shown(folder: Path) -> list[tuple[str, int, float]]:
    """The points in the order of the files, with a parser of its own, without checksums."""
    found = []
    for path in sorted(folder.glob("*tfevents*")):
        content, begin = path.read_bytes(), 0
        while begin + 8 <= len(content):
            (length,) = struct.unpack_from("<Q", content, begin)
            if begin + length + 16 > len(content):
                break
            event = Event.FromString(content[begin + 12 : begin + 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            begin += length + 16
    return found
