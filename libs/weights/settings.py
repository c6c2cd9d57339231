"""The one setting of an object store for versions."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

from leyden.libs.weights.store import WeightStore

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9]*)://(?P<rest>[^\s@?#]+)")


class StoreSettings(BaseModel):
    """Settings: where versions are published."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)

    weight_store: str | None = Field(default=None, validation_alias="LEYDEN_WEIGHT_STORE")
    """Object store to which trainers publish each version, as `s3://bucket/prefix` or another address of fsspec. Unset:
    none. Credentials and endpoint are those of the store's own client, such as `AWS_ACCESS_KEY_ID`, a workload identity
    and `AWS_ENDPOINT_URL`; an address that holds any is refused."""

    @field_validator("weight_store")
    @classmethod
    def _holds_no_credentials(cls, url: str | None) -> str | None:
        # The message shows no part of the address: it may be a secret.
        if url is not None and not _URL.fullmatch(url):
            raise ValueError(
                "should be an address such as s3://bucket/prefix, without user, password or query: give credentials in"
                " the variables of the store's own client, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        return url

    def open_weight_store(self) -> WeightStore | None:
        """The store; None where the setting is unset. Raises: StoreUnusable: its client is not installed"""
        return None if self.weight_store is None else WeightStore(self.weight_store)
