"""The frameworks, and what each does to the conversation: facts of the pinned versions, which the suite checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.frameworks.script import (
    FIRST_ANSWER,
    SECOND_ANSWER,
    Script,
    answer_object,
    browsing,
    claude,
    code,
    fields,
    final_answer_tool,
    plain,
    shell,
    tools,
)
from tests.support.builders import run_document

EXTENDS = ("fresh", "extends", "extends", "extends")
FORKS = ("fresh", "forks", "forks", "forks")
CODING = ("fresh", "extends", "extends", "extends", "extends")
COMMANDS = "its own shell, one command after the other"
ALL_FAULTS = frozenset({"500", "429", "dropped"})


@dataclass(frozen=True)
class Needs:
    """Fields of the run's document without which no token of an agent trains.

    Args: settings: values by path; reason: the reason of the agent's calls without them
    """

    settings: Mapping[str, object]
    reason: str

    def document(self) -> dict[str, Any]:
        """A run with the fields."""
        document = run_document()
        for path, value in self.settings.items():
            section, field = path.split(".")
            document[section] = {**document.get(section, {}), field: value}
        return document


SAMPLES = {"sampling.override": {"temperature": 1}}
MASKS = {"training.constrained_calls": "mask"}
OVERRIDE = Needs(SAMPLES, "sampled with temperature")
MASK = Needs(MASKS, "sampled with tool_choice")


@dataclass(frozen=True)
class Framework:
    """One agent.

    Args: agent: its file in tests/agents/frameworks; package: the distribution whose version counts; environment: in
        `environments`; tree: for each call `fresh`, `extends` (its prompt begins with all tokens of an earlier call) or
        `forks` (with the beginning of one); retries: the faults after which the client repeats its request;
        renews: those after which it asks the same by another request, for which the engine samples again;
        status_after_fault: the exit status after another one; needs: what the run must say, or nothing of it trains
    """

    agent: str
    title: str
    package: str
    environment: str
    dialect: str
    arguments: tuple[str, ...] = ()
    script: Script = tools
    tree: tuple[str, ...] = EXTENDS
    retries: frozenset[str] = ALL_FAULTS
    renews: frozenset[str] = frozenset()
    status_after_fault: int = 1
    streams: bool = False
    answers: tuple[str, ...] = (FIRST_ANSWER, SECOND_ANSWER)
    needs: Needs | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The agent's file without its ending, and its arguments."""
        return "-".join([self.agent.rpartition(".")[0], *self.arguments])


