"""Writes training and held-out tasks: questions about `chinook.sql` with their queries.

    python tasks.py --out tasks --seed 0 --level one_table

A held-out question has a subject that no training question of its template has. `elsewhere.jsonl` has questions about
`flights.sql`, a database that no training question has. Every query is run: one without a row, or
with a count of 0, is no task.
"""

import argparse
import json
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

CHINOOK, FLIGHTS = ((Path(__file__).parent / name).read_text() for name in ("chinook.sql", "flights.sql"))
ALBUMS_OF = "FROM album JOIN artist ON artist.id = album.artist_id WHERE artist.name = '{}'"
TRACKS_OF = "FROM track JOIN album ON album.id = track.album_id WHERE album.title = '{}'"
OF_GENRE = "FROM track JOIN genre ON genre.id = track.genre_id WHERE genre.name = '{}'"
PAID = "FROM invoice JOIN customer ON customer.id = invoice.customer_id WHERE customer.{} = '{{}}'"
OF_ARTIST = (
    "FROM track JOIN album ON album.id = track.album_id JOIN artist ON artist.id = album.artist_id"
    " WHERE artist.name = '{}'"
)
Template = tuple[str, str, str]
TEMPLATES: tuple[Template, ...] = (
    ("artist.name", "How many albums has {}?", f"SELECT COUNT(*) {ALBUMS_OF}"),
    ("artist.name", "Which albums has {}?", f"SELECT album.title {ALBUMS_OF}"),
    ("artist.name", "How long is the longest track of {}?", f"SELECT MAX(track.seconds) {OF_ARTIST}"),
    ("artist.name", "How many tracks has {}?", f"SELECT COUNT(*) {OF_ARTIST}"),
    ("album.title", "Which tracks are on the album {}?", f"SELECT track.name {TRACKS_OF}"),
    ("album.title", "How long is the album {} in all?", f"SELECT SUM(track.seconds) {TRACKS_OF}"),
    (
        "album.title",
        "Who made the album {}?",
        "SELECT artist.name FROM artist JOIN album ON album.artist_id = artist.id WHERE album.title = '{}'",
    ),
    ("genre.name", "How many tracks are {}?", f"SELECT COUNT(*) {OF_GENRE}"),
    ("track.name", "How long is the track {}?", "SELECT seconds FROM track WHERE name = '{}'"),
    (
        "track.name",
        "Which genre has the track {}?",
        "SELECT genre.name FROM genre JOIN track ON track.genre_id = genre.id WHERE track.name = '{}'",
    ),
    ("customer.country", "How many customers live in {}?", "SELECT COUNT(*) FROM customer WHERE country = '{}'"),
    ("customer.country", "Which customers live in {}?", "SELECT name FROM customer WHERE country = '{}'"),
    ("customer.country", "How much did customers in {} pay?", f"SELECT SUM(invoice.total) {PAID.format('country')}"),
    ("customer.name", "Where does {} live?", "SELECT city FROM customer WHERE name = '{}'"),
    ("customer.name", "How many invoices has {}?", f"SELECT COUNT(*) {PAID.format('name')}"),
    ("customer.name", "How much did {} pay?", f"SELECT SUM(invoice.total) {PAID.format('name')}"),
    ("seconds", "How many tracks are longer than {} seconds?", "SELECT COUNT(*) FROM track WHERE seconds > {}"),
    (
        "seconds",
        "Which tracks are longer than {} seconds, longest first?",
        "SELECT name FROM track WHERE seconds > {} ORDER BY seconds DESC",
    ),
)
FLIGHTS_OF = "FROM flight JOIN airline ON airline.code = flight.airline_code WHERE airline.name = '{}'"
FLIGHTS_TO = "FROM flight JOIN airport ON airport.code = flight.destination WHERE airport.name = '{}'"
FLIGHT_TEMPLATES: tuple[Template, ...] = (
    ("airline.name", "How many flights has {}?", f"SELECT COUNT(*) {FLIGHTS_OF}"),
    ("airline.name", "How many minutes is the longest flight of {}?", f"SELECT MAX(flight.minutes) {FLIGHTS_OF}"),
    ("airline.name", "Which code has the airline {}?", "SELECT code FROM airline WHERE name = '{}'"),
    ("airport.name", "Which code has the airport {}?", "SELECT code FROM airport WHERE name = '{}'"),
    ("airport.name", "How many flights arrive at {}?", f"SELECT COUNT(*) {FLIGHTS_TO}"),
    ("plane.maker", "How many planes are made by {}?", "SELECT COUNT(*) FROM plane WHERE maker = '{}'"),
    ("plane.tail", "How many seats has the plane {}?", "SELECT seats FROM plane WHERE tail = '{}'"),
    ("plane.tail", "How many flights has the plane {}?", "SELECT COUNT(*) FROM flight WHERE plane_tail = '{}'"),
    ("miles", "How many flights are longer than {} miles?", "SELECT COUNT(*) FROM flight WHERE miles > {}"),
)
SHORT = (
    ("customer.name", "Which country is {} from?", "SELECT country FROM customer WHERE name = '{}'"),
    ("customer.name", "Which id has the customer {}?", "SELECT id FROM customer WHERE name = '{}'"),
    ("customer.city", "Who lives in {}?", "SELECT name FROM customer WHERE city = '{}'"),
    ("album.title", "Which id has the album {}?", "SELECT id FROM album WHERE title = '{}'"),
    ("artist.name", "Which id has the artist {}?", "SELECT id FROM artist WHERE name = '{}'"),
    ("track.name", "On which album id is the track {}?", "SELECT album_id FROM track WHERE name = '{}'"),
)


