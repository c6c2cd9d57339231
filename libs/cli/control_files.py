"""What other commands ask of a supervisor: an order is a file in the home, and its progress another.

Only the home's owner can write there. The supervisor looks ten times a second, takes the order's file away, and adds a
line to the progress at every stage, the last one `ended`; the command follows it and removes it.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from leyden.libs.cli.record import write_private

FOLDER = "orders"
LOOK_SECONDS = 0.05


class Order(BaseModel):
    """Services to replace, one after another."""

    model_config = ConfigDict(frozen=True)

    id: str
    services: list[str]


class Progress(BaseModel):
    """One stage of an order; `ended` is the last one and names no service."""

    model_config = ConfigDict(frozen=True)

    state: Literal["starting", "finishing", "done", "failed", "ended"]
    service: str = ""
    detail: str = ""


def place(home: Path, services: Sequence[str]) -> Order:
    """Asks the supervisor of a home to replace services."""
    order = Order(id=f"{time.time_ns():020d}-{secrets.token_hex(4)}", services=list(services))
    (home / FOLDER).mkdir(exist_ok=True, mode=0o700)
    _progress_file(home, order).touch(mode=0o600)
    write_private(home / FOLDER / f"{order.id}.json", order.model_dump_json())
    return order


def follow(home: Path, order: Order, lives: Callable[[], bool]) -> Iterator[Progress]:
    """Every stage as it comes, without `ended`, until the order has ended or the supervisor has gone.

    Raises: EOFError: the supervisor ended before the order did
    """
    path = _progress_file(home, order)
    try:
        with path.open() as file:
            while True:
                alive = lives()
                if line := file.readline():
                    progress = Progress.model_validate_json(line)
                    if progress.state == "ended":
                        return
                    yield progress
                elif not alive or not path.exists():
                    raise EOFError("the platform ended before the order did")
                else:
                    time.sleep(LOOK_SECONDS)
    finally:
        path.unlink(missing_ok=True)


def clear(home: Path) -> None:
    """Forgets what was asked of a supervisor before."""
    shutil.rmtree(home / FOLDER, ignore_errors=True)
    (home / FOLDER).mkdir(mode=0o700)


def take(home: Path) -> Order | None:
    """The oldest order, taken away; None when there is none."""
    for path in sorted((home / FOLDER).glob("[0-9]*.json")):
        text = path.read_bytes()
        path.unlink()
        try:
            return Order.model_validate_json(text)
        except ValidationError:
            # Of another version, and of nobody who waits.
            continue
    return None


def tell(home: Path, order: Order, progress: Progress) -> None:
    """Adds a stage, for whoever follows."""
    with _progress_file(home, order).open("a") as file:
        file.write(progress.model_dump_json() + "\n")


def _progress_file(home: Path, order: Order) -> Path:
    return home / FOLDER / f"{order.id}.progress"
