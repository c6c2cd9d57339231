"""Compactions of the Responses API: the served model sums a conversation up, in a call that is recorded like others.

The answer is what OpenAI's documentation calls the next context window: all user messages, then one `compaction` item.
At OpenAI its content is encrypted; here it is the model's own text, which a later prompt shows as a user's message.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from leyden.libs.contracts.conversation import Json, Turn
from leyden.services.gateway.calls.context import Attempt, Completion, ModelRequest
from leyden.services.gateway.dialects.responses.dialect import Responses, ResponsesRequest, usage_of
from leyden.services.gateway.dialects.responses.items import SUMMARY, SUMMARY_TURN, items_of

ASK = (
    "Sum up this conversation for whoever goes on with it and sees nothing of it but the user's messages: what was"
    " asked, what was done and found out, with exact names, values and results, and what is left to do. Answer with"
    " the summary alone."
)


class Compaction(Responses):
    """The wire format of `POST /responses/compact`: a request of the Responses API that asks for a summary."""

    def parse(self, body: bytes, *, max_choices: int) -> ResponsesRequest:
        """Parses the fields of a response's request that say what to sum up.

        Raises: BadRequest: not JSON, a field is wrong, or the model cannot serve a field
        """
        request = super().parse(body, max_choices=max_choices)
        return replace(
            request,
            stream=False,
            parses_tool_calls=False,
            answer_schema=None,
            required_tools=(),
            parameters=request.parameters | {"compaction": True},
            # The same body asks for a response at another address.
            body_sha256=hashlib.sha256(b"compact\n" + body).digest(),
        )

    async def expand(self, attempt: Attempt, request: ModelRequest) -> ModelRequest:
        """Returns the request with its conversation, and the question for the summary as its last turn."""
        expanded = await super().expand(attempt, request)
        return replace(expanded, turns=(*expanded.turns, Turn("user", ASK)))

    async def remember(self, attempt: Attempt, request: ModelRequest, completion: Completion) -> None:
        """Leaves a conversation as it is: the summary is no answer in it."""

    def body(self, request: ModelRequest, completion: Completion) -> Json:
        """Returns a `response.compaction` object."""
        call, [answer] = completion.request_id, completion.answers
        *turns, _ask = request.turns[1 if request.parameters.get("instructions") else 0 :]
        said = [
            item
            for index, turn in enumerate(turns)
            # A compaction before this one is in the new summary.
            if turn.role == "user" and not turn.content.startswith(SUMMARY_TURN)
            for item in items_of(turn, f"{call}_i{index}")
        ]
        item = {"id": f"cmp_{call}", "type": "compaction", "encrypted_content": SUMMARY + answer.turn.content}
        return {
            "id": f"cmp_{call}",
            "object": "response.compaction",
            "created_at": completion.created,
            "output": [*said, item],
            "usage": usage_of(completion),
        }
