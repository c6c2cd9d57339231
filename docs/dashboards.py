"""The Grafana dashboards of the chart: `make docs` writes them to `helm/leyden/dashboards/`.

Curves over steps, and everything about one run, come from the views of the schema `reports` in Postgres. Rates and
latencies of processes come from Prometheus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Json = dict[str, Any]

WIDTH = 24
PANEL = {"w": 8, "h": 8}
POSTGRES = {"type": "grafana-postgresql-datasource", "uid": "${postgres}"}
PROMETHEUS = {"type": "prometheus", "uid": "${prometheus}"}
RUN = "run_id = ${run:sqlstring}"
POLICY = "policy_id = ${run:sqlstring}"
RUN_OF_POLICY = f"run_id = (SELECT run_id FROM reports.policies WHERE {POLICY})"
"""For rows that a run has for all of its policies."""
PLACES = {"namespace": "namespace", "release": "app_kubernetes_io_instance"}
"""Pickers of panels from Prometheus, and the labels that they choose; outside Kubernetes no series has them."""
METRIC = re.compile(r"\b((?:collector|controller|credit|gateway|grader|leyden|process|runner|trainer)_\w+|up)\b(\{)?")


def source_variable(name: str, kind: str) -> Json:
    """The choice of a data source, hidden where Grafana has one of the kind."""
    return {"name": name, "type": "datasource", "query": kind, "label": name.capitalize(), "current": {}, "hide": 0}


RUNS = "SELECT run_name || ' ' || run_id AS __text, run_id AS __value FROM reports.runs ORDER BY created_at DESC"
POLICIES = (
    "SELECT concat_ws(' ', run_name, policy, policy_id) AS __text, policy_id AS __value FROM reports.policies"
    " ORDER BY created_at DESC, policy NULLS FIRST"
)


def run_variable(query: str = RUNS) -> Json:
    """The run picker, the newest run first; with POLICIES each run's own model, then its further policies."""
    return {
        "name": "run", "type": "query", "label": "Run", "datasource": POSTGRES, "query": query, "definition": query,
        "refresh": 2, "sort": 0, "multi": False, "includeAll": False,
    }  # fmt: skip


def place_variable(name: str) -> Json:
    """The picker of a namespace or of a release: all of them at first."""
    query = f"label_values(up, {PLACES[name]})"
    return {
        "name": name, "type": "query", "label": name.capitalize(), "datasource": PROMETHEUS, "query": query,
        "definition": query, "refresh": 2, "sort": 1, "multi": True, "includeAll": True, "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def in_place(expression: str) -> str:
    """PromQL whose series are those of the picked namespaces and releases."""
    chosen = ", ".join(f'{label}=~"${name}"' for name, label in PLACES.items())
    named = METRIC.sub(lambda found: f"{found[1]}{{{chosen}{', ' if found[2] else '}'}", expression)
    return named.replace("{__name__=", f"{{{chosen}, __name__=")


def sql_panel(kind: str, title: str, query: str, *, form: str, unit: str = "short", **options: Any) -> Json:
    """A panel over one SQL query.

    Args: kind: Grafana's panel type; form: `table`, or `time_series` for rows of (time, metric, value)
    """
    target = {"refId": "A", "datasource": POSTGRES, "rawSql": query, "rawQuery": True, "editorMode": "code"}
    return {
        "type": kind, "title": title, "datasource": POSTGRES, "targets": [target | {"format": form}],
        "fieldConfig": {"defaults": {"unit": unit, "custom": {}}, "overrides": []}, "options": options,
    }  # fmt: skip


def over_steps(title: str, columns: Mapping[str, str], unit: str = "short") -> Json:
    """Curves over the optimiser steps of the picked run.

    Args: columns: legend → SQL expression over `reports.steps`
    """
    selected = ", ".join(f'{expression} AS "{legend}"' for legend, expression in columns.items())
    query = f"SELECT step, {selected} FROM reports.steps WHERE {RUN} ORDER BY step"
    return sql_panel("trend", title, query, form="table", unit=unit, xField="step")


def over_time(title: str, query: str, unit: str = "short") -> Json:
    """Curves over the time that Grafana shows; the query gives rows of (time, metric, value)."""
    return sql_panel("timeseries", title, query, form="time_series", unit=unit)


def table(title: str, query: str) -> Json:
    """Rows as they are."""
    return sql_panel("table", title, query, form="table")


def one_number(title: str, expression: str, view: str, picked: str, unit: str = "short") -> Json:
    """The newest value of a column for the picked run. Args: picked: the condition on the view's rows"""
    order = "created_at DESC"
    query = f"SELECT {expression} FROM reports.{view} WHERE {picked} ORDER BY {order} LIMIT 1"
    reduce = {"calcs": ["lastNotNull"], "fields": "/.*/", "values": False}
    panel = sql_panel("stat", title, query, form="table", unit=unit, reduceOptions=reduce)
    return panel | {"size": {"w": 6, "h": 4}}


def metric(title: str, expressions: Mapping[str, str], unit: str = "short") -> Json:
    """Curves from Prometheus.

    Args: expressions: legend → PromQL
    """
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": PROMETHEUS,
            "expr": in_place(expression),
            "legendFormat": legend,
        }
        for number, (legend, expression) in enumerate(expressions.items())
    ]
    return {
        "type": "timeseries", "title": title, "datasource": PROMETHEUS, "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "custom": {}}, "overrides": []}, "options": {},
    }  # fmt: skip


