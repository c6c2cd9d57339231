"""The tokens of a call on a rollout's page, by windows of a call of 200,000 tokens, with hostile texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from playwright.sync_api import expect

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.console.conftest import Insert
from tests.support import builders
from tests.support.browser import Visitor
from tests.support.long import long_only

SAMPLED = 200_000
# Tokens of the tiny model are bytes.
HOSTILE = "<b>\x1b[2J"


@long_only
def test_a_call_of_200_000_tokens_is_shown_by_windows(
    insert: Insert[str], open_page: Callable[[str], Visitor], tiny_model: Path
) -> None:
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode(HOSTILE, add_special_tokens=False).ids

    async def long_call(database: Database) -> str:
        run = await builders.add_run(database)
        await builders.add_policy_version(database, run, 0, path=str(tiny_model))
        group, [rollout, _] = await builders.add_group(database, run)
        sampled = np.resize(np.asarray(words), SAMPLED)
        logprobs = np.where(np.arange(SAMPLED) % 2, -0.01, -3.0)
        await builders.add_call(database, rollout, (40, 41, 42), sampled.tolist(), logprobs=logprobs.tolist())
        await builders.finish_rollout(database, rollout)
        await builders.add_credited_group(database, group)
        await builders.add_sample(database, rollout, (40, 41, 42), sampled.tolist(), advantage=-0.25)
        return rollout.id

    visitor = open_page(f"/rollouts/{insert(long_call)}")
    page = visitor.page
    page.get_by_text("Tokens", exact=True).click()
    tokens = page.get_by_role("group", name="Tokens")
    expect(tokens.locator("span.token")).to_have_count(500)
    expect(tokens).to_contain_text("<b>\\x1b[2J")
    expect(page.get_by_text(f"4 to 503 of {SAMPLED + 3:,}")).to_be_visible()
    tokens.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_text("token 5 ·")).to_contain_text(
        "log-probability -0.0100 · version 0 · trains with advantage −0.250"
    )
    assert visitor.violations() == []
    for overlay in ("advantage", "training"):
        page.get_by_label("Colour by").select_option(overlay)
    assert visitor.violations() == []
    page.get_by_role("button", name="To the end").click()
    expect(page.get_by_text(f"{SAMPLED + 3 - 499} to {SAMPLED + 3} of {SAMPLED + 3:,}")).to_be_visible()
    expect(tokens.locator("span.token")).to_have_count(500)
    page.get_by_role("button", name="From the prompt's begin").click()
    expect(tokens.locator("span.context")).to_have_count(3)
    assert page.locator("main b").count() == 0


def test_tokens_are_coloured_by_the_gap_between_trainer_and_engine_and_by_entropy(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def trained(database: Database) -> str:
        run = await builders.add_run(database)
        group, [rollout, _] = await builders.add_group(database, run)
        prompt, sampled = (40, 41), (50, 51, 52, 53, 54)
        await builders.add_call(database, rollout, prompt, sampled, logprobs=[-0.5] * 5)
        await builders.finish_rollout(database, rollout)
        await builders.add_credited_group(database, group)
        sample = await builders.add_sample(database, rollout, prompt, sampled)
        logprobs = np.asarray([-0.501, -0.55, -0.1, -2.5, np.nan], "<f4").tobytes()
        async with database.session() as session:
            moment = sample.created_at
            session.add(tables.Step(run_id=run.id, number=4, metrics={}, checkpoint="", started_at=moment))
            entropies = np.asarray([0.01, 0.3, 1.25, 3.0, np.nan], "<f4").tobytes()
            columns = {"trainer_logprobs": logprobs, "trainer_entropies": entropies}
            session.add(tables.StepSample(run_id=run.id, sample_id=sample.id, step=4, **columns))
        return rollout.id

    visitor = open_page(f"/rollouts/{insert(trained)}")
    page = visitor.page
    page.get_by_text("Tokens", exact=True).click()
    page.get_by_label("Colour by").select_option("gap")
    tokens = page.get_by_role("group", name="Tokens")
    expect(tokens.locator(".token")).to_have_count(5)
    for level in range(5):
        expect(tokens.locator(f".gap-{level}")).to_have_count(1)
    tokens.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_text("token 4 ·")).to_contain_text(
        "log-probability -0.5000 · version 0 · the trainer's -0.5500, by version 3"
        " · gap −0.050 · entropy 0.300 · trains"
    )
    page.keyboard.press("End")
    expect(page.get_by_text("token 7 ·")).not_to_contain_text(re.compile("gap|entropy"))
    page.get_by_label("Colour by").select_option("entropy")
    for level in range(5):
        expect(tokens.locator(f".entropy-{level}")).to_have_count(1)
    assert visitor.violations() == []


def test_tokens_are_coloured_by_the_version_that_sampled_each(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def swapped(database: Database) -> str:
        run = await builders.add_run(database)
        _, [rollout, _] = await builders.add_group(database, run)
        versions = np.asarray([3, 3, 4, 4], "<i4").tobytes()
        await builders.add_call(database, rollout, (40,), (50, 51, 52, 53), policy_versions=versions)
        await builders.finish_rollout(database, rollout)
        return rollout.id

    visitor = open_page(f"/rollouts/{insert(swapped)}")
    page = visitor.page
    page.get_by_text("Tokens", exact=True).click()
    page.get_by_label("Colour by").select_option("version")
    expect(page.locator("p > .token")).to_have_text(["version 3", "version 4"])
    tokens = page.get_by_role("group", name="Tokens")
    expect(tokens.locator(".version-3")).to_have_count(2)
    expect(tokens.locator(".version-0")).to_have_count(2)
    assert visitor.violations() == []
