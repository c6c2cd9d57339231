"""Settings of the grader, read from `GRADER_…` and the shared `LEYDEN_…`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from leyden.libs.service import ServiceSettings
from leyden.libs.service.providers import Provider


class Settings(ServiceSettings):
    """The number of gradings at once, and their bounds."""

    model_config = SettingsConfigDict(env_prefix="GRADER_")

    processes: int = Field(default=2, ge=1, le=256)
    """Processes that run built-in graders; each grades one attempt at a time."""
    component_seconds: float = Field(default=10.0, gt=0)
    """Limit on one component of one attempt; then its process ends, and the component has failed."""
    providers: dict[str, Provider] = Field(default_factory=dict)
    """Servers of OpenAI's chat completions whose models judge (graders `score_model` and `relative_model`), as a JSON
    object by name: `{"judge": {"url": "https://api.openai.com/v1", "api_key_file": "/secrets/judge"}}`."""
    judge_calls: int = Field(default=16, ge=1, le=4096)
    """Calls of judges that run at once, attempts that wait for a score, and groups that wait for a comparison; attempts
    of other runs do not wait for them."""
    judge_seconds: float = Field(default=120.0, gt=0)
    """Limit on one call of a judge; then it is repeated."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """Duration of a lease, which the grader renews three times within it. After that another grader takes the
    attempt."""
    poll_seconds: float = Field(default=2.0, gt=0)
    """Seconds between polls for attempts without a wake-up."""
    database_pool_size: int = Field(default=3, ge=2)
    """Connections to Postgres: for leases, renewals and results."""
