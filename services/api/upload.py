"""Parses the rows of an upload while its bytes arrive: JSON Lines, or one JSON array if the first character is `[`.

Memory holds one chunk and one row. After the first bad row the parser yields no more rows, but reads on, so that the
error lists every bad row up to a limit.

BadUpload       rows were refused; `problems` has each with its line and reason
UploadTooLarge  more bytes than one upload may have
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

from leyden.libs.contracts.api.problems import FieldProblem
from leyden.libs.contracts.strict import BadJson, parse_json

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
# The parser reports an incomplete value at most this far before the end of the text: the longest token but strings.
_TOKEN = 16


class BadUpload(ValueError):
    """Rows were refused and nothing was stored."""

    def __init__(self, problems: list[FieldProblem]) -> None:
        super().__init__(f"{len(problems)} or more rows were refused; nothing was stored")
        self.problems = problems


class UploadTooLarge(ValueError):
    """The upload is larger than allowed."""


class _Refused(ValueError):
    """A row cannot be stored; the message is the reason."""


class _Hopeless(ValueError):
    """The array is broken, so no later row can be parsed; the message is the reason."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one upload."""

    upload_bytes: int
    row_bytes: int = 2**20
    problems: int = 20


@dataclass(frozen=True)
class _Row:
    place: str
    text: str | None
    """Canonical JSON; None when refused."""
    reason: str = ""


async def read_rows(chunks: AsyncIterable[bytes], limits: Limits) -> AsyncIterator[str]:
    """Canonical JSON text (sorted keys, no spaces) of each row.

    Raises: BadUpload: after the last chunk, or once `limits.problems` rows were refused; UploadTooLarge
    """
    problems: list[FieldProblem] = []
    count = 0
    async for row in _rows(_decoded(chunks, limits), limits):
        count += 1
        if row.text is None:
            problems.append(FieldProblem(path=row.place, message=row.reason))
            if len(problems) >= limits.problems:
                break
        elif not problems:
            yield row.text
    if problems:
        raise BadUpload(problems)
    if not count:
        raise BadUpload([FieldProblem(path="line 1", message="the upload is empty: send one JSON object per line")])


async def _decoded(chunks: AsyncIterable[bytes], limits: Limits) -> AsyncIterator[str]:
    """UTF-8 text without a byte order mark."""
    decoder, received = codecs.getincrementaldecoder("utf-8-sig")(), 0
    async for chunk in chunks:
        received += len(chunk)
        if received > limits.upload_bytes:
            raise UploadTooLarge(f"the upload exceeds {limits.upload_bytes} bytes: split it into several datasets")
        if text := _decode(decoder, chunk, received):
            yield text
    _decode(decoder, b"", received, final=True)


def _decode(decoder: codecs.IncrementalDecoder, chunk: bytes, received: int, *, final: bool = False) -> str:
    try:
        return decoder.decode(chunk, final)
    except UnicodeDecodeError as error:
        # `error.object` also holds the bytes that the decoder retained from earlier chunks.
        place = received - len(error.object) + error.start
        raise BadUpload(
            [FieldProblem(path=f"byte {place}", message=f"not UTF-8 ({error.reason}): save the file as UTF-8")]
        ) from None


async def _rows(texts: AsyncIterator[str], limits: Limits) -> AsyncIterator[_Row]:
    head = ""
    async for text in texts:
        head += text
        if head.lstrip(_SPACE):
            break
    reader = _array_rows if head.lstrip(_SPACE).startswith("[") else _line_rows
    async for row in reader(_chained(head, texts), limits):
        yield row


