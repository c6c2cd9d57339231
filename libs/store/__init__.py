"""The trajectory store: Postgres through SQLAlchemy 2 and psycopg 3, the only place with SQL beside `libs/queue`.

`tables` holds the rows, `database` the sessions, one module per topic the functions (datasets, runs, groups, calls,
spans, samples, training). `group_commit` shares transactions, `migrate` brings a database to the current schema, and
`partitions` gives each run its own tables.
"""
