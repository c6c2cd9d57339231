"""The engine that `leyden up` is told to use."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from leyden.libs.cli.errors import CommandError
from leyden.libs.cli.local.engines import EngineChoice
from leyden.libs.cli.local.platform import platform_options
from leyden.libs.cli.local.services import Facts, Sglang, environment
from leyden.libs.cli.settings import Settings

PORTS = {"engine": 30000, "api": 8000, "gateway": 8001, "collector": 8003}


def variables(service: str, **options: object) -> dict[str, str]:
    facts = Facts(Path("/home"), PORTS, PORTS, "postgresql://db", "redis://cache", Path("/model"), **options)  # type: ignore[arg-type]  # a test's shorthand
    return environment(service, facts)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (EngineChoice(urls=("localhost:30000",)), "write an address such as"),
        (EngineChoice(urls=("http://[::1",)), "write an address such as"),
        (EngineChoice("sglang", arguments="--chat-template 'x"), "No closing quotation"),
        (EngineChoice(arguments="--tp 2"), "need --engine sglang"),
        (EngineChoice(python=Path("/bin/python")), "need --engine sglang"),
        (EngineChoice("sglang", ("http://a:1",)), "not both"),
        (EngineChoice("sglang", python=Path("/nowhere/python")), "No such file"),
        (EngineChoice("sglang", python=Path(sys.executable)), "pip install sglang==0.5.23"),
    ],
)
def test_a_choice_that_cannot_work_names_the_remedy(choice: EngineChoice, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        choice.sglang()


def test_sglang_is_found_in_the_named_environment(tmp_path: Path) -> None:
    python = tmp_path / "python"
    (tmp_path / "sglang.py").write_text("")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    choice = EngineChoice("sglang", arguments="--tp-size 2 --json-model-override-args '{}'", python=python)
    assert choice.sglang() == Sglang(python, ("--tp-size", "2", "--json-model-override-args", "{}"))
    assert choice.options() == [
        *("--engine", "sglang", "--engine-args=--tp-size 2 --json-model-override-args '{}'"),
        *("--engine-python", str(python)),
    ]


def test_running_engines_replace_ours_and_their_keys_come_from_the_caller() -> None:
    urls = ("http://a:1", "http://b:1")
    options = platform_options(Settings(), free_ports=True, engine_urls=urls)
    assert "engine" not in options.services
    controller, gateway = (variables(service, engine_urls=urls) for service in ("controller", "gateway"))
    assert json.loads(controller["CONTROLLER_ENGINE_URLS"]) == list(urls)
    assert not [name for name in {**controller, **gateway} if "KEY_FILE" in name]
    assert EngineChoice(urls=urls).options() == ["--engine-url", "http://a:1", "--engine-url", "http://b:1"]


def test_sglang_gets_its_port_keys_and_arguments() -> None:
    given = variables("engine", sglang=Sglang(Path("/env/bin/python"), ("--tp-size", "2")))
    assert (given["ENGINE_PYTHON"], given["ENGINE_PORT"]) == ("/env/bin/python", "30000")
    assert json.loads(given["ENGINE_ARGS"]) == ["--tp-size", "2"]
    assert given["ENGINE_API_KEY_FILE"] == "/home/secrets/engine-api-key"
    assert "ENGINE_INCREMENTAL_STREAMING_OUTPUT" not in given
