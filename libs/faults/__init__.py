"""Fault points: `fault_point("gateway.recorded")` names a line at which a test can kill the process.

A folder named by LEYDEN_FAULTS arms them: while it holds a file of the point's name, the first process that passes the
point takes the file away and kills itself with SIGKILL, so that nothing, no handler and no buffer, softens the death.
Without LEYDEN_FAULTS, as in production, a point costs one comparison. Depends on nothing of ours.
"""

from leyden.libs.faults.points import FaultInjector, fault_point

__all__ = ["FaultInjector", "fault_point"]
