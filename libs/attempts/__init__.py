"""The agent's side of an attempt: its environment, its key, and whose failure a failure is.

The runner uses it for agents that it starts, the API for agents that it does not.
"""

from leyden.libs.attempts.endpoint_monitor import EndpointMonitor, attribute_failure
from leyden.libs.attempts.environment import Endpoints, environment_block, secrets_block
from leyden.libs.attempts.key import attempt_key

__all__ = [
    "EndpointMonitor",
    "Endpoints",
    "attempt_key",
    "attribute_failure",
    "environment_block",
    "secrets_block",
]
