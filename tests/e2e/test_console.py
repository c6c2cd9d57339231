"""The console in a real browser on a platform that trained: curves, rewards with their parts, and hostile texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser, Page, expect
from rich.console import Console

from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.console_link import console_link
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run
from tests.support.browser import Visitor, running_browser
from tests.support.shared import ROOT

STEPS = 2
LONG = 50_000
HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\x1b[2J\u202eevil"
SHOWN = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\\x1b[2J\\u202eevil"
REWARD = {
    "components": [
        {
            "name": "right",
            "weight": 0.6,
            "grader": {"type": "token_f1", "output": "{output.answer}", "reference": "{task.answer}"},
        },
        {"name": "words", "weight": 0, "grader": {"type": "length", "at_most": 8}},
    ]
}


@pytest.fixture
def run(client: Client) -> Run:
    """A run that has ended, whose tasks, messages and output are hostile; one for all tests."""
    if (earlier := next(client.runs(name="hostile"), None)) is not None:
        return earlier
    tasks: list[dict[str, Any]] = [{"number": number, "answer": "odd", "text": HOSTILE} for number in range(4)]
    client.upload_dataset("hostile", [{**task, "long": "y" * LONG} for task in tasks])
    program = ROOT / "tests" / "agents" / "hostile.py"
    document = {
        "name": "hostile",
        "dataset": "hostile",
        "agent": {"command": ["{python}", "-I", "-S", str(program)], "environment": {"HOSTILE": HOSTILE}},
        "sampling": {"group_size": 8, "groups_per_step": 1},
        "training": {"steps": STEPS},
        "evaluation": {"dataset": "hostile", "rollouts_per_task": 2},
        "reward": REWARD,
    }
    ended = watch_run(client, client.create_run(document).id, Console(quiet=True))
    assert (ended.phase, ended.progress.step) == ("completed", STEPS)
    return ended


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as started:
        yield started


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    with browser.new_context() as context:
        yield Visitor(context.new_page())


def test_a_link_leads_to_the_curve_and_to_the_parts_of_a_reward(
    visitor: Visitor, client: Client, platform: Platform, run: Run
) -> None:
    page = visitor.page
    page.goto(console_link(client, platform.facts.url("api")))
    row = page.get_by_role("row").filter(has_text="hostile")
    assert run.progress.reward_mean is not None
    expect(row).to_contain_text(f"{STEPS} / {STEPS}")
    expect(row).to_contain_text(f"{run.progress.reward_mean:.3f}")
    assert "sign-in" not in page.url and visitor.violations() == []

    row.get_by_role("link").focus()
    page.keyboard.press("Enter")
    steps = list(client.steps(run.id))
    curve = page.get_by_role("img", name="Mean reward in training")
    expect(curve).to_have_attribute("aria-label", re.compile(f"{steps[-1].reward_mean:.3f} at step {STEPS}$"))
    expect(curve.locator("canvas")).to_be_visible()
    expect(page.get_by_role("img", name="Mean reward of held-out tasks")).to_be_visible()
    assert visitor.violations() == []
    page.get_by_role("link", name="Rollouts").click()
    evaluation = max(client.evaluations(run.id), key=lambda one: one.number)
    page.get_by_label("Of", exact=True).select_option(f"held-out tasks, version {STEPS}")
    expect(page.get_by_text("held out", exact=False)).to_have_count(evaluation.results.rollouts["finished"])
    page.get_by_label("Of", exact=True).select_option("training")

    rollout = client.rollout(next(iter(client.rollouts(run=run.id, step=STEPS))).id)
    page.get_by_role("link", name=rollout.id, exact=True).click()
    right = rollout.components[0]
    assert right.value is not None
    expect(page.get_by_role("row").filter(has_text="right")).to_contain_text(f"+{right.value * right.weight:.3f}")
    expect(page.get_by_role("row", name=re.compile("^reward"))).to_contain_text(f"{rollout.reward:.3f}")
    siblings = list(client.rollouts(group=rollout.group_id))
    expect(page.get_by_role("listitem").filter(has_text=re.compile(r"^\d+ \d"))).to_have_count(len(siblings))
    [call] = client.calls(rollout.id)
    assert call.credit is not None
    expect(page.get_by_role("article", name="Call 1")).to_contain_text(f"{abs(call.credit.advantage):.3f}")
    expect(page.get_by_role("article", name="Call 1").get_by_text(SHOWN)).to_be_visible()

    page.get_by_text("Task", exact=True).last.click()
    page.get_by_role("button", name="Show all").click()
    page.get_by_text("Attempt 1").click()
    expect(page.get_by_text("y" * 1000)).to_be_visible()
    assert visitor.violations() == []
    assert page.evaluate("window.hacked") is None and page.locator("main img").count() == 0
    assert visitor.complaints == []


def test_a_link_signs_in_once_and_a_token_signs_in_by_hand(
    browser: Browser, visitor: Visitor, client: Client, platform: Platform, run: Run
) -> None:
    url = platform.facts.url("api")
    link = console_link(client, url, f"/runs/{run.id}")
    visitor.page.goto(link)
    expect(visitor.page.get_by_role("heading", name="hostile")).to_be_visible()
    with browser.new_context() as context:
        second = Visitor(context.new_page())
        second.page.goto(link)
        expect(second.page.get_by_role("alert")).to_contain_text("signed in before")
        assert second.violations() == []
        second.page.get_by_role("textbox", name="Token").fill(platform.token)
        second.page.keyboard.press("Enter")
        expect(second.page.get_by_role("heading", name="hostile")).to_be_visible()
        second.page.get_by_role("button", name="Sign out").click()
        expect(second.page.get_by_role("textbox", name="Token")).to_be_visible()
        second.page.goto(url)
        expect(second.page.get_by_role("textbox", name="Token")).to_be_visible()
        assert second.complaints == []


def test_a_platform_without_runs_and_an_api_that_fails_say_what_to_do(
    visitor: Visitor, client: Client, platform: Platform
) -> None:
    page = visitor.page
    page.route("**/v1/runs?*", lambda route: route.fulfill(json={"items": [], "next_cursor": None}))
    page.goto(console_link(client, platform.facts.url("api")))
    expect(page.get_by_text("leyden train", exact=False)).to_be_visible()
    assert visitor.violations() == []
    page.unroute("**/v1/runs?*")
    problem = {"detail": "the database does not answer"}
    page.route("**/v1/runs?*", lambda route: route.fulfill(status=503, json=problem))
    expect(page.get_by_role("alert")).to_contain_text("the database does not answer")
    page.unroute("**/v1/runs?*")
    expect(page.get_by_role("alert")).to_have_count(0)


def of_trainer(*names: str) -> str:
    values = ", ".join(f"(metrics ->> '{name}')::float8" for name in names)
    return f"SELECT number, {values} FROM steps WHERE run_id = %(run)s ORDER BY 1"


def of_rollouts(values: str, more: str = "") -> str:
    return f"""
        SELECT g.step, {values} FROM step_groups g JOIN rollouts r ON r.group_id = g.group_id AND NOT r.greedy {more}
        WHERE g.run_id = %(run)s AND g.step IS NOT NULL GROUP BY g.step ORDER BY 1
    """


GRADES = "JOIN rollout_rewards w ON w.rollout_id = r.id AND w.revision = 1"
CALLS = "JOIN model_calls c ON c.rollout_id = r.id"
WAY = """
    JOIN steps s ON s.run_id = g.run_id AND s.number = g.step JOIN groups ON groups.id = g.group_id
    JOIN group_credits v ON v.group_id = g.group_id JOIN attempts a ON a.rollout_id = r.id AND a.number = r.attempt
    JOIN gradings q ON q.rollout_id = r.id AND q.attempt = r.attempt
