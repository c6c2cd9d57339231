"""Hands the attempts of a run to the service until the run has ended, many at a time in one event loop.

LEYDEN_URL and LEYDEN_TOKEN say where the platform is; the arguments are the run and the service's address.
"""

import asyncio
import os
import sys

import httpx

from leyden import Client, RunEnded

AT_ONCE = 16


async def hand_over(client: Client, run: str, service: httpx.AsyncClient) -> None:
    """Hands over one attempt after another. A failure of the service ends its attempt as failed."""
    while True:
        try:
            async with client.attempt(run, worker="service") as attempt:
                headers = {"authorization": f"Bearer {attempt.api_key}"}
                answer = await service.post("/", json=attempt.task, headers=headers)
                attempt.facts = answer.raise_for_status().json()
                attempt.reward = attempt.facts.pop("reward")
        except RunEnded:
            return
        except httpx.HTTPError as error:
            print(f"attempt failed: {error}", file=sys.stderr)


async def main(run: str, service: str) -> None:
    limits = httpx.Limits(max_connections=None)
    with Client(os.environ["LEYDEN_URL"], os.environ["LEYDEN_TOKEN"], patience_seconds=120) as client:
        async with httpx.AsyncClient(base_url=service, timeout=180, limits=limits) as http:
            await asyncio.gather(*(hand_over(client, run, http) for _ in range(AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
