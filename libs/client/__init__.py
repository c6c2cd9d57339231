"""A typed client of the REST API.

>>> with Leyden("http://127.0.0.1:8000", token) as leyden:  # doctest: +SKIP
...     leyden.upload_dataset("questions", Path("train.jsonl"))
...     run = leyden.create_run({"name": "first", "dataset": "questions", "agent": {"command": ["./agent"]}})
"""

from libs.client.client import Leyden
from libs.client.errors import Conflict, Forbidden, LeydenError, NotFound, Refused, Unauthorised, Unreachable

__all__ = ["Conflict", "Forbidden", "Leyden", "LeydenError", "NotFound", "Refused", "Unauthorised", "Unreachable"]
