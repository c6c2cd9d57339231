"""The form of an ended run that makes a new one: a version, steps, and the amended document."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.client import Client
from leyden.libs.store.database import Database
from tests.contract.console.conftest import Insert
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.browser import Visitor


async def ended(database: Database) -> str:
    """A run of 9 steps that failed with versions 0, 1 (removed) and 2."""
    dataset = await builders.add_dataset(database)
    document = builders.run_document(training={"steps": 9}, agent={"command": ["true"], "environment": {"A": "1"}})
    run = await builders.add_run(database, dataset_id=dataset.id, config=document)
    for version in range(3):
        await builders.add_policy_version(database, run, version, pruned_at=run.created_at if version == 1 else None)
    await builders.end_run(database, run, "failed")
    return run.id


def test_an_ended_run_is_amended_and_goes_on_by_keyboard(
    insert: Insert[str], open_writer: Callable[[str], Visitor], api_url: str
) -> None:
    run = insert(ended)
    visitor = open_writer(f"/runs/{run}")
    page = visitor.page
    expect(page.get_by_text(f"leyden run resume {run}", exact=True)).to_be_visible()
    page.get_by_role("button", name="Amend and resume").focus()
    page.keyboard.press("Enter")
    version, document = page.get_by_label("Begin with version"), page.get_by_label("Document of the new run")
    expect(version).to_be_focused()
    expect(version).to_have_value("2")
    expect(page.get_by_label("Further steps")).to_have_value("7")
    expect(document).to_have_value(re.compile('"learning_rate": 0.000001'))
    words = document.input_value()
    document.fill(words.replace('"learning_rate": 0.000001', '"learning_rate": 5e-7').replace('"A": "1"', '"B": "2"'))
    told = "--set 'agent.environment.A=null' --set 'agent.environment.B=\"2\"'"
    expect(page.get_by_text(told)).to_be_visible()
    assert visitor.violations() == []
    document.fill(words.replace('"learning_rate": 0.000001', '"learning_rate": 5e-7'))
    command = f"leyden run resume {run} --from-version 2 --steps 7 --set 'optimizer.learning_rate=5e-7'"
    expect(page.get_by_text(command, exact=True)).to_be_visible()
    version.fill("1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("no weights of version 1 (there are 0, 2)")
    version.fill("0")
    page.keyboard.press("Enter")
    link = page.get_by_role("status").get_by_role("link", name="test run")
    expect(link).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_visible()
    with Client(api_url, TOKEN) as client:
        made = next(one for one in client.runs() if one.id != run)
    assert (made.parent and made.parent.version, made.progress.steps) == (0, 7)
    assert made.config is not None and made.config.optimizer.learning_rate == 5e-7
    # The browser reports the refusal as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "409" not in one]


def test_a_document_that_cannot_be_read_sends_nothing(
    insert: Insert[str], open_writer: Callable[[str], Visitor]
) -> None:
    visitor = open_writer(f"/runs/{insert(ended)}")
    page = visitor.page
    page.get_by_role("button", name="Amend and resume").click()
    document, alert = page.get_by_label("Document of the new run"), page.get_by_role("alert")
    for words, told in (
        ("{", "The document is no JSON"),
        ("[]", "The document is no JSON object"),
        ("{}", "training: leave the object as it was"),
        ('{"training": {"steps": 3}}', "training.steps: write them into the field above"),
    ):
        document.fill(words)
        expect(alert).to_contain_text(told)
        expect(page.get_by_role("button", name="Begin the new run")).to_be_disabled()
    assert visitor.violations() == []


def test_a_reader_has_no_form_and_a_run_without_versions_no_button(
    insert: Insert[str], open_page: Callable[[str], Visitor], open_writer: Callable[[str], Visitor]
) -> None:
    async def unbegun(database: Database) -> str:
        run = await builders.add_run(database)
        await builders.end_run(database, run, "failed")
        return run.id

    page = open_page(f"/runs/{insert(ended)}").page
    expect(page.get_by_text("Last reward")).to_be_visible()
    expect(page.get_by_role("button", name="Amend and resume")).to_have_count(0)
    page = open_writer(f"/runs/{insert(unbegun)}").page
    expect(page.get_by_role("button", name="Cancel the run")).to_be_visible()
    expect(page.get_by_role("button", name="Amend and resume")).to_have_count(0)