FRAMEWORKS = (
    Framework("openai_chat.py", "openai-python, chat", "openai", "python", "chat_completions", streams=True),
    Framework("openai_responses.py", "openai-python, responses", "openai", "python", "responses", streams=True),
    Framework("anthropic_messages.py", "anthropic-python", "anthropic", "python", "messages", streams=True),
    Framework("ollama_chat.py", "ollama-python", "ollama", "vendors", "ollama_chat", retries=frozenset(), streams=True),
    Framework(
        "google_genai.py",
        "google-genai",
        "google-genai",
        "vendors",
        "gemini",
        streams=True,
        retries=frozenset({"500", "429"}),
        note="with `HttpRetryOptions`",
    ),
    Framework("openai_agents_sdk.py", "OpenAI Agents SDK", "openai-agents", "python", "responses", streams=True),
    Framework(
        "openai_agents_sdk.py",
        "OpenAI Agents SDK, chat",
        "openai-agents",
        "python",
        "chat_completions",
        ("chat",),
        streams=True,
    ),
    Framework("langgraph_agent.py", "LangGraph, ChatOpenAI", "langgraph", "python", "chat_completions", streams=True),
    Framework(
        "langgraph_agent.py",
        "LangGraph, ChatAnthropic",
        "langgraph",
        "python",
        "messages",
        ("anthropic",),
        streams=True,
    ),
    Framework(
        "langgraph_agent.py",
        "LangGraph, ChatOpenAI(temperature=0)",
        "langgraph",
        "python",
        "chat_completions",
        ("greedy",),
        streams=True,
        needs=OVERRIDE,
    ),
    Framework(
        "instructor_agent.py",
        "instructor",
        "instructor",
        "instructor",
        "chat_completions",
        script=answer_object,
        tree=("fresh", "fresh"),
        streams=True,
        needs=MASK,
        note="two objects, without tools",
    ),
    Framework("pydantic_ai_agent.py", "Pydantic AI", "pydantic-ai-slim", "python", "responses", streams=True),
    Framework(
        "pydantic_ai_agent.py",
        "Pydantic AI, chat",
        "pydantic-ai-slim",
        "python",
        "chat_completions",
        ("chat",),
        streams=True,
    ),
    Framework("litellm_agent.py", "LiteLLM", "litellm", "litellm", "chat_completions", streams=True),
    Framework("autogen_agent.py", "AutoGen", "autogen-agentchat", "autogen", "chat_completions", streams=True),
    Framework(
        "smolagents_agent.py",
        "smolagents, tools",
        "smolagents",
        "smolagents",
        "chat_completions",
        script=final_answer_tool,
        tree=FORKS,
        needs=MASK,
    ),
    Framework(
        "smolagents_agent.py",
        "smolagents, code",
        "smolagents",
        "smolagents",
        "chat_completions",
        ("code",),
        script=code,
        tree=FORKS,
    ),
    Framework(
        "llamaindex_agent.py",
        "LlamaIndex",
        "llama-index-core",
        "llamaindex",
        "chat_completions",
        streams=True,
        tree=("fresh", "extends", "forks", "extends"),
    ),
    Framework(
        "crewai_agent.py", "CrewAI", "crewai", "crewai", "chat_completions", tree=("fresh", "forks", "forks", "extends")
    ),
    Framework(
        "dspy_agent.py",
        "DSPy, ReAct",
        "dspy",
        "dspy",
        "chat_completions",
        script=fields,
        tree=("fresh", "forks", "forks", "fresh", "forks", "forks", "forks"),
        note="each question: one prompt a step, then a last one of its own",
    ),
    Framework("openai_node.mjs", "openai-node", "openai", "node", "chat_completions", streams=True),
    Framework("langchain_js.mjs", "LangChain.js", "langchain", "node", "chat_completions", streams=True),
    Framework("openai_agents_js.mjs", "OpenAI Agents SDK (JS)", "@openai/agents", "node", "responses", streams=True),
    Framework(
        "openai_agents_js.mjs",
        "OpenAI Agents SDK (JS), chat",
        "@openai/agents",
        "node",
        "chat_completions",
        ("chat",),
        streams=True,
    ),
    Framework("vercel_ai.mjs", "Vercel AI SDK", "ai", "node", "responses", streams=True),
    Framework("vercel_ai.mjs", "Vercel AI SDK, chat", "ai", "node", "chat_completions", ("chat",), streams=True),
    Framework(
        "mastra_agent.mjs",
        "Mastra",
        "@mastra/core",
        "mastra",
        "responses",
        streams=True,
        retries=frozenset(),
    ),
    Framework(
        "mastra_agent.mjs",
        "Mastra, chat",
        "@mastra/core",
        "mastra",
        "chat_completions",
        ("chat",),
        streams=True,
        retries=frozenset(),
    ),
    Framework(
        "claude_agent.py", "Claude Agent SDK", "claude-agent-sdk", "claude", "messages", script=claude, streams=True
    ),
    Framework(
        "codex.sh",
        "Codex CLI",
        "@openai/codex",
        "cli",
        "responses",
        script=shell("exec_command", "cmd"),
        tree=CODING,
        streams=True,
        retries=frozenset({"500", "dropped"}),
        renews=frozenset({"429"}),
        note=COMMANDS,
    ),
    Framework(
        "qwen_code.sh",
        "qwen-code",
        "@qwen-code/qwen-code",
        "cli",
        "chat_completions",
        script=shell("run_shell_command", "command", is_background=False),
        tree=("fresh", "extends", "extends", "forks", "extends"),
        streams=True,
        note=COMMANDS,
    ),
    Framework(
        "openhands_agent.py",
        "OpenHands SDK",
        "openhands-sdk",
        "openhands",
        "chat_completions",
        script=shell("terminal", "command"),
        tree=CODING,
        note=COMMANDS,
    ),
    Framework(
        "browser_use_agent.py",
        "browser-use",
        "browser-use",
        "browser",
        "chat_completions",
        script=browsing,
        tree=("fresh", "forks", "forks", "forks"),
        needs=Needs({**SAMPLES, **MASKS}, "sampled with frequency_penalty, json_schema"),
        note="a Chromium of its own; its judge is off",
    ),
    Framework(
        "aider.sh",
        "aider",
        "aider-chat",
        "aider",
        "chat_completions",
        script=plain,
        tree=("fresh", "forks"),
        streams=True,
        needs=OVERRIDE,
        note="two answers without tools",
    ),
)
