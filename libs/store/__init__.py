"""The trajectory store: Postgres through SQLAlchemy 2 and psycopg 3, the only place with SQL beside `libs/queue`.

`tables` holds the rows, and `database` the sessions. `runs/` has the life of a run, `records/` what its attempts leave,
`samples` and `training` the rows between credit and trainer, and `read/` what the API shows. `group_commit` shares
transactions, and `migrate` brings a database to the current schema.
"""
