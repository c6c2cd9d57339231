"""The model's tokenizer and limits, read from its Hugging Face folder without transformers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from leyden.libs.contracts.conversation import Json
from leyden.libs.service.errors import Misconfigured

TokenIds = npt.NDArray[np.int32]

CACHED_TOKENS = 4 * 2**20
"""Size of the segment cache in tokens (16 MiB). Rollouts of a group and turns of a session share most segments."""
SEGMENT_TOKENS = 64
"""Size of a cache entry's Python objects in tokens: about 256 bytes."""
TEXT_MARK = "\ufdd0"
"""Stands in the name of a special token that is text. Unicode reserves the code point for such inner use."""


class ModelUnreadable(Misconfigured):
    """The model's folder lacks a file that the gateway needs; the message names it."""


class ModelTokenizer:
    """Text to token ids and back, and the model's limits.

    Text is encoded in segments that begin at added tokens, and each segment's ids are cached for all attempts.

    Args: folder: holds tokenizer.json, tokenizer_config.json and config.json; context_length: where the engines allow
        less than the model; is_mark: whether an added token counts as special though the tokenizer says otherwise
    Raises: ModelUnreadable: a file is missing or unusable
    """

    def __init__(
        self,
        folder: Path,
        *,
        context_length: int | None = None,
        is_mark: Callable[[str], bool] = lambda _: False,
    ) -> None:
        config = read_model_json(folder / "config.json")
        self._tokenizer = _read_tokenizer(folder)
        # Short texts are encoded on the loop, long ones in threads, and the cache is not safe for both.
        self._lock = threading.Lock()
        self._segments: LRUCache[tuple[str, int | None], TokenIds] = LRUCache(
            CACHED_TOKENS, lambda ids: len(ids) + SEGMENT_TOKENS
        )
        marks = split_marks(self._tokenizer)
        self._mark = re.compile("|".join(map(re.escape, marks))) if marks else None
        added = self._tokenizer.get_added_tokens_decoder().values()
        specials = [token.content for token in added if token.special or is_mark(token.content)]
        # One of a single character cannot be split.
        self.specials = frozenset(name for name in specials if len(name) > 1)
        self._spellings: dict[frozenset[str], _Spelling] = {}
        self.vocab_size: int = config.get("vocab_size", self._tokenizer.get_vocab_size())
        own_length: int = config.get("max_position_embeddings", 2**20)
        self.context_length = min(own_length, context_length or own_length)
        self.eos_ids = self._find_eos_ids(folder, config)
        self._byte_ids = byte_tokens(self._tokenizer)

    def encode(self, text: str, *, after: int | None = None) -> TokenIds:
        """Encodes a text without the special tokens that the tokenizer adds around a text.

        Args: after: the token before the text. Some tokenizers encode the beginning of a text, or the space after a
            special token, differently, so the first segment is encoded behind this token.
        """
        segments = self.segments(text)
        return np.concatenate(
            [np.empty(0, dtype=np.int32)]
            + [self._encode_segment(segment, None if index else after) for index, segment in enumerate(segments)]
        )

    def as_text(self, text: str, *, besides: frozenset[str] = frozenset()) -> str:
        """Returns the text with a TEXT_MARK in each special token's name, which `encode` then encodes as letters.

        Args: besides: special tokens that stay
        """
        return self._spelling(besides)(text)

    def names_specials(self, text: str) -> bool:
        """Whether `as_text` would change the text."""
        return self._spelling(frozenset()).applies(text)

    def _spelling(self, besides: frozenset[str]) -> _Spelling:
        spelling = self._spellings.get(besides)
        if spelling is None:
            spelling = self._spellings.setdefault(besides, _Spelling(self.specials - besides))
        return spelling

    def uncached_characters(self, text: str) -> int:
        """Returns the number of characters in segments that are not cached."""
        return sum(len(segment) for segment in self.segments(text) if (segment, None) not in self._segments)

    def segments(self, text: str) -> list[str]:
        """Splits the text before each added token of `split_marks`, which changes no id, and at TEXT_MARK."""
        return [segment for part in text.split(TEXT_MARK) for segment in self._before_added_tokens(part)]

    def _before_added_tokens(self, text: str) -> list[str]:
        places = [found.start() for found in self._mark.finditer(text)] if self._mark else []
        ends = zip([0, *places], [*places, len(text)], strict=True)
        return [text[begin:end] for begin, end in ends if begin < end]

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token; None where it is none of the model's."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes tokens, special ones included; invalid UTF-8 becomes U+FFFD."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def visible(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns sampled tokens without the end-of-turn token."""
        return ids[:-1] if ids and ids[-1] in self.eos_ids else ids

    def stream(self) -> TextStream:
        """Returns an incremental decoder."""
        return TextStream(self._tokenizer, self._byte_ids)

    def _encode_segment(self, segment: str, after: int | None) -> TokenIds:
        with self._lock:
            found = self._segments.get((segment, after))
        if found is None:
            found = np.asarray(self._encode_after(segment, after), dtype=np.int32)
            if found.size + SEGMENT_TOKENS <= CACHED_TOKENS:
                with self._lock:
                    self._segments[segment, after] = found
        return found

    def _encode_after(self, text: str, after: int | None) -> list[int]:
        if after is not None:
            ids = self._encode(self.decode([after]) + text)
            if ids[:1] == [after]:
                return ids[1:]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _find_eos_ids(self, folder: Path, config: Json) -> frozenset[int]:
        """Collects the end-of-sequence tokens of generation_config.json, config.json and the tokenizer."""
        generation = folder / "generation_config.json"
        eos_token = token_text(read_model_json(folder / "tokenizer_config.json").get("eos_token"))
        declared = [
            (read_model_json(generation) if generation.exists() else {}).get("eos_token_id"),
            config.get("eos_token_id"),
            self._tokenizer.token_to_id(eos_token or ""),
        ]
        flat = [item for entry in declared for item in (entry if isinstance(entry, list) else [entry])]
        return frozenset(item for item in flat if isinstance(item, int))


