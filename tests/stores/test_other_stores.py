"""The contract of versions in a store of S3's kind, in those of Google's and Azure's."""

import pytest

from tests.contract.weights.test_store import (
    test_a_corrupt_manifest_is_refused_and_published_again,
    test_a_corrupt_object_is_refused_with_the_remedy,
    test_a_killed_publisher_leaves_no_version,
    test_a_missing_bucket_is_named,
    test_a_version_comes_back_as_it_was_published,
    test_other_weights_of_the_same_version_lie_beside_it,
)

# The clients warn: they send bytes in one piece, and the garbage collector closes their connections.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

__all__ = [
    "test_a_corrupt_manifest_is_refused_and_published_again",
    "test_a_corrupt_object_is_refused_with_the_remedy",
    "test_a_killed_publisher_leaves_no_version",
    "test_a_missing_bucket_is_named",
    "test_a_version_comes_back_as_it_was_published",
    "test_other_weights_of_the_same_version_lie_beside_it",
]
