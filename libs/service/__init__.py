"""What every process of the platform shares: settings, an HTTP application, health, problem answers, signals.

A service builds its door with `app.create_app`, or with `plain.create_plain_app`, and runs it with `run_http`; a worker
gives `run_worker` its loop. FastAPI is loaded by `app` and `bodies` alone: workers and the gateway do without.
All get an internal port for health and metrics, and the same shutdown. Depends on `leyden.libs.telemetry`,
and on `leyden.libs.contracts` for how JSON is read.
"""

from leyden.libs.service.budget import Budget, Overloaded, Share
from leyden.libs.service.health import Checks
from leyden.libs.service.http import run_http, serving
from leyden.libs.service.internal import add_health, create_internal_app
from leyden.libs.service.problems import JsonResponse, Problem, problem_response
from leyden.libs.service.protocol import Limits
from leyden.libs.service.settings import DoorSettings, ServiceSettings
from leyden.libs.service.worker import pause, run_worker

__all__ = [
    "Budget",
    "Checks",
    "DoorSettings",
    "JsonResponse",
    "Limits",
    "Overloaded",
    "Problem",
    "ServiceSettings",
    "Share",
    "add_health",
    "create_internal_app",
    "pause",
    "problem_response",
    "run_http",
    "run_worker",
    "serving",
]