"""
COUNTED = """
    SELECT g.step, {} FROM step_groups g JOIN group_credits v ON v.group_id = g.group_id
    WHERE g.run_id = %(run)s AND g.step IS NOT NULL GROUP BY g.step ORDER BY 1
"""
BETWEEN = "SELECT number, created_at, started_at, lag(created_at) OVER (ORDER BY number) AS before FROM steps WHERE run_id = %(run)s"  # noqa: E501
LAGS = "Trained tokens by the lag of their sample's oldest"
"""Its columns add up to the trained tokens."""
NUMBERS = {
    "Mean reward in training": (3, of_rollouts("avg(r.reward)")),
    "Mean reward of held-out tasks, 95 % interval": (
        3,
        """
        SELECT groups.admitted_version, avg(r.reward) FROM evaluations e JOIN groups ON groups.evaluation_id = e.id
        JOIN rollouts r ON r.group_id = groups.id WHERE e.run_id = %(run)s GROUP BY 1 ORDER BY 1
        """,
    ),
    "Components of the reward, mean before the weight": (
        3,
        of_rollouts(
            "avg(value) FILTER (WHERE component = 'right'), avg(value) FILTER (WHERE component = 'words')", GRADES
        ),
    ),
    "Failures of graders, share of rollouts": (
        3,
        of_rollouts(
            "avg((w.state = 'failed')::int) FILTER (WHERE component = 'right'),"
            " avg((w.state = 'failed')::int) FILTER (WHERE component = 'words')",
            GRADES,
        ),
    ),
    "Groups with variance, share": (3, COUNTED.format("avg(has_variance::int)")),
    "Spread of rewards, standard deviation": (
        3,
        of_rollouts(
            "stddev_samp(r.reward), (SELECT avg(reward_std) FROM group_credits v"
            " JOIN step_groups h USING (group_id, run_id) WHERE h.run_id = %(run)s AND h.step = g.step)"
        ),
    ),
    "Calls that do not train": (0, of_rollouts("count(*) FILTER (WHERE NOT c.trainable)", CALLS)),
    "Entropy of sampled tokens, nats": (3, of_trainer("entropy")),
    "Tokens whose ratio was clipped or masked, share": (3, of_trainer("clipped_share", "masked_share")),
    "Effective sample size, share": (3, of_trainer("effective_sample_share")),
    "Gap of trainer and engine, nats": (3, of_trainer("logprob_gap_mean", "logprob_gap_max")),
    "Gradient norm": (3, of_trainer("gradient_norm")),
    "Loss": (3, of_trainer("loss")),
    "Sampled tokens of an answer, mean": (1, of_rollouts("avg(completion_tokens)", CALLS)),
    "Calls of a rollout, mean": (2, of_rollouts("count(*) * 1.0 / count(DISTINCT r.id)", CALLS)),
    "Answers that were cut off, share": (3, of_rollouts("avg((finish_reason = 'length')::int)", CALLS)),
    "Lag of trained tokens, versions": (3, of_trainer("policy_lag_mean", "policy_lag_max")),
    LAGS: (0, of_trainer("trained_tokens")),
    "Groups refused as stale before the step": (0, "SELECT number, 0 FROM steps WHERE run_id = %(run)s ORDER BY 1"),
    "A rollout's way to its step, mean seconds": (
        3,
        "SELECT step, a, b, c, d, e, f, t FROM ("
        + of_rollouts(
            "avg(extract(epoch FROM a.started_at - r.created_at)) a,"
            " avg(extract(epoch FROM a.finished_at - a.started_at)) b,"
            " avg(extract(epoch FROM q.settled_at - a.finished_at)) c,"
            " avg(extract(epoch FROM groups.finished_at - q.settled_at)) d,"
            " avg(extract(epoch FROM v.created_at - groups.finished_at)) e,"
            " avg(extract(epoch FROM s.started_at - v.created_at)) f, avg((s.metrics ->> 'step_seconds')::float8) t",
            WAY,
        )
        + ") AS way",
    ),
    "A step, seconds": (
        3,
        f"SELECT s.number, extract(epoch FROM b.started_at - b.before), (metrics ->> 'load_seconds')::float8,"
        " (metrics ->> 'gradients_seconds')::float8, (metrics ->> 'optimizer_seconds')::float8,"
        f" (metrics ->> 'export_seconds')::float8 FROM steps s JOIN ({BETWEEN}) b ON b.number = s.number"
        " WHERE s.run_id = %(run)s ORDER BY 1",
    ),
    "Pause of an engine for the step's weights, seconds": (
        3,
        "SELECT policy_version, avg(seconds), max(seconds) FROM weight_swaps"
        " WHERE run_id = %(run)s AND policy_version > 0 GROUP BY 1 ORDER BY 1",
    ),
    "Rollouts that wait for their first attempt, at the step's end": (
        0,
        "SELECT s.number, (SELECT count(*) FROM rollouts r LEFT JOIN attempts a ON a.rollout_id = r.id AND a.number = 1"
        " WHERE r.run_id = s.run_id AND r.created_at <= s.created_at"
        " AND (coalesce(a.created_at, r.finished_at) <= s.created_at) IS NOT true)"
        " FROM steps s WHERE s.run_id = %(run)s ORDER BY 1",
    ),
    "Tokens a second": (
        1,
        "SELECT s.number, (SELECT sum(completion_tokens) FROM step_groups g"
        f" JOIN rollouts r ON r.group_id = g.group_id {CALLS} WHERE g.run_id = %(run)s AND g.step = s.number)"
        " / extract(epoch FROM b.created_at - b.before),"
        f" (metrics ->> 'trained_tokens')::float8 / (metrics ->> 'step_seconds')::float8"
        f" FROM steps s JOIN ({BETWEEN}) b ON b.number = s.number WHERE s.run_id = %(run)s ORDER BY 1",
    ),
    "Prompt tokens in the engines' cache, share": (
        3,
        of_rollouts("sum(cached_tokens) * 1.0 / sum(prompt_tokens)", CALLS),
    ),
    "Tokens of the step's rollouts": (
        0,
        of_rollouts("sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens)", CALLS),
    ),
}
"""The charts of a run with graders and evaluations, each with its digits and the SQL of its numbers."""


def is_shown(text: str, value: float | Decimal | None, digits: int) -> bool:
    """Whether a cell shows the number with its digits, or with two of its own where it is smaller."""
    if value is None or text == "–":
        return value is None and text == "–"
    unit = 10.0**-digits
    error = 0.05 * abs(float(value)) if value and abs(value) < unit else 0.501 * unit
    return abs(float(text) - float(value)) <= error


def test_every_number_of_the_charts_is_that_of_sql(
    visitor: Visitor, client: Client, platform: Platform, run: Run
) -> None:
    page = visitor.page
    page.goto(console_link(client, platform.facts.url("api"), f"/runs/{run.id}"))
    expect(page.get_by_role("region", name="Cost").get_by_role("img")).to_be_visible()
    expect(page.get_by_role("img", name="Mean reward of held-out tasks")).to_be_visible()
    expect(page.locator("figcaption")).to_have_count(len(NUMBERS))
    assert sorted(page.locator("figcaption").all_inner_texts()) == sorted(NUMBERS)
    open_numbers(page)
    differences = []
    with psycopg.connect(platform.facts.database_url) as database:
        for title, (digits, query) in NUMBERS.items():
            table = page.get_by_role("region", name=f"{title}: numbers", exact=True)
            expect(table.locator("tbody tr").first).to_be_visible()
            rows = [[*row.locator("th, td").all_inner_texts()] for row in table.locator("tbody tr").all()]
            found = database.execute(query.encode(), {"run": run.id}).fetchall()
            if title == LAGS:
                # A dash: the step has no sample of this lag.
                rows = [[step, str(sum(int(count) for count in tokens if count != "–"))] for step, *tokens in rows]
            # An interval stands behind its mean.
            cells = [
                (cell.partition(" (")[0], value)
                for shown, row in zip(rows, found, strict=True)
                for cell, value in zip(shown, row, strict=True)
            ]
            if not all(is_shown(cell, value, digits) for cell, value in cells):
                differences.append((title, cells))
    assert differences == []
    assert visitor.violations() == [] and visitor.complaints == []


COMPONENTS_OF = """
    SELECT component, value, weight, contribution FROM rollout_rewards WHERE rollout_id = %(rollout)s ORDER BY position
