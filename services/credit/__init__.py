"""Credit: reads calls, spans, rewards and outcomes of complete groups; writes `credits`, `samples` and `group_credits`.

Promises that computing a group again gives the same rows, that a group is credited once, and that what failed by our
own fault is left out and never counted as zero. `group.credit_group` is the whole story as a pure function.
"""
