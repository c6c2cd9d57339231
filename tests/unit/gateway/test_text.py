"""Tokens as text while they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from leyden.services.gateway.spelling import Spelling
from leyden.services.gateway.text import ByteStream, TextStream, cut_at_stop, showable


def byte_level() -> Tokenizer:
    """A token for each byte, and one for two of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)} | {"he": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|a|>", "<|b|>", "<|c|>")])
    return tokenizer


MODEL = byte_level()


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=60))
def test_any_text_comes_whole_in_whole_characters_however_its_tokens_are_cut(text, sizes):
    data = list(text.encode("utf-8", "surrogatepass"))
    if "\ufffd" in decode(data):
        return
    stream, shown = TextStream(decode), ""
    while data:
        size = sizes.pop() if sizes else 1
        shown += stream.feed(data[:size])
        data = data[size:]
        assert text.startswith(shown)
    assert shown == text


def test_bytes_that_are_no_character_yet_are_held():
    stream = TextStream(decode)
    assert stream.feed([0x61, 0xE6, 0x97]) == ""
    assert stream.feed([0xA5]) == "a\u65e5"


@pytest.mark.parametrize(
    ("text", "stops", "tools", "shown"),
    [
        ("abc", [], False, "abc"),
        ("abc", ["cd"], False, "ab"),
        ("abcde", ["cd"], False, "ab"),
        ("ab\n\nObs", ["\n\nObservation"], False, "ab"),
        ("ab\n", ["x"], False, "ab\n"),
        ("ab \n<tool", [], True, "ab"),
        ("ab \n<tool_call>{}</tool_call>", [], True, "ab"),
        ("ab \n", [], True, "ab"),
        ("ab <toolbox", [], True, "ab <toolbox"),
        ("aa", ["aab"], False, ""),
    ],
)
def test_what_may_still_become_a_stop_or_a_call_is_held_back(text, stops, tools, shown):
    assert text[: showable(text, stops, calls_tools=tools)] == shown


def test_the_first_stop_string_in_the_text_cuts_it():
    assert cut_at_stop("abcabc", ["cab", "bc"]) == ("a", "bc")
    assert cut_at_stop("abc", ["x"]) == ("abc", None)


@given(st.lists(st.lists(st.integers(0, 259), max_size=3), max_size=12))
def test_the_bytes_of_tokens_make_the_text_that_their_tokenizer_makes(pieces):
    stream = ByteStream(Spelling(MODEL))
    shown = "".join(map(stream.feed, pieces))
    text = MODEL.decode([token for piece in pieces for token in piece], skip_special_tokens=False)
    # Bytes at the end that may yet become a character are held.
    assert text in {shown, shown + "\ufffd"}
