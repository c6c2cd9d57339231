"""The tools of a rollout: spans of its telemetry, and what the gateway embedded."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.contracts.states import GATEWAY_SCOPE
from leyden.libs.store.database import Database
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor


def test_a_rollout_shows_its_tools_and_the_texts_that_were_embedded(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def searched(database: Database) -> str:
        run = await builders.add_run(database)
        _, [rollout, _] = await builders.add_group(database, run)
        facts = {
            "gen_ai.request.model": "asked",
            "gen_ai.response.model": "small",
            "gen_ai.embeddings.dimension.count": 256,
            "leyden.embeddings.inputs": 2,
            "leyden.embeddings.texts": [HOSTILE, "second"],
        }
        await builders.add_tool_span(database, rollout, HOSTILE, status="error", error_type="ValueError")
        await builders.add_tool_span(database, rollout, "embeddings", scope=GATEWAY_SCOPE, attributes=facts)
        await builders.finish_rollout(database, rollout, reward=1.0)
        return rollout.id

    visitor = open_page(f"/rollouts/{insert(searched)}")
    table = visitor.page.get_by_role("region", name="Tools", exact=True).locator("tbody tr")
    expect(table).to_have_count(2)
    failed, embedded = (row.locator("th, td").all_inner_texts() for row in table.all())
    assert (failed[0], failed[1]) == (SHOWN, "error ValueError")
    assert embedded[:2] == ["embeddings", "ok"]
    assert embedded[3].startswith("2 inputs · 256 dimensions · small")
    visitor.page.get_by_text("Texts", exact=True).click()
    expect(visitor.page.get_by_text("second", exact=True)).to_be_visible()
    assert visitor.violations() == []
