"""The page of one run."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import expect

from leyden.libs.client import Client
from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.api.test_comparison import measured_run
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert, loses
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.browser import Visitor


def test_the_model_calls_of_a_run_are_counted(insert: Insert[list[str]], open_page: Callable[[str], Visitor]) -> None:
    counts = CallCounts(
        calls=12,
        malformed=3,
        overflows=1,
        untrainable={"nobody received the answer": 2},
        tools={HOSTILE: {"error": 5, "bare": 3, "unset": 2}},
    )

    async def counted(database: Database) -> list[str]:
        runs = [await builders.add_run(database) for _ in range(2)]
        for run, calls in zip(runs, (counts, CallCounts(calls=1)), strict=True):
            group, _ = await builders.add_group(database, run, size=1)
            await builders.add_credited_group(database, group, calls=calls.model_dump())
        return [run.id for run in runs]

    with_tools, without = insert(counted)
    visitor = open_page(f"/runs/{with_tools}")
    table = visitor.page.get_by_role("region", name="Model calls")
    for name, count in (
        ("all", 12),
        ("malformed", 3),
        ("beyond the context", 1),
        ("do not train: nobody received the answer", 2),
    ):
        row = table.get_by_role("row").filter(has=visitor.page.get_by_role("rowheader", name=name, exact=True))
        expect(row.get_by_role("cell")).to_have_text(str(count))
    expect(table.get_by_role("row")).to_have_count(5)
    tools = visitor.page.get_by_role("region", name="Tools").locator("tbody tr")
    expect(tools.get_by_role("rowheader")).to_have_text(SHOWN)
    # A plain text (`bare`) is an end, and no known failure.
    expect(tools.get_by_role("cell")).to_have_text(["10", "5", "2", "0.625"])
    assert visitor.violations() == []
    page = open_page(f"/runs/{without}").page
    expect(page.get_by_text("Tools: none of these calls asked for one.")).to_be_visible()


def test_a_run_shows_its_next_step_and_the_time_left(
    insert: Insert[tuple[str, str]], open_page: Callable[[str], Visitor]
) -> None:
    async def add(database: Database) -> tuple[str, str]:
        document = builders.run_document(name="works", training={"steps": 4})
        new, run = [await builders.add_run(database, config=document) for _ in range(2)]
        _, (first, _) = await builders.add_group(database, run)
        await builders.finish_rollout(database, first)
        async with database.session() as session:
            (await session.get_one(tables.RunStatus, run.id)).started_at = datetime.now(tz=UTC) - timedelta(hours=5)
            made = datetime.now(tz=UTC)
            session.add(tables.Step(run_id=run.id, number=1, metrics={}, checkpoint="", started_at=made))
        return new.id, run.id

    new, run = insert(add)
    visitor = open_page(f"/runs/{run}")
    page = visitor.page
    expect(page.get_by_text("Step 2, of 2 rollouts")).to_be_visible()
    for name, count in (("ended", "1"), ("graded", "1"), ("credited", "0")):
        expect(page.get_by_role("progressbar", name=f"Rollouts {name}")).to_have_attribute("value", count)
    expect(page.get_by_text("about 15 h")).to_be_visible()
    expect(page.locator("dd", has_text=re.compile(r":\d\d [AP]M [A-Z]{3}"))).to_be_visible()
    assert visitor.violations() == []
    page.get_by_role("navigation", name="Main").get_by_role("link", name="Runs").focus()
    page.keyboard.press("Enter")
    rows = page.get_by_role("region", name="Runs").locator("tbody tr")
    expect(rows.filter(has_text="1 / 4")).to_contain_text("15 h")
    page.goto(page.url.split("#")[0] + f"#/runs/{new}")
    expect(page.get_by_text("Step 1, of 2 rollouts")).to_be_visible()
    expect(page.get_by_text("unknown", exact=True)).to_be_visible()


def test_the_last_lines_of_a_trainer_that_ended_are_shown(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def ended(database: Database) -> str:
        run = await builders.add_run(database)
        words = {"reason": "the machine ended it: give it more memory", "output": f"step 2\n{HOSTILE}"}
        async with database.session() as session:
            session.add(tables.TrainerEnd(run_id=run.id, attempt=2, state="out_of_memory", step=1, **words))
        return run.id

    visitor = open_page(f"/runs/{insert(ended)}")
    visitor.page.get_by_text("Unplanned ends of the trainer: 1, the last after step 1 (out_of_memory)").click()
    expect(visitor.page.get_by_text("give it more memory")).to_be_visible()
    expect(visitor.page.get_by_text(SHOWN)).to_be_visible()
    assert visitor.violations() == []


def test_a_run_with_several_agents_shows_the_rewards_of_each(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def two_agents(database: Database) -> str:
        agents = [{"name": name, "command": ["/agent"]} for name in ("plain", "idle")]
        run = await builders.add_run(database, config=builders.run_document(agent=None, agents=agents))
        group, rollouts = await builders.add_group(database, run, agent="plain", state="complete")
        for rollout, reward in zip(rollouts, (0.0, 1.0), strict=True):
            await builders.finish_rollout(database, rollout, reward=reward)
        async with database.session() as session:
            moment = datetime(2026, 1, 1, tzinfo=UTC)
            session.add(tables.Step(run_id=run.id, number=1, metrics={}, checkpoint="", started_at=moment))
            await session.flush()
            session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=1, verdict="trained"))
        return run.id

    run_id = insert(two_agents)
    visitor = open_page(f"/runs/{run_id}")
    rows = visitor.page.get_by_role("region", name="Agents").locator("tbody tr")
    expect(rows.nth(0).get_by_role("cell")).to_have_text(["1", "2", "0.500"])
    expect(rows.nth(1).get_by_role("cell")).to_have_text(["–", "0", "–"])
    rows.nth(1).get_by_role("link", name="idle").click()
    expect(visitor.page.get_by_text("No rollout matches the filter.")).to_be_visible()
    expect(visitor.page.get_by_label("Agent")).to_have_value("idle")
    assert visitor.violations() == []


async def with_steps(database: Database) -> str:
    """Three steps; the second one measured no entropy, and no step has a KL."""
    run = await builders.add_run(database)
    async with database.session() as session:
        for number in (1, 2, 3):
            metrics = {"loss": number / 4, "entropy": None if number == 2 else number / 2, "kl_reference": 0.0}
            moment = datetime(2026, 1, 1, 0, number, tzinfo=UTC)
            times = {"started_at": moment, "created_at": moment.replace(second=30)}
            session.add(tables.Step(run_id=run.id, number=number, metrics=metrics, checkpoint="", **times))
    return run.id


def test_what_was_not_measured_is_a_gap_and_no_chart(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    visitor = open_page(f"/runs/{insert(with_steps)}")
    stability = visitor.page.get_by_role("region", name="Stability")
    entropy = stability.get_by_role("figure").filter(has_text="Entropy")
    entropy.get_by_text("Numbers").click()
    expect(entropy.locator("tbody td")).to_have_text(["0.500", "–", "1.500"])
    expect(stability.get_by_role("img", name="KL")).to_have_count(0)
    expect(stability).to_contain_text("KL, nats a token (algorithm.kl_coefficient is 0)")
    expect(visitor.page.get_by_role("region", name="Score")).to_contain_text(
        "Held-out tasks (the document has no evaluation)"
    )
    assert visitor.violations() == []


def test_a_run_without_a_step_says_why_it_has_no_charts(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def new(database: Database) -> str:
        return (await builders.add_run(database)).id

    visitor = open_page(f"/runs/{insert(new)}")
    for name in ("Score", "Signal", "Stability", "Freshness", "Speed", "Cost"):
        group = visitor.page.get_by_role("region", name=name, exact=True)
        expect(group).to_contain_text("Nothing to draw: the run is running and has made no step.")
        expect(group.get_by_role("figure")).to_have_count(0)
    assert visitor.violations() == []


def test_excluded_rollouts_are_counted_by_cause(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def excluded(database: Database) -> str:
        run = await builders.add_run(database)
        _, rollouts = await builders.add_group(database, run, size=3)
        async with database.session() as session:
            for rollout, reason in zip(rollouts, ("infra_error", HOSTILE, "infra_error"), strict=True):
                row = await session.get_one(tables.Rollout, rollout.id)
                row.state, row.reason = "excluded", reason
        return run.id

    table = open_page(f"/runs/{insert(excluded)}").page.get_by_role("region", name="Excluded rollouts")
    expect(table.locator("tbody tr")).to_have_text([re.compile("infra_error.*2"), re.compile(r"evil.*1")])
    expect(table).to_contain_text(SHOWN)


JUDGE = {"type": "score_model", "provider": "judge", "model": "m", "rubric": "Is it right?"}


@pytest.mark.parametrize(
    ("cost", "unpriced", "told"),
    [
        (0.25, 0, "0.2500, at most 2"),
        (0.25, 3, "0.2500 and 3 tokens without a price"),
        (0.0, 77, "unknown: no provider"),
    ],
)
def test_what_judges_cost_is_known_or_unknown(
    insert: Insert[str], open_page: Callable[[str], Visitor], cost: float, unpriced: int, told: str
) -> None:
    async def judged(database: Database) -> str:
        reward = {"components": [{"name": "helpful", "grader": JUDGE}], "judge_tokens": 1000, "judge_cost": 2}
        run = await builders.add_run(database, config=builders.run_document(reward=reward))
        async with database.session() as session:
            session.add(tables.JudgeUsage(run_id=run.id, tokens=77, cost=cost, unpriced_tokens=unpriced))
        return run.id

    group = open_page(f"/runs/{insert(judged)}").page.get_by_role("region", name="Cost", exact=True)
    expect(group.get_by_text("77, at most 1000")).to_be_visible()
    expect(group.get_by_text(told)).to_be_visible()


def writer(open_page: Callable[[str], Visitor], page: str) -> Visitor:
    """A person who signed in with a token that may write."""
    visitor = open_page(page)
    visitor.page.get_by_role("button", name="Sign out").click()
    visitor.page.get_by_role("textbox", name="Token").fill(TOKEN)
    visitor.page.keyboard.press("Enter")
    return visitor


def test_a_writer_pauses_a_run_after_a_question_and_a_reader_cannot(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    run = insert(with_steps)
    reader = open_page(f"/runs/{run}")
    expect(reader.page.get_by_role("region", name="Cost")).to_be_visible()
    expect(reader.page.get_by_role("button", name="Pause", exact=True)).to_have_count(0)
    visitor = writer(open_page, f"/runs/{run}")
    page = visitor.page
    page.get_by_role("button", name="Pause", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Rollouts under way end, and no new ones begin.")).to_be_visible()
    assert visitor.violations() == []
    page.get_by_role("button", name="No", exact=True).click()
    expect(page.get_by_text("(asked: paused)")).to_have_count(0)
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("button", name="Yes, pause").click()
    expect(page.get_by_text("(asked: paused)")).to_be_visible()
    expect(page.get_by_role("button", name="Resume", exact=True)).to_be_visible()


def test_a_refused_action_shows_the_apis_own_sentence(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def planned(database: Database) -> str:
        return (await builders.add_run(database, config=builders.run_document(evaluation={"dataset": "questions"}))).id

    visitor = writer(open_page, f"/runs/{insert(planned)}")
    page = visitor.page
    page.get_by_role("button", name="Evaluate now").click()
    page.get_by_role("button", name="Yes, evaluate now").click()
    # The document names a dataset that nobody has uploaded.
    expect(page.get_by_role("alert")).to_contain_text("no dataset has the id or name 'questions'")
    page.get_by_role("button", name="Cancel the run").click()
    page.get_by_role("button", name="Yes, cancel the run").click()
    expect(page.get_by_role("status").filter(has_text="the platform has taken it")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    # The browser reports the refusal as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "404" not in one]


def test_an_evaluation_whose_answer_was_lost_is_not_done_twice(
    insert: Insert[str], open_page: Callable[[str], Visitor], api_url: str
) -> None:
    async def planned(database: Database) -> str:
        dataset = await builders.add_dataset(database, name="held-out")
        config = builders.run_document(evaluation={"dataset": "held-out"})
        return (await builders.add_run(database, dataset_id=dataset.id, config=config)).id

    run = insert(planned)
    visitor = writer(open_page, f"/runs/{run}")
    page = visitor.page
    page.route("**/evaluations", lambda route: loses(route) if route.request.method == "POST" else route.continue_())

    def evaluate() -> None:
        page.get_by_role("button", name="Evaluate now").click()
        page.get_by_role("button", name="Yes, evaluate now").click()

    evaluate()
    expect(page.get_by_role("alert").filter(has_text="the API does not answer")).to_be_visible()
    page.unroute("**/evaluations")
    with Client(api_url, TOKEN) as client:
        for evaluations in (1, 2):
            evaluate()
            expect(page.get_by_role("status").filter(has_text="the platform has taken it")).to_be_visible()
            assert len(list(client.evaluations(run))) == evaluations
    # The browser reports the lost answer as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "Failed to load" not in one]


def test_a_run_without_held_out_tasks_is_evaluated_by_a_command(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    run = insert(with_steps)
    page = writer(open_page, f"/runs/{run}").page
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Evaluate now")).to_have_count(0)
    page.get_by_role("link", name="Evaluations", exact=True).click()
    expect(page.get_by_text(f"leyden run evaluate {run} --dataset NAME")).to_be_visible()


def test_a_continued_run_shows_what_it_changed(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def continued(database: Database) -> str:
        parent = await builders.add_run(database)
        document = builders.run_document(optimizer={"learning_rate": 5e-7})
        columns = {"parent_run_id": parent.id, "parent_version": 3}
        return (await builders.add_run(database, config=document, **columns)).id

    visitor = open_page(f"/runs/{insert(continued)}/document")
    expect(visitor.page.get_by_text("It continues version 3 of run")).to_be_visible()
    changes = visitor.page.get_by_role("region", name="Changes").locator("tbody tr")
    expect(changes).to_have_text(re.compile("optimizer.learning_rate.*5e-07"))
    expect(visitor.page.get_by_text('"learning_rate": 5e-7')).to_be_visible()
    assert visitor.violations() == []


def test_evaluations_have_their_numbers(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def measured(database: Database) -> str:
        dataset = (await builders.add_run(database)).dataset_id
        return (await measured_run(database, dataset, 1e-6, [0.0, 0.5, 1.0, 0.25])).id

    visitor = open_page(f"/runs/{insert(measured)}")
    visitor.page.get_by_role("link", name="Evaluations").click()
    row = visitor.page.get_by_role("region", name="Evaluations").locator("tbody tr")
    expect(row).to_have_text(re.compile(r"^10.*4 finished0\.438"))
    assert visitor.violations() == []
