"""A question-answering agent with OpenAI's Agents SDK, on the Responses API: it searches entries, and then answers.

The last line of output is JSON: `{"answer": "Euro", "text": "Answer: Euro", "searches": 2}`. Nobody grades it here.
"""

import gc

# An attempt is short: collecting garbage during imports would be a tenth of its time.
gc.disable()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled  # noqa: E402
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError  # noqa: E402
from search import Index  # noqa: E402

MODEL = os.environ.get("OPENAI_MODEL", "SmolLM2-135M-Instruct")
TEMPERATURE = 0.8
MAX_TOKENS = 64
# Two searches, an answer, and a search that was of no use.
TURNS = 4
INSTRUCTIONS = "You answer questions about countries and cities. Search for a name, then reply with one line: Answer: …"
ANSWER = "Answer:"


def ask(question: str) -> dict[str, object]:
    """Let the agent answer; a model that calls tools wrongly, or for ever, has no answer."""
    index, searches = Index(), list[str]()

    @function_tool
    def search(query: str) -> str:
        """Search countries and cities by name."""
        searches.append(query)
        return "\n".join(index.search(query)) or "Nothing found."

    agent = Agent(
        name="Searcher",
        instructions=INSTRUCTIONS,
        model=MODEL,
        model_settings=ModelSettings(temperature=TEMPERATURE, max_tokens=MAX_TOKENS, parallel_tool_calls=False),
        tools=[search],
    )
    try:
        text = str(Runner.run_sync(agent, question, max_turns=TURNS).final_output).strip()
    except (MaxTurnsExceeded, ModelBehaviorError):
        text = ""
    return {"answer": text.removeprefix(ANSWER).strip(), "text": text, "searches": len(searches)}


if __name__ == "__main__":
    set_tracing_disabled(True)
    given = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else os.environ.get("LEYDEN_TASK")
    if not given:
        sys.exit("no task: set LEYDEN_TASK to a JSON object, or name a JSON file as the first argument")
    print(json.dumps(ask(json.loads(given)["question"])))
