"""Grading: pure functions from what an attempt left and its task to a value, the answer that counted, and why.

`grade.grade` applies one grader, `pool.Pool` does so in processes that may end, and `ledger.ledger` makes the total.
Inputs have at most `MAX_TEXT` characters; every function takes time in proportion to them, except regular expressions
and schemas, which their caller must limit.
"""