def quantiles(histogram: str, by: str = "") -> dict[str, str]:
    """PromQL of the median and the 95th percentile of a histogram; `by` adds a label to the legend."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    buckets = f"sum by ({labels}) (rate({histogram}_bucket[$__rate_interval]))"
    return {
        f"{name}{legend}": f"histogram_quantile({share}, {buckets})" for name, share in (("p50", 0.5), ("p95", 0.95))
    }


def rate(counter: str, by: str) -> dict[str, str]:
    """PromQL of a counter's rate for each value of a label."""
    return {f"{{{{{by}}}}}": f"sum by ({by}) (rate({counter}[$__rate_interval]))"}


def dashboard(name: str, panels: Iterable[Json], variables: Sequence[Json]) -> Json:
    """A dashboard whose panels flow from left to right."""
    placed, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        size = panel.get("size", PANEL)
        if x + size["w"] > WIDTH or (height and size["h"] != height):
            x, y = 0, y + height
        height = size["h"]
        shown = {key: value for key, value in panel.items() if key != "size"}
        placed.append({"id": number, "gridPos": size | {"x": x, "y": y}, **shown})
        x += size["w"]
    picks_run = any(variable["name"] == "run" for variable in variables)
    return {
        "uid": f"leyden-{name.lower()}", "title": f"Leyden / {name}", "tags": ["leyden"], "schemaVersion": 39,
        "editable": True, "refresh": "10s", "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": list(variables)}, "annotations": {"list": [new_versions()] if picks_run else []},
        "panels": placed,
    }  # fmt: skip


def new_versions() -> Json:
    """A mark in every curve over time where the trainer made a policy version."""
    query = (
        "SELECT created_at AS time, 'policy version ' || version AS text FROM reports.policy_versions"
        f" WHERE {RUN} AND $__timeFilter(created_at) ORDER BY created_at"
    )
    target = {"refId": "A", "rawSql": query, "rawQuery": True, "editorMode": "code", "format": "table"}
    return {"name": "Policy versions", "datasource": POSTGRES, "enable": True, "iconColor": "blue", "target": target}


TRAINING = (
    one_number("Phase", "coalesce(phase || ': ' || reason, phase)", "runs", RUN_OF_POLICY),
    one_number("Steps", "steps", "policies", POLICY),
    one_number("Policy version", "policy_version", "policies", POLICY),
    one_number("Reward of the last step", "reward_mean", "steps", RUN),
    over_steps(
        "Reward",
        {
            "mean": "reward_mean",
            "mean - spread": "reward_mean - reward_std",
            "mean + spread": "reward_mean + reward_std",
        },
    ),
    over_steps("Success (rollouts with a reward above 0)", {"success": "success_share"}, "percentunit"),
    over_steps("Spread within groups", {"standard deviation": "group_reward_std"}),
    over_steps("Groups whose siblings differ", {"share": "groups_with_variance_share"}, "percentunit"),
    table(
        "Reward by source and name",
        "SELECT source, name, count(*) AS rewards, avg(value) AS mean, min(value) AS least, max(value) AS greatest"
        f" FROM reports.rewards WHERE {RUN_OF_POLICY} GROUP BY source, name ORDER BY source, name",
    ),
    sql_panel(
        "trend", "Credit of model calls",
        'SELECT step, avg(intermediate_reward) AS "intermediate reward", avg(abs(advantage)) AS "advantage, absolute"'
        f" FROM reports.credits WHERE {RUN} AND step IS NOT NULL GROUP BY step ORDER BY step",
        form="table", xField="step",
    ),
    over_steps("Policy lag, in versions", {"mean": "policy_lag_mean", "greatest": "policy_lag_max"}),
    over_steps("KL to the reference, in nats", {"KL": "kl_reference"}),
    over_steps("Tokens whose ratio was clipped", {"share": "clipped_share"}, "percentunit"),
    over_steps("Entropy of sampled tokens, in nats", {"entropy": "entropy"}),
    over_steps("Mismatch of trainer and engine, in nats", {"mean gap": "logprob_gap_mean"}),
    over_steps("Effective sample size", {"share": "effective_sample_share"}, "percentunit"),
    over_steps("Loss and gradient", {"loss": "loss", "gradient norm": "gradient_norm"}),
    over_steps("Trained tokens a second", {"tokens/s": "trained_tokens_per_second"}),
    over_steps(
        "Seconds of a step",
        {name: f"{name}_seconds" for name in ("load", "gradients", "optimizer", "export")} | {"all": "step_seconds"},
        "s",
    ),
    table(
        "Evaluations",
        "SELECT evaluation_id, count(*) AS rollouts, avg(newest_reward) AS reward_mean,"
        " stddev_samp(newest_reward) AS reward_std"
        f" FROM reports.rollouts WHERE {RUN_OF_POLICY} AND evaluation_id IS NOT NULL AND newest_reward IS NOT NULL"
        " GROUP BY evaluation_id ORDER BY evaluation_id",
    ),
    over_time(
        "Reward of every run, over time",
        "SELECT created_at AS time, run_name AS metric, reward_mean AS value FROM reports.steps"
        " WHERE $__timeFilter(created_at) ORDER BY created_at",
    ),
)  # fmt: skip

