"""An agent that solves problems with a calculator, written with AutoGen.

The assistant calls the calculator as often as it likes, up to a limit, and then answers. The last line of output is its
answer as JSON: `{"answer": "…"}`. Nobody grades it here.
"""

import gc

# An attempt is short: collecting garbage during imports would be a tenth of its time.
gc.disable()

import asyncio  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from autogen_agentchat.agents import AssistantAgent  # noqa: E402
from autogen_agentchat.messages import TextMessage  # noqa: E402
from autogen_core.models import ModelInfo  # noqa: E402
from autogen_ext.models.openai import OpenAIChatCompletionClient  # noqa: E402
from calculator import calculate  # noqa: E402

MODEL = os.environ.get("OPENAI_MODEL", "SmolLM2-135M-Instruct")
TEMPERATURE = 0.8
MAX_TOKENS = 96
CALLS = 6
SYSTEM = "Solve the problem with the calculator, then answer with the number alone."


async def solve(question: str) -> str:
    """Return the assistant's answer; nothing where its last call still calculates."""
    info = ModelInfo(vision=False, function_calling=True, json_output=False, structured_output=False, family="unknown")
    client = OpenAIChatCompletionClient(
        model=MODEL, temperature=TEMPERATURE, max_tokens=MAX_TOKENS, model_info=info, parallel_tool_calls=False
    )
    assistant = AssistantAgent("solver", client, tools=[calculate], system_message=SYSTEM, max_tool_iterations=CALLS)
    result = await assistant.run(task=question)
    await client.close()
    last = result.messages[-1]
    return last.content.strip() if isinstance(last, TextMessage) else ""


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else os.environ.get("LEYDEN_TASK")
    if not text:
        sys.exit("no task: set LEYDEN_TASK to a JSON object, or name a JSON file as the first argument")
    print(json.dumps({"answer": asyncio.run(solve(json.loads(text)["question"]))}))
