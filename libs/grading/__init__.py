"""Grading: pure functions from what an attempt left and its task to a value, the answer that counted, and why.

`grade.grade` applies one grader. Inputs have at most `MAX_TEXT` characters; every function takes time in proportion to
them, except regular expressions and schemas, which their caller must limit.
"""
