"""A text-to-SQL agent as a LangGraph graph: a writer, a checker and a rewriter, all answered by one model.

The writer's query is run. An error, or a checker that says no, sends it to the rewriter, once. The last line of output
is the query as JSON: `{"sql": "SELECT …", "rewritten": false}`. Nobody grades it here.
"""

import gc

# An attempt is short: collecting garbage during imports would be a tenth of its time.
gc.disable()

import json  # noqa: E402
import os  # noqa: E402
import sqlite3  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, TypedDict  # noqa: E402

from langchain_openai import ChatOpenAI  # noqa: E402
from langgraph.graph import END, START, StateGraph  # noqa: E402
from prompts import Messages, to_checker, to_rewriter, to_writer  # noqa: E402

MODEL = os.environ.get("OPENAI_MODEL", "SmolLM2-135M-Instruct")
TEMPERATURE = 0.8
SQL_TOKENS, CHECK_TOKENS = 80, 2
SHOWN_ROWS = 3


class State(TypedDict, total=False):
    """The query so far, and the complaint about it: an empty one accepts it."""

    sql: str
    complaint: str
    rewritten: bool


def answer(messages: Messages, max_tokens: int) -> str:
    """Ask the model for one reply."""
    model = ChatOpenAI(model=MODEL, temperature=TEMPERATURE, max_completion_tokens=max_tokens)
    return model.invoke(messages).text.strip()


def schema(database: str) -> str:
    """Return the tables of a database made of SQL text, one a line, with their columns."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(database)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    columns = {table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] for table in tables}
    connection.close()
    return "\n".join(f"{table}({', '.join(names)})" for table, names in columns.items())


def run(database: str, sql: str) -> str:
    """Run a query on a database made of SQL text, and return its first rows.

    Raises: ValueError: the query is wrong
    """
    connection = sqlite3.connect(":memory:")
    connection.executescript(database)
    # Enough instructions for every question here; an endless query ends.
    connection.set_progress_handler(lambda: 1, 5_000_000)
    try:
        return json.dumps(connection.execute(sql).fetchmany(SHOWN_ROWS), ensure_ascii=False, default=str)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ValueError(str(error)) from error
    finally:
        connection.close()


def graph(question: str, database: str) -> Any:
    """Build the graph for one question."""
    tables = schema(database)

    def write(state: State) -> State:
        return {"sql": answer(to_writer(tables, question), SQL_TOKENS)}

    def check(state: State) -> State:
        try:
            result = run(database, state["sql"])
        except ValueError as error:
            return {"complaint": f"Error: {error}"}
        said = answer(to_checker(question, state["sql"], result), CHECK_TOKENS)
        return {"complaint": "It does not answer the question." if said.lower().startswith("no") else ""}

    def rewrite(state: State) -> State:
        asked = to_rewriter(tables, question, state["sql"], state["complaint"])
        return {"sql": answer(asked, SQL_TOKENS), "rewritten": True}

    built = StateGraph(State)
    built.add_node("write", write)
    built.add_node("check", check)
    built.add_node("rewrite", rewrite)
    built.add_edge(START, "write")
    built.add_edge("write", "check")
    built.add_conditional_edges("check", lambda state: "rewrite" if state["complaint"] else END, ["rewrite", END])
    built.add_edge("rewrite", END)
    return built.compile()


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else os.environ.get("LEYDEN_TASK")
    if not text:
        sys.exit("no task: set LEYDEN_TASK to a JSON object, or name a JSON file as the first argument")
    task = json.loads(text)
    state = graph(task["question"], task["database"]).invoke({})
    print(json.dumps({"sql": state["sql"], "rewritten": state.get("rewritten", False)}))
