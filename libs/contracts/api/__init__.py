"""Bodies of the REST API: `services/api` sends them and `libs/client` returns them.

`Rollout` is an item of a list, `RolloutDetail` one rollout with its parts, `RewardRequest` a body that a client sends.
Times are UTC.
"""
