"""The REST API answers any request as its OpenAPI document declares, and never with a 500."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from schemathesis import GenerationMode

from leyden.libs.store.database import Database
from leyden.services.api.app import openapi_document
from tests.fakes.fuzzing import bounded, check, kept, operations, schema_of
from tests.fakes.served_api import TOKEN
from tests.support import builders

SCHEMA = schema_of(openapi_document())
HEADERS = {"authorization": f"Bearer {TOKEN}"}


async def _filled(dsn: str) -> dict[str, str]:
    """A run with a rollout and a call: what path parameters may name."""
    database = Database(dsn)
    run = await builders.add_run(database)
    _, [rollout, _] = await builders.add_group(database, run)
    call = await builders.add_call(database, rollout)
    await database.close()
    return {
        "run_id": run.id,
        "dataset_id": run.dataset_id,
        "group_id": rollout.group_id,
        "rollout_id": rollout.id,
        "call_id": call.id,
        "number": "1",
    }


@pytest.fixture
def known_ids(postgres_dsn: str) -> dict[str, str]:
    return asyncio.run(_filled(postgres_dsn))


@pytest.mark.parametrize("operation", operations(SCHEMA), ids=lambda found: found.label)
def test_every_operation_conforms_to_its_openapi_document(
    operation: Any, api_url: str, known_ids: dict[str, str]
) -> None:
    # The document of a run takes long to make up.
    @bounded(3 if operation.label == "POST /v1/runs" else 20)
    @given(st.data())
    def send(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(list(GenerationMode)))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if data.draw(st.booleans()):
            case.path_parameters.update({name: known_ids[name] for name in case.path_parameters if name in known_ids})
        check(case, api_url, HEADERS)

    send()


def test_any_sequence_of_operations_conforms_to_the_openapi_document(api_url: str) -> None:
    """Ids that one answer gave go into the next request."""

    class Workflow(SCHEMA.as_state_machine()):  # type: ignore[misc]  # made at run time
        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"base_url": api_url, "headers": HEADERS}

        def validate_response(self, response: Any, case: Any, **_: Any) -> None:
            case.validate_response(response, checks=kept())

    run_state_machine_as_test(Workflow, settings=bounded(5, stateful_step_count=6))
