"""Credit: reads calls, spans, rewards and outcomes of complete groups; writes `credits`, `samples` and `group_credits`.

Promises: computing a group again gives the same rows; a group is credited once; failures of the platform are left out
and never count as zero. `group.credit_group` is the complete computation as a pure function.
"""
