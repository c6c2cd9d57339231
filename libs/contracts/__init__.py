"""The nouns of Leyden: every message, state and configuration that crosses a process boundary.

Needs pydantic only. `states` holds life cycles as data, `config` the document that describes a run,
`api` the bodies of the REST API, `capability` what an agent's key says, `ids` how identifiers are built.
"""