_MINUTE = "date_trunc('minute', {0}) AS time"

ROLLOUTS = (
    over_time(
        "Rollouts that ended, a minute",
        f"SELECT {_MINUTE.format('finished_at')}, state || ': ' || coalesce(reason, '') AS metric, count(*) AS value"
        f" FROM reports.rollouts WHERE {RUN} AND $__timeFilter(finished_at) GROUP BY 1, 2 ORDER BY 1",
    ),
    over_time(
        "Attempts that ended, a minute",
        f"SELECT {_MINUTE.format('finished_at')}, coalesce(kind, state) AS metric, count(*) AS value"
        f" FROM reports.attempts WHERE {RUN} AND $__timeFilter(finished_at) GROUP BY 1, 2 ORDER BY 1",
    ),
    table("States now", f"SELECT state, count(*) AS rollouts FROM reports.rollouts WHERE {RUN} GROUP BY state"),
    metric("Attempts at work", {"running": "sum(runner_attempts_running)"}),
    metric("Rollouts that wait for an attempt", {"queued": "sum(controller_rollouts_queued)"}),
    over_time(
        "Waiting and working time (95th percentile)",
        f"SELECT {_MINUTE.format('finished_at')}, percentile_cont(0.95) WITHIN GROUP (ORDER BY queue_seconds) AS queue,"
        " percentile_cont(0.95) WITHIN GROUP (ORDER BY work_seconds) AS work"
        f" FROM reports.rollouts WHERE {RUN} AND $__timeFilter(finished_at) GROUP BY 1 ORDER BY 1",
        "s",
    ),
    over_time(
        "Attempts per finished rollout",
        f"SELECT {_MINUTE.format('finished_at')}, avg(attempts) AS attempts FROM reports.rollouts"
        f" WHERE {RUN} AND state = 'finished' AND $__timeFilter(finished_at) GROUP BY 1 ORDER BY 1",
    ),
    table(
        "Attempts without success, by cause",
        "SELECT kind, detail, count(*) AS attempts, max(finished_at) AS last FROM reports.attempts"
        f" WHERE {RUN} AND kind <> 'succeeded' GROUP BY kind, detail ORDER BY attempts DESC LIMIT 50",
    ),
    metric("Attempts settled", rate("runner_attempts_ended_total", "kind")),
    metric(
        "Leases",
        {
            "expired": "sum(rate(controller_leases_expired_total[$__rate_interval]))",
            "lost": "sum(rate(runner_leases_lost_total[$__rate_interval]))",
        },
    ),
    metric("Seconds from lease to outcome", quantiles("runner_attempt_seconds"), "s"),
    metric("Groups credited", rate("credit_groups_total", "verdict")),
    metric(
        "Tool calls by status",
        {"{{status}}": "sum by (status) (rate(credit_tool_calls_total[$__rate_interval])) or vector(0)"},
    ),
)

