"""The text of tokens by a table: the tokenizer's own, letter by letter."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from leyden.services.gateway.spelling import Spelling
from tests.fakes.chat_model import VOCAB_SIZE, make_chat_model

TOKENS = st.lists(st.integers(0, VOCAB_SIZE + 9), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = make_chat_model(tmp_path_factory.mktemp("model"))
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_tokens([AddedToken("a space"), AddedToken("日本"), AddedToken("\u0120é")])
    return made


@given(TOKENS)
def test_tokens_are_spelled_as_their_tokenizer_decodes_them(tokenizer: Tokenizer, tokens: list[int]) -> None:
    spelling = Spelling.of(tokenizer)
    assert spelling is not None
    assert spelling.text(tokens) == tokenizer.decode(tokens, skip_special_tokens=False)


@given(st.text(max_size=30))
def test_a_text_comes_back_from_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    spelling = Spelling.of(tokenizer)
    assert spelling is not None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert spelling.text(ids) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel()])])
def test_a_tokenizer_that_decodes_otherwise_is_asked_itself(decoder: object) -> None:
    other = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        other.decoder = decoder
    assert Spelling.of(other) is None
