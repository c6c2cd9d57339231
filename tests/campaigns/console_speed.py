"""`make bench-console`: the times of the console's pages for a run of 10,000 rollouts.

Prints medians of five fresh visits in headless Chromium, beside the processes that it measures: the first paint, and
the moment at which the page's own data stood on it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import psycopg
from playwright.sync_api import Browser

from leyden.libs.cli.view.console_link import console_link
from leyden.libs.client import Client
from leyden.libs.embedded.servers import EmbeddedPostgres
from leyden.libs.store.database import Database
from leyden.libs.store.migrate import migrate
from tests.contract.console.test_rollout_list import GROUPS, ROLLOUTS, SIBLINGS, add_many
from tests.fakes.served_api import TOKEN, served_api
from tests.support import builders
from tests.support.browser import running_browser

VISITS = 5
STEPS = GROUPS // 10
# Ten groups a step, two calls a rollout, a sample each. Nine of ten rollouts call search, the others open. Rewards come
# from outside.
REST = """
    SET session_replication_role = replica;
    INSERT INTO steps (run_id, number, metrics, checkpoint, started_at, created_at)
        SELECT :run, n, jsonb_build_object('computed_tokens', 9, 'trainable_tokens', 9, 'trained_tokens', 9,
            'loss', 1.0 / n,
            'entropy', 2.0 / n, 'gradient_norm', 1, 'clipped_share', 0.1, 'masked_share', 0, 'policy_lag_mean', 1,
            'policy_lag_max', 2, 'effective_sample_share', 0.9, 'logprob_gap_mean', 0.01, 'logprob_gap_max', 0.1,
            'load_seconds', 1, 'gradients_seconds', 5, 'optimizer_seconds', 1, 'export_seconds', 1, 'step_seconds', 9),
            '', now() + n * interval '1 minute', now() + n * interval '1 minute 9 seconds'
        FROM generate_series(1, :steps) n;
    INSERT INTO step_groups (group_id, run_id, step, verdict)
        SELECT id, run_id, 1 + number / 10, 'trained' FROM groups;
    INSERT INTO group_credits (group_id, run_id, verdict, credit_version, counted_siblings, has_variance, reward_mean,
        reward_std, calls)
        SELECT id, run_id, 'credited', 1, size, true, 0.5, 0.5,
            '{"calls": 16, "tools": {"search": {"ok": 9, "error": 7}}}' FROM groups;
    INSERT INTO attempts (rollout_id, number, run_id, state, lease_id, owner, lease_expires_at, started_at, finished_at)
        SELECT id, 1, run_id, 'settled', id, 'o', now(), created_at, created_at + interval '9 seconds' FROM rollouts;
    INSERT INTO model_calls (run_id, id, rollout_id, attempt, request_id, choice, sequence, status, trainable,
        request_sha256, dialect, request, turns, answer, prompt_ids, sampled_ids, generator_logprobs, policy_versions,
        prompt_tokens, completion_tokens, cached_tokens, temperature, finish_reason, queued_seconds, total_seconds)
        SELECT run_id, id || c, id, 1, id || c, 0, c, 'completed', true, '', 'chat_completions', '{}',
            jsonb_build_array(jsonb_build_object('role', 'user', 'content', repeat('question ', 100))),
            jsonb_build_object('role', 'assistant', 'content', repeat('thinking ', 60), 'tool_calls', jsonb_build_array(
                jsonb_build_object('id', '1', 'arguments', '{}', 'name',
                    CASE hashtext(id) % 10 WHEN 0 THEN 'open' ELSE 'search' END))),
            repeat('0123456789', 40)::bytea, repeat('0123456789', 20)::bytea, repeat('0123456789', 20)::bytea,
            repeat('0123456789', 20)::bytea, 100, 50, 60, 1, 'stop', 0, 1
        FROM rollouts, generate_series(1, 2) c;
    INSERT INTO external_rewards (rollout_id, key, name, value) SELECT id, 'k', 'score', 0.5 FROM rollouts;
    ANALYZE
"""
PAGES = {
    "run, overview": ("", "section[aria-label=Cost] canvas"),
    "run, rollouts": ("/rollouts", "[aria-label=Rollouts] tbody tr"),
    "run, rollouts with a filter": ("/rollouts?reward_min=500&sort=highest", "[aria-label=Rollouts] tbody tr"),
    "run, rollouts by tool": ("/rollouts?tool=open", "[aria-label=Rollouts] tbody tr"),
    "run, rollouts by cause": ("/rollouts?cause=agent_error", "[aria-label=Rollouts] tbody tr"),
    "run, tasks": ("/tasks", "[aria-label=Tasks] tbody tr"),
}
"""The rest of the address, and what stands on the page once its data do."""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    """Fills a database of its own, and prints a table."""
    with tempfile.TemporaryDirectory(prefix="leyden-console-") as folder:
        server = EmbeddedPostgres(Path(folder) / "postgres", durable=False)
        try:
            dsn = server.start()
            migrate(dsn)
            run = asyncio.run(_filled(dsn))
            with served_api(dsn) as url, running_browser() as browser, Client(url, TOKEN) as client:
                print(f"{ROLLOUTS:,} rollouts, {SIBLINGS} a group, {STEPS} steps; milliseconds, medians of {VISITS}")
                for name, (rest, selector) in PAGES.items():
                    visits = [
                        _visit(browser, console_link(client, url, f"/runs/{run}{rest}"), selector)
                        for _ in range(VISITS)
                    ]
                    print(f"{name}: first paint {_median(visits, 'paint'):.0f}, data {_median(visits, 'data'):.0f}")
        finally:
            server.stop()


async def _filled(dsn: str) -> str:
    database = Database(dsn)
    try:
        runner = {"type": "process", "stdout_reward": False}
        run = await builders.add_run(database, config=builders.run_document(runner=runner))
    finally:
        await database.close()
    add_many(dsn, run.id)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in REST.replace(":run", f"'{run.id}'").replace(":steps", str(STEPS)).split(";"):
            connection.execute(statement.encode())
    return run.id


def _visit(browser: Browser, link: str, selector: str) -> Mapping[str, float]:
    """Milliseconds from the address to the first paint, and to the data; sign-in included."""
    with browser.new_context() as context:
        page = context.new_page()
        began = time.perf_counter()
        page.goto(link)
        page.locator(selector).first.wait_for()
        return {"data": 1000 * (time.perf_counter() - began), "paint": page.evaluate(PAINT)}


def _median(visits: list[Mapping[str, float]], name: str) -> float:
    return median(one[name] for one in visits)


if __name__ == "__main__":
    main()