SERVING = (
    metric("Model calls", rate("gateway_calls_total", "status"), "reqps"),
    metric("Seconds of a model call", quantiles("gateway_call_seconds"), "s"),
    metric("Seconds to the first token", quantiles("gateway_first_token_seconds"), "s"),
    metric("Tokens a second", rate("gateway_tokens_total", "kind")),
    metric(
        "Calls in flight",
        {"in flight": "sum(gateway_calls_in_flight)", "held for an engine": "sum(gateway_held_calls)"},
    ),
    metric("Seconds until a call is durable", quantiles("gateway_record_seconds"), "s"),
    metric(
        "Prompts and retries",
        {
            "forks": 'sum(rate(gateway_prompts_total{continuation="fork"}[$__rate_interval])) or vector(0)',
            "untrainable": "sum(rate(gateway_untrainable_calls_total[$__rate_interval]))",
            "replayed": "sum(rate(gateway_replays_total[$__rate_interval])) or vector(0)",
            "sent again": "sum(rate(gateway_engine_retries_total[$__rate_interval])) or vector(0)",
        },
    ),
    metric(
        "Engines that serve every run's target version, and runs that none serves",
        {
            "{{pool}}": "max by (pool) (controller_engines_serving)",
            "unserved {{pool}}": "max by (pool) (controller_runs_unserved)",
        },
    ),
    metric("Weight updates", rate("controller_engine_updates_total", "result")),
    metric("Seconds of a weight update", quantiles("controller_engine_update_seconds"), "s"),
    metric(
        "Requests at engines",
        {
            "running {{instance}}": '{__name__="sglang:num_running_reqs"}',
            "waiting {{instance}}": '{__name__="sglang:num_queue_reqs"}',
        },
    ),
    metric("Share of prompts found in the prefix cache", {"{{instance}}": '{__name__="sglang:cache_hit_rate"}'}),
    metric("Tokens generated a second", {"{{instance}}": '{__name__="sglang:gen_throughput"}'}),
    metric("Use of the engine's memory for tokens", {"{{instance}}": '{__name__="sglang:token_usage"}'}, "percentunit"),
    table(
        "Engines",
        "SELECT url, state, run_id, policy_version, detail, updated_at FROM reports.engines ORDER BY url",
    ),
)

PLATFORM = (
    metric("Processes up", {"{{job}} {{instance}}": "up"}),
    metric("Requests", rate("leyden_http_request_seconds_count", "service"), "reqps"),
    metric(
        "Requests answered with 5xx",
        {
            "{{service}}": 'sum by (service) (rate(leyden_http_request_seconds_count{status=~"5.."}[$__rate_interval]))'
            " or vector(0)"
        },
        "reqps",
    ),
    metric("Seconds of a request", quantiles("leyden_http_request_seconds", "service"), "s"),
    metric("Memory", {"{{job}} {{instance}}": "process_resident_memory_bytes"}, "bytes"),
    metric("Processor time", {"{{job}} {{instance}}": "rate(process_cpu_seconds_total[$__rate_interval])"}),
    metric("Spans made durable", {"spans": "sum(rate(collector_spans_total[$__rate_interval]))"}),
    metric("Seconds of a collector's transaction", quantiles("collector_commit_seconds"), "s"),
    metric("Seconds of a batch of credit", quantiles("credit_batch_seconds"), "s"),
    metric("Seconds of a controller's tick", quantiles("controller_tick_seconds"), "s"),
    metric("Request bodies in memory", {"{{job}} {{instance}}": "leyden_body_bytes"}, "bytes"),
    metric(
        "Clients refused",
        {"{{cause}}": "sum by (cause) (rate(leyden_http_refusals_total[$__rate_interval])) or vector(0)"},
    ),
    table("Tables of Postgres", "SELECT table_name, bytes FROM reports.storage ORDER BY bytes DESC"),
    table(
        "Weights on disk",
        "SELECT run_id, count(*) AS versions, sum(size_bytes) AS bytes FROM reports.policy_versions"
        " WHERE pruned_at IS NULL GROUP BY run_id ORDER BY bytes DESC",
    ),
    table("Runs", "SELECT * FROM reports.runs ORDER BY created_at DESC LIMIT 50"),
)  # fmt: skip


def dashboards() -> dict[str, str]:
    """File name → JSON text of each dashboard."""
    sources = [source_variable("postgres", POSTGRES["type"]), source_variable("prometheus", "prometheus")]
    places = [*sources, *map(place_variable, PLACES)]
    of_a_policy = [*sources, run_variable(POLICIES)]
    made = [
        dashboard("Training", TRAINING, of_a_policy),
        dashboard("Rollouts", ROLLOUTS, [*places, run_variable()]),
        dashboard("Serving", SERVING, places),
        dashboard("Platform", PLATFORM, places),
    ]
    return {f"{one['uid'].removeprefix('leyden-')}.json": json.dumps(one, indent=1) + "\n" for one in made}
