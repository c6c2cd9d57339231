"""The data types that cross process boundaries: messages, states and configuration.

It needs pydantic only. `states` defines state machines as data, `config` the configuration of a run, `api` the bodies
of the REST API, `capability` the claims of an agent's key, `ids` the format of identifiers.
"""
