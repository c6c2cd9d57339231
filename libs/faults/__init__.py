"""Named moments at which a test may kill a process: `passes("gateway.recorded")` stands where a crash would hurt most.

A folder named by LEYDEN_FAULTS arms them: while it holds a file of the point's name, the first process that passes the
point takes the file away and kills itself with SIGKILL, so that nothing, no handler and no buffer, softens the death.
Without LEYDEN_FAULTS, as in production, a point costs one comparison. Depends on nothing of ours.
"""

from libs.faults.points import Armory, passes

__all__ = ["Armory", "passes"]
