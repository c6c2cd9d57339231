"""Reasoning is split from the content, however the text is cut while it arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.services.gateway.prompt.reasoning import REASONING_PARSERS, reasoning_parser_of
from tests.fakes.model_families import published_template

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
PIECES = {
    "think": ["<think>", "</think>", "<", "think>", " ", "\n", "Hm", "é"],
    "gpt_oss": [ANALYSIS, FINAL, CALL, "<|start|>assistant", "<|end|>", "<|", "to=", "Hm", "\n"],
}
TEXTS = st.sampled_from(sorted(PIECES)).flatmap(
    lambda name: st.tuples(st.just(name), st.lists(st.sampled_from(PIECES[name]), max_size=10).map("".join))
)


@given(TEXTS, st.lists(st.integers(0, 200)), st.booleans())
def test_pieces_are_those_of_the_full_text(case, cuts, is_open):
    name, text = case
    prompt_end = {"think": "<think>\n", "gpt_oss": "<|start|>assistant" + FINAL}[name] if is_open else "x"
    parser = REASONING_PARSERS[name]
    splitter = parser.splitter(prompt_end)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [splitter.feed(text[start:end]) for start, end in pairwise(places)]
    pieces.append(splitter.feed("", is_last=True))
    reasoning = "".join(piece.reasoning for piece in pieces)
    found = reasoning if splitter.has_reasoned else None
    assert (found, "".join(piece.content for piece in pieces)) == parser.split(text, prompt_end)


@pytest.mark.parametrize(
    ("parser", "prompt_end", "text", "reasoning", "content"),
    [
        ("think", "", "<think>\nHm.\n</think>\n\nYes. ", "Hm.", "Yes. "),
        ("think", "", "\n<think></think>Yes.", "", "Yes."),
        ("think", "", " Yes. <think>Hm.</think>", None, " Yes. <think>Hm.</think>"),
        ("think", "", "<think>Hm", "Hm", ""),
        ("think", "<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("think", "<think>\n", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("think", "<think>\n\n</think>\n\n", "Yes.", None, "Yes."),
        ("gemma4", "", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
        ("mistral", "", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
        ("none", "<think>\n", "<think>Hm.</think>Yes.", None, "<think>Hm.</think>Yes."),
        ("gpt_oss", "", f"{ANALYSIS}Hm.<|end|><|start|>assistant{FINAL}Yes.", "Hm.", "Yes."),
        ("gpt_oss", "", f"{ANALYSIS}A<|end|><|start|>assistant{ANALYSIS}B<|end|>", "A\nB", ""),
        ("gpt_oss", "", f"{ANALYSIS}Hm.<|end|><|start|>assistant{CALL}", "Hm.", f"<|start|>assistant{CALL}"),
        ("gpt_oss", "", f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{CALL}", None,
         f"Let me see.<|start|>assistant{CALL}"),
        ("gpt_oss", "", "Yes.", None, "Yes."),
        ("gpt_oss", f"<|start|>assistant{FINAL}", "Yes.", None, "Yes."),
        ("gpt_oss", f"<|start|>assistant{ANALYSIS}", "Hm.<|end|>", "Hm.", ""),
    ],
)  # fmt: skip
def test_the_forms_of_reasoning(parser, prompt_end, text, reasoning, content):
    assert REASONING_PARSERS[parser].split(text, prompt_end) == (reasoning, content)


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("qwen3", "think"), ("glm4moe", "think"), ("deepseekv3", "think"), ("gptoss", "gpt_oss"),
        ("gemma4_v5", "gemma4"), ("qwen2_5", "none"), ("qwen3_instruct_2507", "none"), ("llama3_1", "none"),
        ("gemma3", "none"),
    ],
)  # fmt: skip
def test_the_template_chooses_the_parser(template, parser):
    assert reasoning_parser_of(published_template(template)).name == parser


def test_reasoning_leaves_while_it_is_sampled():
    splitter = REASONING_PARSERS["think"].splitter("")
    parts = ["<thi", "nk>\n", "Hm", ".\n</thi", "nk>\n\n", "Yes"]
    assert [tuple(splitter.feed(part)) for part in parts] == [
        ("", ""), ("", ""), ("Hm", ""), (".", ""), ("", ""), ("", "Yes")
    ]  # fmt: skip
