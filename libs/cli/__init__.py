"""The `leyden` command: runs the platform on one machine, and speaks to any platform through the REST client.

Exit status: 0 done, 1 error, 2 wrong usage, 3 not found, 4 unreachable, 5 refused, 6 not allowed, 130 interrupted.
"""
