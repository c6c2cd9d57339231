"""A strict JSON parser for requests: it refuses values that Postgres cannot store and return unchanged.

Beside invalid syntax it refuses duplicate keys (parsers differ in their choice), NaN and infinities, numbers that
overflow, nesting beyond `MAX_DEPTH`, and texts with U+0000 or an unpaired surrogate.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

MAX_DEPTH = 64
"""Maximum nesting of objects and arrays."""
# Possessive quantifiers: the match never backtracks, so no body makes it slow.
_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_INTEGERS = range(-(2**63), 2**63)
_OTHER_ENCODINGS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Place = tuple[str | int, ...]


class BadJson(ValueError):
    """The JSON is invalid or cannot be stored; the message names the place, the error and the remedy."""


def read_json(body: bytes) -> object:
    """Parses a UTF-8 body. It refuses integers beyond 64 bits, too, because no column can store them.

    Raises: BadJson
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        sent = "UTF-16" if body.startswith(_OTHER_ENCODINGS) else f"{error.reason} at byte {error.start}"
        raise BadJson(f"the body is not UTF-8 ({sent}): encode it as UTF-8") from None
    value = parse_json(text)
    for place, part in _parts(value):
        if problem := _problem(part):
            raise BadJson(f"{_name(place)}: {problem}")
    return value


def parse_json(text: str) -> object:
    """Parses a text, but accepts U+0000, surrogates, and integers of up to 4300 digits.

    Raises: BadJson
    """
    try:
        value: object = _decoder.decode(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise BadJson(f"not JSON: {error.msg} at {place}") from None
    except RecursionError:
        raise BadJson(_TOO_DEEP) from None
    except BadJson:
        raise
    except ValueError:
        raise BadJson("a number has too many digits: write it as a text") from None
    if is_too_deep(value):
        raise BadJson(_TOO_DEEP)
    return value


def is_too_deep(value: object) -> bool:
    """Whether objects and arrays nest deeper than `MAX_DEPTH`; some JSON encoders fail soon beyond it."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        nested = [part for part in level if isinstance(part, dict | list)]
        if not nested:
            return False
        level = [inner for part in nested for inner in (part.values() if isinstance(part, dict) else part)]
    return True


def has_more_values(body: bytes, most: int) -> bool:
    """Whether a JSON text has more objects, arrays and commas than `most`; counting them is much faster than parsing.

    >>> has_more_values(b'["a,b,c", [1, 2]]', 3), has_more_values(b'["a,b,c", [1, 2]]', 4)
    (True, False)
    """
    return _structure(body) > most and _structure(_TEXTS.sub(b"", body)) > most


def _structure(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels: flatten it"


def _parts(value: object) -> Iterator[tuple[Place, object]]:
    """Yields every key and every value with its path."""
    waiting: list[tuple[Place, object]] = [((), value)]
    while waiting:
        place, part = waiting.pop()
        yield place, part
        if isinstance(part, dict):
            for key, inner in part.items():
                yield place, key
                waiting.append(((*place, key), inner))
        elif isinstance(part, list):
            waiting.extend(((*place, index), inner) for index, inner in enumerate(part))


def _problem(part: object) -> str | None:
    if isinstance(part, int) and part not in _INTEGERS:
        return "the number exceeds 64 bits: write a smaller one"
    if not isinstance(part, str):
        return None
    if "\0" in part:
        return "the text holds the character U+0000, which Postgres cannot store: remove it"
    try:
        part.encode()
    except UnicodeEncodeError:
        return "the text holds half of a surrogate pair, which is not Unicode: remove it"
    return None


def _name(place: Place) -> str:
    return ".".join(map(str, place)).encode("utf-8", "backslashreplace").decode() or "body"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise BadJson(f"key {twice!r} appears twice in one object: keep one")
    return found


def _constant(name: str) -> NoReturn:
    raise BadJson(f"{name} is not JSON: write null or a number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadJson(f"{digits[:40]} is too large for a number")
    return value


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite)
