"""The collector: writes `spans`, `rewards` and `feedback`; promises that what it answered with 200 is durable, once.

Agents send OpenTelemetry over HTTP to an address that names their attempt, with the key they were given.
"""
