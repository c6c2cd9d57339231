"""The flight agent as a LangGraph graph: one node asks the model, the other runs the tool that the reply names."""

import operator
from typing import Annotated, Any

from episode import MAX_TOKENS, MODEL, TEMPERATURE, TOOL_CALLS, read_task, use_tool
from grade import Transcript, verdict
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from prompt import opening
from telemetry import telemetry
from world import Task, World


class State(MessagesState):
    """The conversation, and the tools that it used."""

    tools: Annotated[list[str], operator.add]


def converse(task: Task) -> Transcript:
    """Run the graph until the model has answered the traveller, or three tools were of no use."""
    world = World(task)
    model = ChatOpenAI(model=MODEL, temperature=TEMPERATURE, max_completion_tokens=MAX_TOKENS)

    def ask(state: State) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def run_tool(state: State) -> dict[str, Any]:
        reply = state["messages"][-1]
        name, result = use_tool(world, reply.text, reply.response_metadata["id"])
        return {"messages": [HumanMessage(result)], "tools": [name]}

    def after_reply(state: State) -> str:
        return END if world.found else "run_tool"

    def after_tool(state: State) -> str:
        return "ask" if world.found or len(state["tools"]) < TOOL_CALLS else END

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_node("run_tool", run_tool)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", after_reply, ["run_tool", END])
    graph.add_conditional_edges("run_tool", after_tool, ["ask", END])
    state = graph.compile().invoke({"messages": opening(task.question), "tools": []})
    answer = state["messages"][-1].text if world.found else None
    return Transcript(tuple(state["tools"]), answer, len(state["tools"]) + (answer is not None))


if __name__ == "__main__":
    task = read_task()
    with telemetry():
        transcript = converse(task)
    print(verdict(transcript, task.carrier))