"""
CREDITS_OF = """
    SELECT intermediate_reward, return, baseline, advantage FROM credits JOIN model_calls c ON c.id = call_id
    WHERE c.rollout_id = %(rollout)s ORDER BY c.sequence
"""


def test_the_ledger_of_each_sibling_is_that_of_sql(
    visitor: Visitor, client: Client, platform: Platform, run: Run
) -> None:
    page = visitor.page
    group = next(iter(client.rollouts(run=run.id, step=STEPS))).group_id
    page.goto(console_link(client, platform.facts.url("api")))
    with psycopg.connect(platform.facts.database_url) as database:
        for rollout in client.rollouts(group=group):
            page.evaluate(f"location.hash = '#/rollouts/{rollout.id}'")
            expect(page.get_by_role("heading", name=f"Rollout {rollout.id}")).to_be_visible()
            # The group's answer comes last, and the credit's rows change with it.
            expect(page.get_by_text(re.compile("the mean of the (others' values|values below)"))).to_be_visible()
            expect(page.get_by_text("unknown", exact=False)).to_have_count(0)
            scope = {"rollout": rollout.id}
            reward = cells(page, "Reward")
            found = database.execute(COMPONENTS_OF, scope).fetchall()
            assert [row[0] for row in reward] == [*(name for name, *_ in found), "reward"]
            for row, (_, value, weight, contribution) in zip(reward, found, strict=False):
                assert is_shown(row[3], value, 3) and float(row[4]) == weight
                assert is_shown(row[5].replace("−", "-"), contribution, 3)
            [(total,)] = database.execute("SELECT total FROM gradings WHERE rollout_id = %(rollout)s", scope).fetchall()
            assert is_shown(reward[-1][2], total, 3)
            credited = database.execute(CREDITS_OF, scope).fetchall()
            shown = [[cell.replace("−", "-").partition(" ")[0] for cell in row[1:5]] for row in cells(page, "Credit")]
            assert len(shown) == len(credited) > 0
            assert all(
                is_shown(*pair, 3) for row in zip(shown, credited, strict=True) for pair in zip(*row, strict=True)
            )
    assert visitor.violations() == [] and visitor.complaints == []


def cells(page: Page, table: str) -> list[list[str]]:
    rows = page.get_by_role("region", name=table, exact=True).locator("tbody tr")
    expect(rows.first).to_be_visible()
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


OF_VERSIONS = """
    SELECT groups.admitted_version AS version, avg(r.reward) AS reward FROM evaluations e
    JOIN groups ON groups.evaluation_id = e.id JOIN rollouts r ON r.group_id = groups.id
    WHERE e.run_id = %(run)s GROUP BY 1
