"""The start of every conversation: a system line and two examples, the same for all tasks.

A model of 135 million parameters takes format and habits from the examples; README.md tells what other wordings gave.
Nothing here says which tool comes first for a cancelled flight.
"""

SYSTEM = "Pick the tool for the next step: search, memory or calculator. Reply with one line: tool: question."

# Turns alternate between the user and the assistant, starting with the user.
EXAMPLES = (
    "The metro is closed. How do I get to the museum?",
    "search: way to the museum",
    "Tram 4 leaves the square at 8:20 for 2 euros. Answer the user now.",
    "Take Tram 4 at 8:20.",
    "My bike is broken. How do I get home tonight?",
    "memory: where do I live",
    "You live in Porto. Next tool?",
    "search: bus to Porto",
    "Blueline leaves the station at 10:30 for 9 euros. Answer the user now.",
    "Take Blueline at 10:30.",
)


def opening(question: str) -> list[dict[str, str]]:
    """Return the messages of a new conversation; the task's own text comes last, so that all tasks share the rest."""
    roles = ("user", "assistant")
    examples = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(EXAMPLES)]
    return [{"role": "system", "content": SYSTEM}, *examples, {"role": "user", "content": question}]
