"""Everything that the processes of the platform share: settings, an HTTP application, health, errors, limits, signals.

A service builds its application with `app.create_app` and runs it with `run_http`; a worker gives its loop to
`run_worker`. Both get an internal port for health and metrics, and the same shutdown. `app` and `json_body` alone load
FastAPI: workers do without. Depends on `leyden.libs.telemetry`, and on `leyden.libs.contracts` for reading JSON.
"""

from leyden.libs.contracts.addresses import HttpAddress
from leyden.libs.service.errors import JsonResponse, Problem, problem_response
from leyden.libs.service.health import Checks, add_health, create_internal_app
from leyden.libs.service.limits import Budget, Limits, Overloaded, Share, ShareUsed
from leyden.libs.service.server import run_http, serving
from leyden.libs.service.settings import HttpSettings, ServiceSettings
from leyden.libs.service.worker import pause, run_worker

__all__ = [
    "Budget",
    "Checks",
    "HttpAddress",
    "HttpSettings",
    "JsonResponse",
    "Limits",
    "Overloaded",
    "Problem",
    "ServiceSettings",
    "Share",
    "ShareUsed",
    "add_health",
    "create_internal_app",
    "pause",
    "problem_response",
    "run_http",
    "run_worker",
    "serving",
]
