"""The messages of the three roles. The first two words of a system line tell the roles apart."""

WRITER = "You write SQL for SQLite. Answer with one query alone."
CHECKER = "You check SQL. Answer yes or no."
REWRITER = "You correct SQL for SQLite. Answer with one query alone."

Messages = list[dict[str, str]]


def conversation(system: str, user: str) -> Messages:
    """Returns a conversation of one turn."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def to_writer(schema: str, question: str) -> Messages:
    """Returns the request for a first query."""
    return conversation(WRITER, f"{schema}\n{question}")


def to_checker(question: str, sql: str, result: str) -> Messages:
    """Returns the question whether a query that ran has answered."""
    return conversation(CHECKER, f"{question}\n{sql}\nResult: {result}\nDoes this answer the question?")


def to_rewriter(schema: str, question: str, sql: str, complaint: str) -> Messages:
    """Returns the request for a better query."""
    return conversation(REWRITER, f"{schema}\n{question}\n{sql}\n{complaint}")
