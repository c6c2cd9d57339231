"""A run on one machine whose versions travel by an object store: from the trainer to the engine, and to users."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from leyden.libs.client import Client
from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.weights import WeightStore
from leyden.services.controller.fetcher.app import create_fetcher_app
from leyden.services.controller.fetcher.settings import Settings
from tests.campaigns.soak import QUICK, bandit_run, small_platform
from tests.fakes.served import served
from tests.invariants import violations
from tests.support.long import long_only
from tests.support.object_store import STORE
from tests.support.waiting import until


@long_only
@pytest.mark.timeout(900)
def test_a_run_trains_by_way_of_a_store_and_its_versions_are_downloaded_from_there(
    bucket: dict[str, str], tmp_path: Path, received: Path
) -> None:
    node = tmp_path / "node"
    with served(create_fetcher_app(Settings(folder=node))) as fetcher:
        port = str(urlsplit(fetcher).port)
        with (
            small_platform(tmp_path, CONTROLLER_FETCHER_PORT=port, **bucket) as platform,
            Client(platform.facts.url("api"), platform.token, patience_seconds=60) as client,
        ):
            client.upload_dataset("bandit", [{"number": number} for number in range(16)])
            run = client.create_run(bandit_run(received, "bandit", 3, **QUICK))
            until(lambda: client.run(run.id).phase in {"completed", "failed"}, "the end of the run")
            assert (client.run(run.id).phase, client.run(run.id).reason) == ("completed", None)
            versions = [one for one in client.policies(run.id) if one.pruned_at is None and one.version]
            assert {(one.version, one.content_sha256) for one in versions} == {
                (key.version, key.content_sha256) for key in WeightStore(STORE).versions(run.id)
            }
            # The engine loaded what the fetcher read.
            loaded = {int(one.name.split("-")[2]) for one in node.iterdir() if one.is_dir()}
            assert loaded >= {1, 2}
            assert violations(platform.facts.database_url, run.id) == {}
            last = versions[-1]
            shutil.rmtree(last.path)
            client.download_version(run.id, last.version, tmp_path / "got")
            assert weights_sha256(tmp_path / "got") == last.content_sha256
