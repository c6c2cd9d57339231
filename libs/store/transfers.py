"""Policy versions that a trainer sends to an engine over the network: the controller asks, the trainer says how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import TypeAdapter
from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert

from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session


class TensorShape(NamedTuple):
    """A tensor of a version; `dtype` is torch's name of its type, such as `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Sender:
    """How an engine joins the process group of a transfer, and the tensors in the order in which they are sent."""

    backend: Literal["gloo", "nccl"]
    address: str
    port: int
    tensors: tuple[TensorShape, ...]


@dataclass(frozen=True)
class WeightTransfer:
    """A version of a run on its way to one engine.

    `world_size` counts the processes of the group: the trainer, which is rank 0, and those of the engine.
    """

    engine_url: str
    run_id: str
    policy_version: int
    group_name: str
    world_size: int


_SENDER = TypeAdapter(Sender)


async def request_transfer(session: Session, transfer: WeightTransfer) -> None:
    """Asks the run's trainer to send. An earlier request for the same engine goes."""
    row = {**vars(transfer), "sender": None}
    statement = insert(tables.WeightTransfer).values(row)
    await session.execute(statement.on_conflict_do_update(index_elements=["engine_url"], set_=row))


async def open_transfers(session: ReadSession, run_id: str) -> list[WeightTransfer]:
    """The requests that the run's trainer has not accepted."""
    table = tables.WeightTransfer
    rows = await session.scalars(select(table).where(table.run_id == run_id, table.sender.is_(None)))
    fields = WeightTransfer.__dataclass_fields__
    return [WeightTransfer(**{name: getattr(row, name) for name in fields}) for row in rows]


async def accept_transfer(session: Session, transfer: WeightTransfer, sender: Sender) -> bool:
    """Writes how to join. False where nobody waits for it any more."""
    table = tables.WeightTransfer
    accepted = await session.execute(
        update(table)
        .where(table.group_name == transfer.group_name, table.sender.is_(None))
        .values(sender=_SENDER.dump_python(sender, mode="json"))
        .returning(table.engine_url)
    )
    return accepted.first() is not None


async def read_sender(session: ReadSession, transfer: WeightTransfer) -> Sender | None:
    """None until the trainer has accepted."""
    table = tables.WeightTransfer
    found = await session.scalar(select(table.sender).where(table.group_name == transfer.group_name))
    return None if found is None else _SENDER.validate_python(found)


async def end_transfer(session: Session, transfer: WeightTransfer) -> None:
    """Removes a request, whether it was accepted or not."""
    table = tables.WeightTransfer
    await session.execute(delete(table).where(table.group_name == transfer.group_name))
