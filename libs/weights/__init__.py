"""Policy versions in an object store, and a folder of a node that holds those which its engines load.

The trainer publishes (`store`), the fetcher beside an engine reads each version once for its node (`cache`), and the
API streams from the store. `leyden[object-store]` brings the client of S3; other stores need a package of their own for
fsspec.
"""

from leyden.libs.weights.settings import StoreSettings
from leyden.libs.weights.store import Damaged, NotPublished, StoredFile, StoreUnusable, VersionKey, WeightStore

__all__ = [
    "Damaged",
    "NotPublished",
    "StoreSettings",
    "StoreUnusable",
    "StoredFile",
    "VersionKey",
    "WeightStore",
]