async def _chained(head: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield head
    async for text in rest:
        yield text


async def _line_rows(texts: AsyncIterator[str], limits: Limits) -> AsyncIterator[_Row]:
    number, pending = 0, ""
    async for text in texts:
        *lines, pending = (pending + text).split("\n")
        for line in lines:
            number += 1
            if line.strip():
                yield _row(f"line {number}", line, limits)
        if len(pending) > limits.row_bytes:
            yield _Row(f"line {number + 1}", None, _too_long(limits))
            return
    if pending.strip():
        yield _row(f"line {number + 1}", pending, limits)


def _row(place: str, text: str, limits: Limits) -> _Row:
    try:
        return _Row(place, _canonical(parse_json(text.strip()), limits))
    except (BadJson, _Refused) as error:
        return _Row(place, None, str(error))


async def _array_rows(texts: AsyncIterator[str], limits: Limits) -> AsyncIterator[_Row]:
    scanner = _ArrayScanner(limits)
    try:
        async for text in texts:
            for row in scanner.feed(text):
                yield row
        scanner.finish()
    except _Hopeless as error:
        yield _Row(f"line {scanner.line} (row {scanner.count + 1})", None, str(error))


class _ArrayScanner:
    """Yields the elements of an array as they become complete."""

    def __init__(self, limits: Limits) -> None:
        self.count = 0
        self.line = 1
        self._limits = limits
        self._buffer = ""
        self._at = 0
        self._wanted = "["
        """The expected token: `[`, `first` or a further `value`, `next` (a comma or the end), or `end`."""

    def feed(self, text: str) -> list[_Row]:
        """The rows that this text completes."""
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        rows: list[_Row] = []
        while self._skip_space() and self._step(rows):
            pass
        return rows

    def finish(self) -> None:
        """Raises when the array has not ended."""
        if self._wanted == "end":
            return
        try:
            _lenient.raw_decode(self._buffer, self._at)
        except json.JSONDecodeError as error:
            # The rest is broken and not only incomplete; the parser's message says how.
            if self._at < len(self._buffer):
                raise _Hopeless(f"not JSON: {error.msg}") from None
        raise _Hopeless("the array does not end: add ]")

    def _skip_space(self) -> bool:
        space = _SPACES.match(self._buffer, self._at)
        assert space is not None
        self._move_to(space.end())
        return self._at < len(self._buffer)

    def _step(self, rows: list[_Row]) -> bool:
        """Consumes one token or element; False when more must arrive first."""
        first = self._buffer[self._at]
        match self._wanted:
            case "[":
                self._wanted = "first"
            case "first" if first == "]":
                self._wanted = "end"
            case "first" | "value":
                return self._element(rows)
            case "next" if first in ",]":
                self._wanted = "value" if first == "," else "end"
            case "next":
                raise _Hopeless(f"expected , or ] after a row, not {first!r}")
            case _:
                raise _Hopeless(f"unexpected {first!r} after the end of the array")
        self._move_to(self._at + 1)
        return True

    def _element(self, rows: list[_Row]) -> bool:
        end = self._end_of_element()
        if end is None:
            return False
        rows.append(_row(f"line {self.line} (row {self.count + 1})", self._buffer[self._at : end], self._limits))
        self._move_to(end)
        self.count += 1
        self._wanted = "next"
        return True

    def _end_of_element(self) -> int | None:
        """The end of the value at the present position; None when it is not complete yet."""
        try:
            end = _lenient.raw_decode(self._buffer, self._at)[1]
        except json.JSONDecodeError as error:
            incomplete = error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - _TOKEN
            if not incomplete:
                raise _Hopeless(f"not JSON: {error.msg}") from None
            if len(self._buffer) - self._at > self._limits.row_bytes:
                raise _Hopeless(_too_long(self._limits)) from None
            return None
        except RecursionError:
            raise _Hopeless("nested too deeply to be read: flatten it") from None
        except ValueError:
            raise _Hopeless("a number has too many digits: write it as a text") from None
        # A number or word that ends with the buffer may go on in the next chunk.
        return end if end < len(self._buffer) or self._buffer[end - 1] in '}]"' else None

    def _move_to(self, place: int) -> None:
        self.line += self._buffer.count("\n", self._at, place)
        self._at = place


def _canonical(value: object, limits: Limits) -> str:
    if not isinstance(value, dict):
        raise _Refused(f"a row must be a JSON object, not {_KINDS.get(type(value), 'a number')}")
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _Refused("a text holds half of a surrogate pair, which is not Unicode") from None
    if size > limits.row_bytes:
        raise _Refused(_too_long(limits))
    if _NUL.search(text):
        raise _Refused("a text holds the character U+0000, which Postgres cannot store")
    return text


_KINDS: dict[type, str] = {list: "an array", str: "a text", bool: "true or false", type(None): "null"}


def _too_long(limits: Limits) -> str:
    return f"the row is longer than {limits.row_bytes} bytes"


_lenient = json.JSONDecoder()
