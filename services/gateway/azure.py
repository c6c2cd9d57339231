"""Azure OpenAI's addresses: OpenAI's routes below `/openai`, and deployments, whose names are the names of models.

Azure's clients send the key as `api-key` or as a bearer token. Their `api-version` changes nothing: every version gets
the newest form of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Route

from leyden.services.gateway.requests import ATTEMPT, BASE, moved

AZURE = ATTEMPT + "/openai"
DEPLOYMENT = AZURE + "/deployments/{deployment:path}"
DEPLOYED = [BASE + path for path in ("/chat/completions", "/completions", "/embeddings")]


def azure_routes(openai: Sequence[Route]) -> list[Route]:
    """The routes of Azure OpenAI that the routes of OpenAI serve.

    Args: openai: chat completions before completions, because the name of a deployment may have slashes
    """
    deployed = [route for route in openai if route.path in DEPLOYED]
    return [*moved(deployed, BASE, DEPLOYMENT), *moved(openai, BASE, AZURE), *moved(openai, BASE, AZURE + "/v1")]
