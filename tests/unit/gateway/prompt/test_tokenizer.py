"""A text split at added tokens has the tokens of the whole text, whatever the tokenizer."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from leyden.services.engine.convert import convert
from leyden.services.gateway.prompt.tokenizer import ModelTokenizer, TextStream, byte_tokens, split_marks
from tests.fakes.chat_model import EOS, HE, make_chat_model

# Pieces of marks overlap, spaces stand beside them, and words end where marks begin.
MARKS = ["<s>", "</s>", "<s", ">", "<", "/s>", "<s><x>", "[I]", "[", "I]"]
PIECES = [*MARKS, " ", "\n", "  ", "a", "he", "é", "\u2581", "."]
REAL_PIECES = ["<|im_start|>", "<|im_end|>", "user\n", "\n", " ", "x", "<|", "im_", "éa "]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def byte_level(*marks: AddedToken, prefix: bool = False) -> Tokenizer:
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"he": 256, "Ġa": 257}, merges=[("h", "e"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(marks))
    return tokenizer


def spaced(scheme: str, *marks: AddedToken) -> Tokenizer:
    """Like SentencePiece: a space at the beginning, of all or of each piece."""
    letters = sorted({*"".join(PIECES), "\u2581"} - {" "})
    vocabulary = {letter: index for index, letter in enumerate([*letters, "\u2581a", "he"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u2581", "a"), ("h", "e")]))
    if scheme == "normalizer":
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    tokenizer.add_tokens(list(marks))
    return tokenizer


def mark(text: str, **how: bool) -> AddedToken:
    return AddedToken(text, **{"normalized": False, **how})


PLAIN = [mark("<s>"), mark("</s>"), mark("[I]")]
TOKENIZERS = {
    "bytes": byte_level(*PLAIN),
    "bytes after a space": byte_level(*PLAIN, prefix=True),
    "a space before the first": spaced("first", *PLAIN),
    "a space before each": spaced("always", *PLAIN),
    "a normalized space": spaced("normalizer", *PLAIN),
    "space on the right": byte_level(mark("<s>", rstrip=True), mark("</s>", rstrip=True)),
    "space on the left": byte_level(mark("<s>", lstrip=True), mark("[I]")),
    "normalized": spaced("normalizer", mark("<s>", normalized=True), mark("[I]")),
    "longer": byte_level(mark("<s>"), mark("<s><x>"), mark("[I]")),
    "longer, space on the left": byte_level(mark("<s>"), mark("<s><x>", lstrip=True), mark("[I]")),
    "overlapping": byte_level(mark("<s>"), mark("a<"), mark("[I]"), mark("he[I]e")),
    "inside": byte_level(mark("<s>"), mark("a<s>"), mark("[I]")),
    "of spaces": byte_level(mark("\n"), mark("  "), mark("<s>", rstrip=True), mark("[I]")),
    "words": byte_level(mark("he", single_word=True), mark("<s>")),
}


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return found


def split(text: str, marks: list[str]) -> list[str]:
    """The text split before every mark, as `ModelTokenizer.segments` does."""
    model = ModelTokenizer.__new__(ModelTokenizer)
    model._mark = re.compile("|".join(map(re.escape, marks))) if marks else None
    return model.segments(text)


def assert_same_tokens(tokenizer: Tokenizer, marks: list[str], text: str) -> None:
    segments = split(text, marks)
    assert "".join(segments) == text
    assert "" not in segments
    assert [token for segment in segments for token in ids(tokenizer, segment)] == ids(tokenizer, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(texts)
def test_the_segments_have_the_tokens_of_the_full_text(name, text):
    tokenizer = TOKENIZERS[name]
    assert_same_tokens(tokenizer, split_marks(tokenizer), text)


def test_only_added_tokens_that_nothing_reaches_over_split_a_text():
    found = {name: sorted(split_marks(tokenizer)) for name, tokenizer in TOKENIZERS.items()}
    plain = ["</s>", "<s>", "[I]"]
    assert found == {
        "bytes": plain,
        "bytes after a space": plain,
        "a space before the first": plain,
        "a space before each": plain,
        "a normalized space": plain,
        "space on the right": ["</s>", "<s>"],
        "space on the left": ["[I]"],
        "normalized": ["[I]"],
        "longer": ["<s>", "<s><x>", "[I]"],
        "longer, space on the left": ["[I]"],
        "overlapping": ["a<", "he[I]e"],
        "inside": ["[I]", "a<s>"],
        "of spaces": ["<s>", "[I]"],
        "words": [],
    }


def test_a_text_is_split_at_every_place():
    marks = split_marks(TOKENIZERS["longer"])
    assert split("a<s>he<s><x>[I][I] ", marks) == ["a", "<s>he", "<s><x>", "[I]", "[I] "]
    assert split("", marks) == []
    assert split("a<s>", []) == ["a<s>"]


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.from_file(str(convert() / "tokenizer.json"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(REAL_PIECES) | st.text()))
def test_a_real_tokenizer_splits_without_a_change_too(real, parts):
    marks = split_marks(real)
    assert {"<|im_start|>", "<|im_end|>"} <= set(marks)
    assert_same_tokens(real, marks, "".join(parts)[:80])


@pytest.fixture
def model(tmp_path) -> ModelTokenizer:
    return ModelTokenizer(make_chat_model(tmp_path / "m"))


def test_marks_are_single_tokens_and_text_is_merged(model):
    assert model.encode("<|im_end|>he").tolist() == [EOS, HE]
    assert model.encode("he", after=EOS).tolist() == [HE]
    assert model.decode([EOS, HE]) == "<|im_end|>he"


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a<|im_end|>b<|im_start|>", "<|im_<|im_end|>end|>", "no special token", ""]
)
def test_special_tokens_of_a_text_are_letters(model, text):
    ids = model.encode(model.as_text(text)).tolist()
    assert max(ids, default=0) < 256
    assert model.decode(ids) == text


def test_a_segment_is_encoded_once(model, monkeypatch):
    text = "<|im_start|>user\nthe same task<|im_end|>\n"
    assert model.uncached_characters(text) == len(text)
    first = model.encode(text).tolist()
    monkeypatch.setattr(model, "_tokenizer", None)
    assert model.uncached_characters(text) == 0
    assert model.encode(text).tolist() == first


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> ModelTokenizer:
    return ModelTokenizer(make_chat_model(tmp_path_factory.mktemp("m")))


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=60))
def test_a_text_stream_returns_only_complete_characters(letters, text, sizes):
    data = [letters.encode(letter).tolist() for letter in text]
    ids = [token for piece in data for token in piece]
    whole = letters.decode(ids)
    stream, shown = letters.stream(), ""
    while ids:
        size = sizes.pop() if sizes else 1
        shown += stream.feed(ids[:size])
        ids = ids[size:]
        assert whole.startswith(shown)
    assert shown == whole


def test_incomplete_characters_wait_for_their_last_byte(letters):
    a, *day = letters.encode("a\u65e5").tolist()
    stream = letters.stream()
    assert stream.feed([a, *day[:-1]]) == "a"
    assert stream.feed(day[-1:]) == "\u65e5"


def with_fallback(*words: str) -> Tokenizer:
    """Like Llama 2: characters without a token of their own are runs of tokens that are single bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


FALLBACK = with_fallback("\u2581", "\u2581a", "b", "\u00e9", "\ufffd")
of_bytes = st.integers(0, 255).map(lambda byte: byte + 1)


@given(st.lists(st.one_of(of_bytes, st.integers(0, FALLBACK.get_vocab_size() - 1)), max_size=30))
def test_a_stream_of_single_bytes_shows_nothing_that_the_answer_has_not(ids):
    whole = FALLBACK.decode(ids, skip_special_tokens=False)
    stream, shown = TextStream(FALLBACK, byte_tokens(FALLBACK)), ""
    for token in ids:
        shown += stream.feed([token])
        assert whole.startswith(shown)


def test_a_run_of_bytes_waits_for_its_end_since_one_wrong_byte_changes_all_of_it():
    first, second = (FALLBACK.token_to_id(name) for name in ("<0xC3>", "<0xA9>"))
    stream = TextStream(FALLBACK, byte_tokens(FALLBACK))
    assert stream.feed([first, second]) == ""
    assert stream.feed([FALLBACK.token_to_id("b")]) == "\u00e9b"
    assert not byte_tokens(byte_level())
