"""Datasets and their tasks."""

from __future__ import annotations

from datetime import datetime

from leyden.libs.contracts.api.body import Body
from leyden.libs.contracts.conversation import Json


class Dataset(Body):
    """A named, immutable list of tasks."""

    id: str
    name: str
    content_sha256: str
    task_count: int
    created_at: datetime


class Task(Body):
    """One row of a dataset."""

    dataset_id: str
    number: int
    """Position in the upload, from 0."""
    payload: Json
