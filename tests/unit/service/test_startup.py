"""A process that cannot start reports the wrong setting in one line, without its value."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from leyden.libs.service import HttpSettings
from leyden.libs.service.errors import Misconfigured
from leyden.libs.service.startup import exit_on_config_error
from leyden.services.controller.settings import Settings as ControllerSettings
from leyden.services.gateway.settings import Settings as GatewaySettings
from leyden.services.runner.settings import Settings as RunnerSettings
from leyden.services.trainer.settings import Settings as TrainerSettings

SERVICES = ("api", "collector", "controller", "credit", "engine", "gateway", "runner", "trainer")
ROOT = Path(__file__).parents[3]
END = "; correct it, or unset it where it has a default (docs/reference/settings.md)"


def config_error(settings: type, monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    @exit_on_config_error(settings)
    def main() -> None:
        settings()

    with pytest.raises(SystemExit) as ended:
        main()
    return str(ended.value)


@pytest.mark.parametrize(
    ("settings", "name", "value", "wanted"),
    [
        (GatewaySettings, "GATEWAY_PORT", "abc", "should be a valid integer, unable to parse string as an integer"),
        (GatewaySettings, "GATEWAY_PORT", "-1", "should be greater than or equal to 0"),
        (GatewaySettings, "GATEWAY_PORT", "65536", "should be less than or equal to 65535"),
        (GatewaySettings, "GATEWAY_HEADER_SECONDS", "nan", "should be a finite number"),
        (GatewaySettings, "GATEWAY_HEADER_SECONDS", "inf", "should be a finite number"),
        (GatewaySettings, "GATEWAY_HEADER_SECONDS", "0", "should be greater than 0"),
        (GatewaySettings, "GATEWAY_ENGINE_URLS", "http://127.0.0.1:1", "should be JSON"),
        (GatewaySettings, "GATEWAY_ENGINE_URLS", '["localhost:1"]', "should be an address such as http://engine:30000"),
        # Paths are appended to it; a key in it would be sent in the wrong place, and stand in logs.
        (GatewaySettings, "GATEWAY_EMBEDDINGS_URL", "http://host/v1?key=a", "should be an address such as http://host"),
        (GatewaySettings, "GATEWAY_EMBEDDINGS_URL", "http://host/v1#key", "should be an address such as http://host"),
        (ControllerSettings, "CONTROLLER_RETENTION_DAYS", "1e999", "should be a finite number"),
        (ControllerSettings, "CONTROLLER_TRAINER_COMMAND", "[]", "list should have at least 1 item after validation"),
        (RunnerSettings, "RUNNER_GATEWAY_URL", "gateway", "should be an address such as http://host:4318"),
        (RunnerSettings, "RUNNER_AGENT_USER", "somebody", "should be 'auto', 'own' or 'same'"),
        (RunnerSettings, "RUNNER_HIDDEN_PATHS", "/var/lib", "should be JSON"),
        (HttpSettings, "LEYDEN_LOG_LEVEL", "loud", "should be 'debug', 'info', 'warning' or 'error'"),
        (HttpSettings, "LEYDEN_OTLP_ENDPOINT", "http://host:99999", "should be an address such as http://host:4318"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_variable(
    settings: type, name: str, value: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config_error(settings, monkeypatch, **{name: value}).startswith(f"{name}: {wanted}")
    assert config_error(settings, monkeypatch, **{name: value}).endswith(END)


def test_processes_that_cannot_divide_copies_alike_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"TRAINER_RUN_ID": "run-a", "WORLD_SIZE": "8", "TRAINER_COPIES": "3"}
    error = config_error(TrainerSettings, monkeypatch, **wrong)
    assert error.startswith("TRAINER_COPIES: should divide the number of processes, 8")
    assert TrainerSettings(run_id="run-a", WORLD_SIZE=8, copies=2).copies == 2


@pytest.mark.parametrize(
    ("name", "addresses", "example"),
    [
        (
            "LEYDEN_DATABASE_URL",
            [
                "nonsense",
                "mysql://u:s3cret@h/x",
                "postgresql:/h",
                "postgresql://u:s3cret@h:port/x",
                "postgresql://h:65536",
            ],
            "postgresql://user:password@host:5432/name",
        ),
        (
            "LEYDEN_REDIS_URL",
            ["nonsense", "http://:s3cret@h", "redis://:s3cret@h:x", "redis://h/first", "unix://"],
            "redis://host:6379/0",
        ),
    ],
)
def test_an_invalid_address_is_reported_without_its_password(
    name: str, addresses: list[str], example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {config_error(HttpSettings, monkeypatch, **{name: address}) for address in addresses}
    assert lines == {f"{name}: should be an address such as {example}{END}"}


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("database_url", "postgresql://leyden@127.0.0.1:5432/leyden"),
        ("database_url", "postgres://u:p%40%3A%2Fx@[::1]:5432/x?connect_timeout=3"),
        ("database_url", "postgresql+psycopg:///leyden?host=/run/postgresql"),
        ("redis_url", "redis://:p%2Fw@127.0.0.1:6379/0"),
        ("redis_url", "rediss://cache.example:6380/3?health_check_interval=5"),
        ("redis_url", "unix:///run/redis.sock?db=1"),
        ("otlp_endpoint", "https://otel.example/base"),
    ],
)
def test_addresses_are_not_rewritten(name: str, address: str) -> None:
    assert getattr(HttpSettings(**{name: address}), name) == address


def test_each_wrong_variable_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = config_error(GatewaySettings, monkeypatch, GATEWAY_PORT="x", LEYDEN_LOG_LEVEL="x", GATEWAY_MAX_CALLS="0")
    assert sorted(line.partition(":")[0] for line in lines.splitlines()) == [
        "GATEWAY_MAX_CALLS",
        "GATEWAY_PORT",
        "LEYDEN_LOG_LEVEL",
    ]


@pytest.mark.parametrize("error", [RuntimeError("a fault of ours"), ValueError("of ours, too")])
def test_any_other_error_has_its_traceback(error: Exception) -> None:
    @exit_on_config_error(HttpSettings)
    def main() -> None:
        raise error

    with pytest.raises(type(error)):
        main()


def test_the_words_of_who_may_correct_it_become_a_line() -> None:
    @exit_on_config_error(HttpSettings)
    def main() -> None:
        raise Misconfigured("cannot read it:\n  line 1\nwrite it")

    with pytest.raises(SystemExit, match=r"^cannot read it: line 1 write it$"):
        main()


def test_no_garbage_is_collected_during_the_imports_and_modules_are_never_visited() -> None:
    script = """
