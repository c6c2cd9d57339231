"""Model folders without weights: a byte-level tokenizer and a chat template, as the gateway needs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The shape of Qwen's template: tools in the system message, calls and results in their own marks.
CHATML_WITH_TOOLS = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Drops what stands in <think> marks from every answer but the last: it rewrites history.
CHATML_FORGETTING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 320
HE = 256
"""The one merge, `he`: the text may also be sampled as two tokens, which no encoder would give back."""
EOS = 259


def make_chat_model(
    folder: Path,
    template: str = CHATML,
    *,
    context_length: int = 4096,
    more_marks: Sequence[str] = (),
    plain_marks: Sequence[str] = (),
) -> Path:
    """The folder: ids 0 to 255 are bytes in order, then `he`, <|endoftext|>, <|im_start|>, <|im_end|>, and more.

    Args: plain_marks: added tokens that are no special ones
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)} | {"he": HE}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *more_marks)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in plain_marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": context_length, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    return folder
