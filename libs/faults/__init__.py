"""Fault points: `fault_point("gateway.recorded")` names a line at which a test can kill the process.

A file in the folder of LEYDEN_FAULTS arms the point of its name: the first process that reaches the point removes the
file and kills itself with SIGKILL, so that no handler runs and no buffer is flushed. Without LEYDEN_FAULTS, as in
production, a point costs one comparison. The package imports no other package of Leyden.
"""

from leyden.libs.faults.points import FaultInjector, fault_point

__all__ = ["FaultInjector", "fault_point"]
