"""A text that is cut has the tokens of the whole, whatever tokenizer it is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from leyden.services.engine.convert import convert
from leyden.services.gateway.cuts import Cuts

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


def assert_cuts(tokenizer: Tokenizer, cuts: Cuts, text: str) -> None:
    for upto in range(len(text) + 1):
        place = cuts.last(text, upto)
        if place is not None:
            assert place <= upto
            assert ids(tokenizer, text[:place]) + ids(tokenizer, text[place:]) == ids(tokenizer, text)
    pieces = cuts.pieces(text)
    assert "".join(pieces) == text
    assert "" not in pieces
    assert [token for piece in pieces for token in ids(tokenizer, piece)] == ids(tokenizer, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(texts)
def test_two_parts_have_the_tokens_of_the_whole(name, text):
    tokenizer = TOKENIZERS[name]
    assert_cuts(tokenizer, Cuts.of(tokenizer, " ".join(PIECES)), text)


def test_it_is_cut_before_tokens_that_begin_something_new_and_no_others():
    found = {name: sorted(Cuts.of(tokenizer, " ".join(PIECES)).texts) for name, tokenizer in TOKENIZERS.items()}
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
        "overlapping": [],
        "inside": ["[I]"],
        "of spaces": ["<s>", "[I]"],
        "words": [],
    }


def test_a_text_is_cut_at_every_place():
    cuts = Cuts.of(TOKENIZERS["longer"], " ".join(PIECES))
    assert cuts.pieces("a<s>he<s><x>[I][I] ") == ["a", "<s>he", "<s><x>", "[I]", "[I] "]
    assert cuts.pieces("") == []
    assert Cuts(()).pieces("a<s>") == ["a<s>"]


def test_only_tokens_that_the_template_writes_are_looked_for():
    assert Cuts.of(TOKENIZERS["bytes"], "{{ '<s>' }}{{ message }}").texts == ["<s>"]


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.from_file(str(convert() / "tokenizer.json"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(REAL_PIECES) | st.text()))
def test_a_real_tokenizer_has_them_too(real, parts):
    cuts = Cuts.of(real, "<|im_start|> <|im_end|>")
    assert cuts.texts == ["<|im_start|>", "<|im_end|>"]
    assert_cuts(real, cuts, "".join(parts)[:80])