def of_one_table(templates: tuple[Template, ...]) -> tuple[Template, ...]:
    """Return the templates whose queries join no tables."""
    return tuple(one for one in templates if " JOIN " not in one[2])


# The templates of a level: for both databases.
LEVELS = {
    "one_table": (of_one_table(TEMPLATES) + SHORT, of_one_table(FLIGHT_TEMPLATES)),
    "joins": (TEMPLATES, FLIGHT_TEMPLATES),
}
NUMBERS = {
    "seconds": (250, 300, 320, 350, 400, 450, 500, 600, 700, 800),
    "miles": (750, 1000, 1070, 1500, 2000, 2300, 2450, 2500),
}
HELD_OUT_SHARE = 0.25
MOST_SUBJECTS = 16


def questions(seed: int, level: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training and held-out tasks of a level, each in a random order that the seed decides."""
    dice = random.Random(seed)
    training: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for task, is_held_out in asked(CHINOOK, LEVELS[level][0], dice):
        (held_out if is_held_out else training).append(task)
    dice.shuffle(training)
    dice.shuffle(held_out)
    return training, held_out


def elsewhere(seed: int, level: str) -> list[dict[str, str]]:
    """Return tasks of a level on the flights, in a random order that the seed decides."""
    dice = random.Random(seed)
    tasks = [task for task, _ in asked(FLIGHTS, LEVELS[level][1], dice)]
    dice.shuffle(tasks)
    return tasks


def asked(database: str, templates: tuple[Template, ...], dice: random.Random) -> Iterator[tuple[dict[str, str], bool]]:
    """Yield the tasks of a database, and whether each is held out."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(database)
    for subject, question, sql in templates:
        values = subjects(connection, subject)
        dice.shuffle(values)
        values = values[:MOST_SUBJECTS]
        kept = max(1, round(HELD_OUT_SHARE * len(values)))
        for place, value in enumerate(values):
            query = sql.format(value.replace("'", "''"))
            if connection.execute(query).fetchone() not in (None, (0,)):
                yield {"question": question.format(value), "sql": query, "database": database}, place < kept


def subjects(connection: sqlite3.Connection, name: str) -> list[str]:
    """Return the values that a template may ask for."""
    if name in NUMBERS:
        return [str(one) for one in NUMBERS[name]]
    table, column = name.split(".")
    return [row[0] for row in connection.execute(f"SELECT DISTINCT {column} FROM {table} ORDER BY 1")]  # noqa: S608


def write(path: Path, tasks: list[dict[str, str]]) -> None:
    """Write one task a line."""
    path.write_text("".join(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", choices=LEVELS, default="one_table")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    training, held_out = questions(options.seed, options.level)
    write(options.out / "train.jsonl", training)
    write(options.out / "heldout.jsonl", held_out)
    write(options.out / "elsewhere.jsonl", elsewhere(options.seed, options.level))
