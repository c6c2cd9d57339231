"""The form of an ended run that makes a new one: a version, steps, and the amended document."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run
from leyden.libs.store.database import Database
from leyden.libs.store.engines import Pool, write_pools
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
    steps = page.get_by_label("Further steps")
    for given, option in (("", ""), ("0", "--set training.steps=0 ")):
        steps.fill(given)
        told = f"leyden run resume {run} --from-version 2 {option}--set 'optimizer.learning_rate=5e-7'"
        expect(page.get_by_text(told, exact=True)).to_be_visible()
    steps.fill("7")
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
        ('{"training": {}, "a.b": 1}', 'No document has a field "a.b": take it out.'),
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


async def ended_team(database: Database) -> str:
    """A failed run of 9 steps with the versions 0 to 2 of its model and of a further policy, and names with dots."""
    roles = [{"name": "writer", "agent_name": "w"}, {"name": "the checker", "agent_name": "c", "policy": "ch.1 = 'a'"}]
    document = builders.run_document(
        training={"steps": 9},
        agent={"command": ["true"], "environment": {"A": "1", "B": "2"}},
        credit={"air": {"weights": {"db.find": 1.0, "db.add": 1.0, "book": 0.5}}},
        roles=roles,
        policies={"ch.1 = 'a'": {"pool": "second"}},
    )
    async with database.session() as session:
        await write_pools(session, [Pool("default", "/m/a"), Pool("second", "/m/b")])
    dataset = await builders.add_dataset(database)
    run = await builders.add_run(database, dataset_id=dataset.id, config=document)
    policy = await builders.add_run(database, dataset_id=run.dataset_id, lead_run_id=run.id, policy="ch.1 = 'a'")
    for one in (run, policy):
        for version in range(3):
            await builders.add_policy_version(database, one, version)
        await builders.end_run(database, one, "failed")
    return run.id


def amend(page: Page) -> str:
    """Drops two keys of the document in the form, changes a third, and returns the command that it shows."""
    words = page.get_by_label("Document of the new run")
    document = json.loads(words.input_value())
    document["agent"]["environment"] = {"B": "it's 3"}
    del document["credit"]["air"]["weights"]["db.find"]
    words.fill(json.dumps(document))
    return page.locator("form code").inner_text()


def by_shell(command: str, url: str, folder: Path) -> None:
    """Runs a command as a person does who pastes it into a shell."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LEYDEN_URL": url, "LEYDEN_TOKEN": TOKEN}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_shown_command_makes_the_run_that_the_form_makes(
    insert: Insert[str], open_writer: Callable[[str], Visitor], api_url: str, tmp_path: Path
) -> None:
    """Versions of further policies, dropped keys, and names with dots, blanks, quotes and signs of equality."""
    run = insert(ended_team)
    visitor = open_writer(f"/runs/{run}")
    page = visitor.page
    page.get_by_role("button", name="Amend and resume").click()
    page.get_by_label("Begin policy ch.1 = 'a' with version").fill("1")
    command = amend(page)
    assert visitor.violations() == []
    by_shell(command, api_url, tmp_path)
    page.get_by_role("button", name="Begin the new run").click()
    expect(page.get_by_role("status").get_by_role("link")).to_be_focused()
    with Client(api_url, TOKEN) as client:
        by_form, by_command = [client.run(one.id) for one in client.runs() if one.id != run]
    assert facts(by_form) == facts(by_command)
    assert by_form.config is not None and by_form.config.credit.air is not None
    assert by_form.config.credit.air.weights == {"db.add": 1.0, "book": 0.5}
    assert by_form.config.agent.environment == {"B": "it's 3"}
    parent = by_form.policies["ch.1 = 'a'"].parent
    assert (by_form.parent and by_form.parent.version, parent and parent.version) == (2, 1)


def facts(run: Run) -> tuple[object, ...]:
    return run.config, run.parent, {name: one.parent for name, one in run.policies.items()}