import asyncio, gc
from leyden.libs.service import HttpSettings
from leyden.libs.service.server import run_until_signal
from leyden.libs.service.startup import exit_on_config_error

@exit_on_config_error(HttpSettings)
def main():
    print(gc.isenabled(), gc.get_freeze_count())
    run_until_signal(serve)

async def serve(stop):
    print(gc.isenabled(), gc.get_freeze_count() > 10_000)

main()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False 0\nTrue True\n"


def start(service: str, **environment: str) -> tuple[int, str]:
    """Status of a process that cannot start, and all that it said."""
    variables = {"PATH": os.environ["PATH"], "TRAINER_RUN_ID": "run-a", **environment}
    command = [sys.executable, "-m", f"leyden.services.{service}"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_ends_with_a_line(service: str) -> None:
    words = "LEYDEN_LOG_LEVEL: should be 'debug', 'info', 'warning' or 'error'"
    assert start(service, LEYDEN_LOG_LEVEL="loud") == (1, f"{words}{END}\n")


def keys_that_are_garbage(folder: Path) -> tuple[str, dict[str, str], str]:
    file = folder / "keys.json"
    file.write_text("{")
    file.chmod(0o600)
    return "collector", {"LEYDEN_CAPABILITY_KEYS_FILE": str(file)}, f"cannot read the key ring {file}: "


def a_token_for_everybody(folder: Path) -> tuple[str, dict[str, str], str]:
    file = folder / "token"
    file.write_text("s3cret")
    file.chmod(0o644)
    return "api", {"API_ADMIN_TOKEN_FILE": str(file)}, f"{file} is open to other users (mode 0644): "


def an_empty_token(folder: Path) -> tuple[str, dict[str, str], str]:
    file = folder / "token"
    file.touch(0o600)
    return "api", {"API_ADMIN_TOKEN_FILE": str(file)}, f"{file} is empty: write the secret into it"


def no_model(folder: Path) -> tuple[str, dict[str, str], str]:
    return "gateway", {"GATEWAY_MODEL_PATH": str(folder)}, f"cannot read {folder}/tokenizer_config.json: "


def no_engine_key(folder: Path) -> tuple[str, dict[str, str], str]:
    file = folder / "absent"
    return "gateway", {"GATEWAY_ENGINE_API_KEY_FILE": str(file)}, f"cannot read the secret in {file}: "


def no_such_host(folder: Path) -> tuple[str, dict[str, str], str]:
    return "credit", {"CREDIT_INTERNAL_HOST": "256.0.0.1"}, "cannot listen on 256.0.0.1:0: "


@pytest.mark.parametrize(
    "case", [keys_that_are_garbage, a_token_for_everybody, an_empty_token, no_model, no_engine_key, no_such_host]
)
def test_a_file_that_cannot_be_used_is_a_line_too(
    case: Callable[[Path], tuple[str, dict[str, str], str]], tmp_path: Path
) -> None:
    service, environment, words = case(tmp_path)
    status, said = start(service, **environment)
    # Log lines may stand before it.
    last = said.splitlines()[-1]
    assert (status, last[: len(words)], "Traceback" in said, "s3cret" in said) == (1, words, False, False)


def test_sigterm_ends_the_first_process_of_a_container_while_it_imports() -> None:
    script = """
import os, time
os.getpid = lambda: 1
from leyden.libs.service import HttpSettings
from leyden.libs.service.startup import exit_on_config_error

@exit_on_config_error(HttpSettings)
def main():
    print("importing", flush=True)
    time.sleep(60)

main()
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.terminate()
        # Without a handler it would be -15, and nothing would happen to process 1.
        assert process.wait(30) == 143
