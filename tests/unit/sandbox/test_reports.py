"""Reading a supervisor's report under uvloop, which runners use."""

from __future__ import annotations

import asyncio
import os
import socket

import uvloop

from leyden.libs.sandbox import supervisors as supervising


class Watched(socket.socket):
    """Notes every close of a descriptor that is closed already: by then it may be another thread's."""

    late_closes = 0

    def close(self) -> None:
        try:
            if self.fileno() >= 0:
                os.fstat(self.fileno())
        except OSError:
            self.late_closes += 1
        super().close()


def test_the_descriptor_of_a_report_is_closed_once() -> None:
    ours, supervisors = socket.socketpair()
    watched = Watched(fileno=ours.detach())
    descriptor = watched.fileno()
    supervisors.send(b"report")
    supervisors.close()

    async def read() -> bytes:
        report = await supervising._read_all(watched)
        # uvloop closes in a later round of its loop.
        while descriptor_is_open(descriptor):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return report

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(read()) == b"report"
    watched.close()
    assert watched.late_closes == 0


def descriptor_is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