"""
FACTS = {
    "State": "SELECT phase FROM run_status WHERE run_id = %(run)s",
    "Step": "SELECT count(*) || ' of ' || (SELECT config #>> '{training,steps}' FROM runs WHERE id = %(run)s)"
    " FROM steps WHERE run_id = %(run)s",
    "Last reward": f"SELECT round(avg::numeric, 3)::text FROM ({of_rollouts('avg(r.reward)')} DESC LIMIT 1) AS last",
    "Held-out reward": "SELECT string_agg(round(reward::numeric, 3) || ' at version ' || version, ', '"
    " ORDER BY version) FROM (SELECT *, min(version) OVER () AS first, max(version) OVER () AS last"
    f" FROM ({OF_VERSIONS}) v) ends"
    " WHERE version IN (first, last)",
    "Version": "SELECT max(version)::text FROM policy_versions WHERE run_id = %(run)s",
    "Best version": f"SELECT version::text FROM ({OF_VERSIONS}) v WHERE version > 0 ORDER BY reward DESC, version DESC",
    "Learning rate": "SELECT config #>> '{optimizer,learning_rate}' FROM runs WHERE id = %(run)s",
    "Rollouts": "SELECT string_agg(count || ' ' || state, ', ' ORDER BY state) FROM (SELECT r.state, count(*)"
    " FROM rollouts r JOIN groups g ON g.id = r.group_id WHERE g.run_id = %(run)s AND g.evaluation_id IS NULL"
    " GROUP BY 1) AS counts",
    "Started": "SELECT started_at FROM run_status WHERE run_id = %(run)s",
    "Ended": "SELECT finished_at FROM run_status WHERE run_id = %(run)s",
}
"""The facts of a run that has ended, each with the SQL of its words."""
WORDS_OF_A_TIME = """(moment) => new Date(moment).toLocaleString(undefined, {
    year: "numeric", month: "numeric", day: "numeric", hour: "numeric", minute: "numeric", second: "numeric",
    timeZoneName: "short",
})"""
COUNTS = """
    SELECT * FROM (
        SELECT 'all' AS name, count(*) AS calls FROM model_calls c JOIN rollouts r ON r.id = c.rollout_id
            JOIN group_credits USING (group_id) WHERE c.run_id = %(run)s
        UNION ALL SELECT 'cut off', count(*) FROM model_calls c JOIN rollouts r ON r.id = c.rollout_id
            JOIN group_credits USING (group_id) WHERE c.run_id = %(run)s AND finish_reason = 'length'
    ) AS counted WHERE calls > 0