class _Spelling:
    """Splits the names of special tokens in a text."""

    def __init__(self, specials: Collection[str]) -> None:
        names = "|".join(map(re.escape, sorted(specials)))
        self._any = re.compile(names or r"(?!)")
        # Looks ahead, since special tokens may overlap.
        self._begins = re.compile(f"(?=(?:{self._any.pattern}))(.)", re.DOTALL)

    def applies(self, text: str) -> bool:
        return self._any.search(text) is not None

    def __call__(self, text: str) -> str:
        return self._begins.sub(rf"\1{TEXT_MARK}", text) if self.applies(text) else text


class TextStream:
    """Decodes tokens while they arrive, and returns text that no later token changes.

    A character whose bytes span several tokens waits for the last of them. So does a run of tokens that are single
    bytes: all of it becomes U+FFFD where one of its bytes is wrong, as after valid characters.

    Args: byte_ids: those of `byte_tokens`
    """

    def __init__(self, tokenizer: Tokenizer, byte_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._byte_ids = byte_ids
        self._waiting: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=False)

    def feed(self, ids: Sequence[int]) -> str:
        """Returns the characters that these tokens complete."""
        texts = []
        for token in ids:
            self._waiting.append(token)
            if token not in self._byte_ids:
                texts.append(self._stream.step(self._tokenizer, self._waiting) or "")
                self._waiting = []
        return "".join(texts)


def byte_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the tokens that are single bytes, as those of Llama 2, Mistral and Gemma are; none for other families."""
    named = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    ids = [token for token in named if token is not None]
    is_whole = len(ids) == 256 and "é" in tokenizer.decode([ids[byte] for byte in "é".encode()])
    return frozenset(ids if is_whole else ())


def split_marks(tokenizer: Tokenizer) -> list[str]:
    """Returns the added tokens before which splitting a text does not change its tokens.

    Tokenizers match added tokens in the raw text first and encode the text between them separately. The result leaves
    out added tokens that are matched in normalised text, that strip the white space before them, or that may overlap
    with another one.
    """
    added = list(tokenizer.get_added_tokens_decoder().values())
    if any(token.single_word for token in added):
        # A `single_word` token is matched or not depending on the text after it.
        return []
    exact = [token for token in added if not token.normalized]
    return [token.content for token in exact if token.content and _always_begins(token.content, exact)]


def _always_begins(text: str, exact: Sequence[AddedToken]) -> bool:
    """Whether no match of an added token can span the beginning of this text."""
    takes_spaces = any(token.lstrip and token.content.startswith(text) for token in exact)
    return not (takes_spaces or text[0].isspace() or _overlaps(text, [token.content for token in exact]))


def _overlaps(text: str, others: Sequence[str]) -> bool:
    """Whether a match of one of the others can begin before the text and end within or after it."""
    heads = [text[:length] for length in range(1, len(text))]
    return any(
        text in other[1:] or any(other.endswith(head) and len(other) > len(head) for head in heads) for other in others
    )


def read_model_json(path: Path) -> Json:
    """Reads a JSON object of the model's folder. Raises: ModelUnreadable."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(
            f"cannot read {path}: {error}; set GATEWAY_MODEL_PATH to a Hugging Face folder"
        ) from error
    if not isinstance(document, dict):
        raise ModelUnreadable(f"{path} must hold a JSON object")
    return document


def token_text(value: object) -> str | None:
    """Returns the text of a special token in tokenizer_config.json, given as a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelUnreadable(f"{path} is missing: save the tokenizer in its fast format (tokenizer.json)")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
