"""The flight agent where Leyden starts no agent: in a notebook's process, or as an HTTP service."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from leyden.libs.cli.commands.demo import AGENT
from leyden.libs.cli.local.record import read_record
from leyden.libs.cli.settings import EXAMPLES
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run
from leyden.libs.contracts.api.tokens import ApiScope
from leyden.libs.contracts.config import RunConfig
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.flight import Flight
from tests.campaigns.experiments.servers import server_of
from tests.support.shared import ROOT

CLIENTS = EXAMPLES / "external"
RUNNER = {"type": "external", "timeout_seconds": 180}


class External(Flight):
    """Trains the demo's agent by attempts that a client leases."""

    purpose = (
        "The [flight agent](../../examples/flight_agent/README.md), which Leyden does not start:"
        " [clients](../../examples/external/README.md) lease its attempts. `notebook`: one process plays them in its"
        " threads. `service`: an HTTP service, which reads its base URL once, plays those that a client hands over. The"
        " agent's code, the tasks and the settings are those of [the demo](../demo.md)."
    )

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        return f"Flight agent in a {choices.client}"

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        return f"external-{choices.client}"

    def document(self, seed: int, choices: Choices) -> RunConfig:
        """Returns the run's document: that of the flight agent without its command."""
        document = super().document(seed, choices).model_dump(mode="json")
        name = f"{document['name']}-{choices.client}"
        return RunConfig.model_validate(document | {"name": name, "agent": {}, "runner": RUNNER})

    @contextlib.contextmanager
    def agents(self, client: Client, home: Path, choices: Choices, run: Run) -> Iterator[None]:
        """Plays the attempts of the run."""
        record = read_record(home)
        assert record is not None and record.url is not None
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(AGENT)]),
            "LEYDEN_URL": record.url,
            "LEYDEN_TOKEN": client.create_token(choices.client, [ApiScope.ATTEMPTS]).token,
            "OPENAI_BASE_URL": f"{record.services['gateway'].url}/v1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": str(record.services["collector"].url),
        }
        with contextlib.ExitStack() as stack:
            command = [sys.executable, "notebook.py", run.id]
            if choices.client == "service":
                service = [choices.interpreter, "service.py", "0"]
                port = stack.enter_context(server_of(service, CLIENTS, environment))
                command = [sys.executable, "client.py", run.id, f"http://127.0.0.1:{port}"]
            process = stack.enter_context(subprocess.Popen(command, cwd=CLIENTS, env=environment))
            stack.callback(process.terminate)
            yield
