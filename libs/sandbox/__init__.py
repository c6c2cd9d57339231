"""The sandbox: programs that nobody reviewed as bounded process trees of this machine, gone when they are over.

`programs.Programs` runs one in a fresh working folder, as a user of its own where that is possible. Agents of the
process backend and graders of the operator's own code run in it.
"""
