"""The base of every part of a run's document, and the texts and amounts that several parts share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

Word = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]
FolderPath = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]

Argument = Annotated[str, Field(max_length=100_000, pattern=r"^[^\x00]*$")]
"""A word of a command or a value of its environment; Linux limits one to 128 KiB."""
PoolName = Annotated[str, Field(max_length=30, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
"""A pool of engines. Objects of Kubernetes have it in their names."""
DEFAULT_POOL = "default"

_TRANSPORTS = frozenset(
    {"containers-storage", "dir", "docker-archive", "docker-daemon", "oci", "oci-archive", "ostree", "sif", "tarball"}
)
_COLONS = re.compile(r"([^/:]+:[0-9]+/)?[^:]+(:[^/:]+)?")
"""Those of a name: before a port and before a tag."""


def _is_of_registry(image: str) -> str:
    name = image.partition("@")[0]
    first, colon, _ = name.partition(":")
    if (colon and first in _TRANSPORTS) or not _COLONS.fullmatch(name):
        raise ValueError(
            f"image {image!r} names a place other than a registry, such as podman's `oci-archive:` or `dir:`: load it"
            " first (podman load), and write its name as registry/name:tag"
        )
    return image


ImageName = Annotated[
    str,
    Field(max_length=500, pattern=r"^[a-z0-9][a-zA-Z0-9._/:-]*(@sha256:[0-9a-f]{64})?$"),
    AfterValidator(_is_of_registry),
]


def _is_pinned(image: str) -> str:
    if "@" not in image and image.rpartition("/")[2].partition(":")[2] in {"", "latest"}:
        raise ValueError(f"image {image!r} may change during a run: name a tag other than latest, or a digest")
    return image


PinnedImage = Annotated[ImageName, AfterValidator(_is_pinned)]
"""An image that stays the same."""
Quantity = Annotated[str, Field(pattern=r"^[0-9]{1,15}(\.[0-9]{1,9})?(m|k|[MGTPE]|[KMGTPE]i)?$")]
"""A Kubernetes quantity, such as `500m` or `2Gi`."""
LabelName = Annotated[str, Field(max_length=317, pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,62})$")]


class Document(BaseModel):
    # Strict: no text in place of a number, and no boolean either.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


class BrokenDocument(ValueError):
    """A stored document that does not parse, as one of another version; the message, one line, has its first wrong
    field.

    Readers of many documents take it as a value in place of the document: it is the reason why one of them has none.
    """

    @classmethod
    def of(cls, error: ValidationError, *path: str) -> BrokenDocument:
        """Args: path: of the parsed part in the whole document"""
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(map(str, (*path, *first["loc"])))
        return cls(f"the stored document does not parse: {field}: {first['msg']}")


def stored_object(document: object) -> Mapping[str, Any]:
    """Returns a stored run's document, of which a reader wants a part.

    Raises: BrokenDocument: it is no object
    """
    if not isinstance(document, Mapping):
        raise BrokenDocument(f"the stored document does not parse: it is no object but a {type(document).__name__}")
    return document


class Resources(Document):
    """Quantities by resource name, such as `{"cpu": "500m", "memory": "1Gi"}`."""

    requests: dict[LabelName, Quantity] = Field(default_factory=dict, max_length=20)
    limits: dict[LabelName, Quantity] = Field(default_factory=dict, max_length=20)
