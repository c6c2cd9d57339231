"""The flight task by Leyden and by other trainers: the same machine, model, tasks, rollouts a step and reward."""
