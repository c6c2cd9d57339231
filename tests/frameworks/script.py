"""Answers that the scripted engine samples: each follows from the prompt's text alone, whatever was asked before."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tests.fakes.chat_model import EOS, HE

QUESTION = "What is the weather in Paris, and what is the time in Rome?"
FOLLOW_UP = "And the weather in Atlantis?"
"""The weather tool of every agent fails there."""
FIRST_ANSWER = "There is light rain in Paris, and it is 12:30 in Rome."
SECOND_ANSWER = "Nobody knows the weather there."
REQUEST = "Report light rain and 12:30 as an object."
REPORT = {"weather": "light rain", "time": "12:30"}

Script = Callable[[str], str]


def call(name: str, **arguments: object) -> str:
    """A tool call in the model's own spelling; the blanks are not those of `json.dumps`."""
    document = json.dumps({"name": name, "arguments": arguments}, separators=(",  ", ":  "))
    return f"<tool_call>\n{document}\n</tool_call>"


TWO_CALLS = f"Let me see the two.\n{call('get_weather', city='Paris')}\n{call('get_time', city='Rome')}"
FAILING_CALL = call("get_weather", city="Atlantis")


def tools(prompt: str) -> str:
    """Two parallel calls, the first answer, a call that fails, the second answer."""
    last = prompt.split("<|im_start|>")[-2]
    return _next(prompt, last.startswith("tool\n"), (TWO_CALLS, FIRST_ANSWER, FAILING_CALL, SECOND_ANSWER))


def claude(prompt: str) -> str:
    """The same with the names that Claude's program gives to the tools of an MCP server."""
    return tools(prompt).replace('"get_', '"mcp__cities__get_')


def final_answer_tool(prompt: str) -> str:
    """The same for smolagents' ToolCallingAgent, which writes results as text and whose answer is a call."""
    answers = [call("final_answer", answer=answer) for answer in (FIRST_ANSWER, SECOND_ANSWER)]
    return _next(prompt, _has_result(prompt), (TWO_CALLS, answers[0], FAILING_CALL, answers[1]))


def code(prompt: str) -> str:
    """The same as Python, for smolagents' CodeAgent."""
    steps = (
        'print(get_weather(city="Paris"), get_time(city="Rome"))',
        f'final_answer("{FIRST_ANSWER}")',
        'print(get_weather(city="Atlantis"))',
        f'final_answer("{SECOND_ANSWER}")',
    )
    said = [f"Thought: the next step.\n<code>\n{step}\n</code>" for step in steps]
    return _next(prompt, _has_result(prompt), said)


def fields(prompt: str) -> str:
    """The same as fields in DSPy's marks, one tool after the other."""
    is_second, step = "Atlantis" in prompt, prompt.count("## observation_")
    if "## next_tool_name ##" not in prompt:
        return _marked(reasoning="So it is.", answer=SECOND_ANSWER if is_second else FIRST_ANSWER)
    calls = [("get_weather", "Atlantis")] if is_second else [("get_weather", "Paris"), ("get_time", "Rome")]
    name, arguments = (calls[step][0], {"city": calls[step][1]}) if step < len(calls) else ("finish", {})
    return _marked(next_thought="The next step.", next_tool_name=name, next_tool_args=json.dumps(arguments))


def shell(name: str, argument: str, **more: object) -> Script:
    """The script of a coding agent, whose tools are its own: two commands one after the other, the first answer, a
    command that fails, the second answer. Args: name, argument: its shell and the field with the command"""

    def says(prompt: str) -> str:
        is_second = FOLLOW_UP in prompt
        commands = ["false"] if is_second else ["echo light rain", "echo 12:30"]
        done = prompt.rpartition("<|im_start|>user\n")[2].count("<|im_start|>tool\n")
        if done < len(commands):
            return call(name, **{argument: commands[done]}, **more)
        return plain(prompt)

    return says


def plain(prompt: str) -> str:
    """The two answers of an agent without tools."""
    return SECOND_ANSWER if FOLLOW_UP in prompt else FIRST_ANSWER


def browsing(prompt: str) -> str:
    """The same as browser-use's objects: a wait, the first answer, an element that no page has, the second answer."""
    is_second = FOLLOW_UP in prompt
    step, answer = ({"click": {"index": 99}}, SECOND_ANSWER) if is_second else ({"wait": {"seconds": 1}}, FIRST_ANSWER)
    has_result = ("Element index 99" if is_second else "Waited for") in prompt
    action = {"done": {"text": answer, "success": True}} if has_result else step
    words = {"evaluation_previous_goal": "Good.", "memory": "None.", "next_goal": "The next step."}
    return json.dumps({"thinking": "So it is.", **words, "action": [action]})


def answer_object(prompt: str) -> str:
    """The two answers as calls of the tools that instructor makes of an object's class: whole, and by parts."""
    return call("PartialAnswer" if "PartialAnswer" in prompt else "Answer", text=plain(prompt))


def report(prompt: str) -> str:
    """An object of the schema that was asked for: as text, or as a call of Pydantic AI's tool."""
    return call("final_result", **REPORT) if "final_result" in prompt else json.dumps(REPORT)


def _marked(**values: str) -> str:
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in {**values, "completed": ""}.items()).strip()


def _has_result(prompt: str) -> bool:
    return ("city not found" if "Atlantis" in prompt else "light rain") in prompt


def _next(prompt: str, has_result: bool, answers: Sequence[str]) -> str:
    return answers[2 * ("Atlantis" in prompt) + has_result]


def spelled(text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The tokens of an answer; each `he` is two of them, which no encoder gives back."""
    h, e = encode("h")[0], encode("e")[0]
    tokens = list[int]()
    for token in encode(text):
        tokens += [h, e] if token == HE else [token]
    return [*tokens, EOS]
