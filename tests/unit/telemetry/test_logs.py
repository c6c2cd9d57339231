import json
import logging

import pytest
import structlog

from leyden.libs.telemetry import RateLimitedLogger, bind, configure_logs, logger
from leyden.libs.telemetry.logs import _dumps, redact


@pytest.fixture
def _restored() -> object:
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("_restored")
def test_lines_are_json_with_the_event_first_and_bound_facts(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("gateway", "info")
    with bind(rollout_id="run-a.0.1"):
        logger().info("call recorded", call_id="c1", tokens=3)
    logger().debug("not said")
    logging.getLogger("library").warning("odd %s", "thing")
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert list(first)[:4] == ["event", "level", "ts", "service"]
    assert {name: first[name] for name in ("event", "service", "rollout_id", "call_id", "tokens")} == {
        "event": "call recorded",
        "service": "gateway",
        "rollout_id": "run-a.0.1",
        "call_id": "c1",
        "tokens": 3,
    }
    assert (second["event"], second["level"]) == ("odd thing", "warning")


@pytest.mark.usefixtures("_restored")
def test_facts_are_bound_as_long_as_their_block(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("gateway", "info")
    with bind(attempt=1, run_id="run-a"):
        with bind(attempt=2):
            logger().info("inside")
        logger().info("between")
    logger().info("outside")
    lines = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [(line.get("attempt"), line.get("run_id")) for line in lines] == [(2, "run-a"), (1, "run-a"), (None, None)]


@pytest.mark.usefixtures("_restored")
def test_secrets_in_tracebacks_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("api")
    try:
        raise ValueError("cannot reach postgresql://leyden:hunter2@db/leyden")
    except ValueError:
        logger().exception("failed")
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert "postgresql://leyden:[redacted]@db/leyden" in out


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"api_key": "k"}, {"api_key": "[redacted]"}),
        ({"Authorization": "Bearer k"}, {"Authorization": "[redacted]"}),
        ({"nested": {"token": "k", "n": 1}}, {"nested": {"token": "[redacted]", "n": 1}}),
        ({"messages": [{"role": "user"}]}, {"messages": "[redacted]"}),
        ({"detail": "sent Bearer abc.def to it"}, {"detail": "sent Bearer [redacted] to it"}),
        ({"items": ["eyJhbGciOiJIUzI1NiJ9.eyJydW4.c2ln"]}, {"items": ["[redacted]"]}),
        ({"url": "redis://h:1/0", "prompt_tokens": 5}, {"url": "redis://h:1/0", "prompt_tokens": 5}),
    ],
)
def test_redaction(facts: dict[str, object], expected: dict[str, object]) -> None:
    assert redact(None, "info", dict(facts)) == expected


@pytest.mark.usefixtures("_restored")
def test_a_repeated_warning_is_written_once_per_period_with_the_count_of_the_suppressed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("gateway", "info")
    now = [0.0]
    limited_log = RateLimitedLogger(logger(), seconds=30, clock=lambda: now[0])
    for second in (0, 1, 29, 30, 31, 90):
        now[0] = second
        limited_log.warning("store away", cause=f"at {second}")
        limited_log.warning("queue away")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["cause"], line.get("suppressed")) for line in lines if line["event"] == "store away"] == [
        ("at 0", None),
        ("at 30", 2),
        ("at 90", 1),
    ]
    assert len([line for line in lines if line["event"] == "queue away"]) == 3


def test_half_of_a_surrogate_pair_is_written_as_an_escape() -> None:
    assert json.loads(_dumps({"event": "attempt ended", "detail": "\ud800"})) == {
        "event": "attempt ended",
        "detail": "\ud800",
    }