"""
EVALUATIONS = """
    SELECT e.number, min(g.admitted_version), count(*), avg(r.reward) FROM evaluations e
    JOIN groups g ON g.evaluation_id = e.id JOIN rollouts r ON r.group_id = g.id
    WHERE e.run_id = %(run)s GROUP BY 1 ORDER BY 1
"""


def test_facts_legends_counts_and_evaluations_of_a_run_are_those_of_sql(
    visitor: Visitor, client: Client, platform: Platform, run: Run
) -> None:
    page = visitor.page
    page.goto(console_link(client, platform.facts.url("api"), f"/runs/{run.id}"))
    expect(page.get_by_role("img", name="Mean reward of held-out tasks")).to_be_visible()
    expect(page.locator("figcaption")).to_have_count(len(NUMBERS))
    facts = dict(zip(page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts(), strict=True))
    # The device's settings are words of the trainer alone.
    assert {*facts} - {"Computes in"} == {*FACTS}
    with psycopg.connect(platform.facts.database_url) as database:

        def rows(query: str) -> list[tuple[Any, ...]]:
            return database.execute(query.encode(), {"run": run.id}).fetchall()

        for name, query in FACTS.items():
            found = rows(query)[0][0]
            if name in ("Started", "Ended"):
                found = page.evaluate(WORDS_OF_A_TIME, found.isoformat())
            shown = facts[name].partition(":")[0] if name == "Best version" else facts[name].strip()
            assert shown == found, name
        shown_counts = {name: int(count) for name, count in cells(page, "Model calls")}
        untrained = {name: shown_counts.pop(name) for name in [*shown_counts] if name.startswith("do not train")}
        assert {name: shown_counts.get(name) for name, _ in rows(COUNTS)} == dict(rows(COUNTS))
        untrainable = [(row[0],) for row in rows(NUMBERS["Calls that do not train"][1].replace("g.step,", "", 1))]
        assert sum(untrained.values()) == sum(count for (count,) in untrainable)
        assert run.excluded == {}
        expect(page.get_by_text("No training rollout was excluded.")).to_be_visible()
        legends_are_the_last_numbers(page)

        page.get_by_role("navigation", name="Run").get_by_role("link", name="Evaluations").click()
        shown_evaluations = cells(page, "Evaluations")
        for shown, (number, version, rollouts, reward) in zip(shown_evaluations, rows(EVALUATIONS), strict=True):
            assert [shown[0], shown[1], shown[3]] == [str(number), str(version), f"{rollouts} finished"]
            assert is_shown(shown[4], reward, 3)
    assert visitor.complaints == []


def open_numbers(page: Page) -> None:
    """Unfolds the table of each chart; the page draws it some time after the click."""
    folds = page.locator("figure").get_by_text("Numbers", exact=True)
    for fold in folds.all():
        fold.click()
    expect(page.locator("figure tbody")).to_have_count(folds.count())


def legends_are_the_last_numbers(page: Page) -> None:
    """Each chart's words under it repeat the last row of its table, which is SQL's."""
    open_numbers(page)
    for figure in page.locator("figure").all():
        heads = figure.locator("thead th").all_inner_texts()[1:]
        rows = [row.locator("th, td").all_inner_texts() for row in figure.locator("tbody tr").all()]
        legends = figure.locator(".legend li").all_inner_texts()
        axis = figure.locator("thead th").first.inner_text()
        for column, (name, legend) in enumerate(zip(heads, legends, strict=True), start=1):
            step, value = [(row[0], row[column].partition(" (")[0]) for row in rows if row[column] != "–"][-1]
            assert legend.strip() == f"{name} {value} at {axis} {step}"
