"""Model folders of the recorded sessions: one family each, with a small tokenizer and a short chat template.

The templates are our own. Each does in a few lines what the templates of its family do beside a plain loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CONTEXT_LENGTH = 2**17
WORDS = (
    "the", "weather", "answer", "question", "result", "assistant", "user", "system", "Paris", "rain", "name",
    "arguments", "tool", "call", "city", "function", "number", "step", "think", "of", "is", "in", "go", "on", "you",
)  # fmt: skip
"""The merges are the beginnings of these words, so a sampled text also has spellings that no encoder gives."""


@dataclass(frozen=True)
class Family:
    """Tokenizer and template of a family.

    Args: marks: added tokens, special ones; words: added tokens that are not special; stops: marks that end an answer,
        of which the scripted engine samples the first; prints_call_ids: the template writes ids of tool calls, so the
        agent gives its own
    """

    template: str
    tokenizer: Callable[[], Tokenizer]
    marks: Sequence[str]
    stops: Sequence[str]
    words: Sequence[str] = ()
    takes_spaces: bool = False
    prints_call_ids: bool = False

    def write(self, folder: Path) -> Path:
        """Writes the model folder and returns it."""
        folder.mkdir(parents=True)
        tokenizer = self.tokenizer()
        tokenizer.add_special_tokens([AddedToken(mark, special=True, rstrip=self.takes_spaces) for mark in self.marks])
        tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in self.words])
        tokenizer.save(str(folder / "tokenizer.json"))
        stops = [tokenizer.token_to_id(stop) for stop in self.stops]
        config = {
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": CONTEXT_LENGTH,
            "eos_token_id": stops,
        }
        (folder / "config.json").write_text(json.dumps(config))
        texts = {"bos_token": self.marks[0], "eos_token": self.stops[0], "chat_template": self.template}
        (folder / "tokenizer_config.json").write_text(json.dumps(texts))
        return folder


def byte_level() -> Tokenizer:
    """Bytes, split as GPT-2 splits text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges("Ġ")
    vocabulary = _numbered([*alphabet, *map("".join, merges)])
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Characters with a fallback to bytes; a space is a letter."""
    tokenizer = _characters()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def sentencepiece_with_prefix() -> Tokenizer:
    """The same, with a space before every text between two marks."""
    tokenizer = _characters()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _characters() -> Tokenizer:
    characters = [chr(code) for code in range(0x21, 0x7F)]
    merges = _merges("▁")
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = _numbered(["<unk>", *fallback, "▁", *characters, *map("".join, merges)])
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))


def _merges(space: str) -> list[tuple[str, str]]:
    spelled = [*(space + word for word in WORDS), *WORDS]
    return list(dict.fromkeys((word[:end], word[end]) for word in spelled for end in range(1, len(word))))


def _numbered(texts: Sequence[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}


CHATML_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
DEEPSEEK_MARKS = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
MISTRAL_MARKS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
GPT_OSS_MARKS = (
    "<|startoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>",
)  # fmt: skip
QWEN_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are a model of few words.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_QWEN_SYSTEM = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_QWEN_CALLS = (
    "{%- for call in message.tool_calls or [] %}{% if not loop.first or message.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}"
)
_QWEN_RESULTS = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n"
    "{{ message.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN25 = (
    _QWEN_SYSTEM + "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% elif message.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ message.content }}" + _QWEN_CALLS + "<|im_end|>\n"
    "{% elif message.role == 'tool' %}" + _QWEN_RESULTS + "{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts of a round of tool calls stay; those before the last question go.
QWEN3 = (
    _QWEN_SYSTEM + "{%- set ns = namespace(open=true, last=messages | length - 1) %}{%- for m in messages[::-1] %}"
    "{%- set index = (messages | length - 1) - loop.index0 %}"
    "{%- if ns.open and m.role == 'user' and not m.content.startswith('<tool_response>') %}"
    "{%- set ns.open = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% elif message.role == 'assistant' %}"
    "{%- set content = message.content %}{%- set thought = '' %}{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\\n') }}\n</think>\n\n"
    "{{ content.lstrip('\\n') }}{% else %}{{ content }}{% endif %}" + _QWEN_CALLS + "<|im_end|>\n"
    "{% elif message.role == 'tool' %}" + _QWEN_RESULTS + "{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# One macro writes every content, and the search for the last question runs through it, too.
QWEN_VL = (
    "{%- set seen = namespace(value=0) %}{%- macro show(content, counts) %}{%- if counts and '{{' in content %}"
    "{%- set seen.value = seen.value + 1 %}Picture {{ seen.value }}: {% endif %}{{ content }}{%- endmacro %}"
    + _QWEN_SYSTEM
    + "{%- set ns = namespace(open=true, last=0) %}{%- for m in messages[::-1] %}"
    "{%- set index = (messages | length - 1) - loop.index0 %}{%- if ns.open and m.role == 'user' %}"
    "{%- set text = show(m.content, false) | trim %}{%- if not text.startswith('<tool_response>') %}"
    "{%- set ns.open = false %}{%- set ns.last = index %}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = show(message.content, true) | trim %}"
    "{%- if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}{{ content }}{% else %}{{ content.split('</think>')[-1] | trim }}{% endif %}"
    + _QWEN_CALLS
    + "<|im_end|>\n{% elif message.role == 'tool' %}"
    "{% if loop.previtem and loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n{{ content }}"
    "\n</tool_response>{% if not loop.nextitem or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif message.role == 'user' or not loop.first %}<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now('a day') %}{%- endif %}"
    "{%- if messages[0].role == 'system' %}{%- set said = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set said = '' %}{%- endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday is {{ date_string }}.\n\n{{ said }}<|eot_id|>"
    "{%- if tools and messages | length %}{%- set first = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}<|start_header_id|>user<|end_header_id|>\n\nThese functions are yours.\n\n"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{{ first }}<|eot_id|>{%- endif %}"
    "{%- for m in messages %}{%- if m.tool_calls %}{%- if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{%- endif %}{%- set call = m.tool_calls[0].function %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{{ m.content | trim }}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
    "{%- else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Tools and the system's text stand before the last question, so they move on with it.
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set said = messages[0].content %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}{%- set ns = namespace(n=0) %}"
    "{%- for m in rest %}{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}{{ bos_token }}"
    "{%- for m in rest %}{%- if m.role == 'user' %}{%- if tools is not none and m == asked[-1] %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}[INST]{%- if loop.last and said is defined %}{{ said }}\n\n"
    "{% endif %}{{ m.content }}[/INST]{%- elif m.tool_calls %}[TOOL_CALLS][{%- for call in m.tool_calls %}"
    "{%- set out = call.function | tojson %}{{ out[:-1] }}, "
    '"id": "{{ call.id }}"}{{ \', \' if not loop.last }}'
    "{%- endfor %}]{{ eos_token }}{%- elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}, {{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{%- endif %}{%- endfor %}"
)
# Later versions write both first.
MISTRAL7 = (
    "{{ bos_token }}{%- if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{%- for m in rest %}{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{%- elif m.role == 'assistant' %}{{ m.content }}{%- for call in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}"
    "{%- endfor %}{{ eos_token }}{%- elif m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{%- else %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- set prefix = messages[0].content + '\n\n' -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for m in rest -%}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ prefix if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<start_of_turn>model\n{% endif -%}"
)
# No mark ends an answer: the mark of the next role does.
GLM = (
    "[gMASK]<sop>{%- if tools %}<|system|>\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{% endif %}{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 -%}{%- endif %}{%- endfor %}"
    "{% for m in messages %}{%- if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{{- '/nothink' if enable_thinking is defined and not enable_thinking }}"
    "{%- elif m.role == 'assistant' %}<|assistant|>{%- set content = m.content %}{%- if '</think>' in content %}"
    "{%- if loop.index0 > ns.last %}\n<think>{{ content.split('</think>')[0].split('<think>')[-1].strip() }}</think>"
    "{%- else %}\n<think></think>{%- endif %}{%- set content = content.split('</think>')[-1] %}{%- endif %}"
    "{%- if content.strip() %}\n{{ content.strip() }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}\n"
    "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value | tojson if value is not string else value }}</arg_value>\n{% endfor %}</tool_call>"
    "{%- endfor %}{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{%- endif %}\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>{%- else %}<|system|>\n{{ m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(tool=false, first=true, said='') %}{%- for m in messages %}{%- if m.role == 'system' %}"
    "{%- set ns.said = ns.said + ('\n\n' if not ns.first else '') + m.content %}{%- set ns.first = false %}"
    "{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.said }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{ '<｜tool▁outputs▁end｜>' if ns.tool }}{%- set ns.tool = false %}<｜User｜>{{ m.content }}<｜Assistant｜>"
    "{%- elif m.role == 'assistant' %}{{ '<｜tool▁outputs▁end｜>' if ns.tool }}{%- set ns.tool = false %}"
    "{{ m.content.split('</think>')[-1] }}{%- for call in m.tool_calls or [] %}"
    "{{ '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>"
    "{{ call.function.name }}\n```json\n{{ call.function.arguments | tojson }}\n```<｜tool▁call▁end｜>"
    "{{ '<｜tool▁calls▁end｜>' if loop.last }}{%- endfor %}<｜end▁of▁sentence｜>"
    "{%- elif m.role == 'tool' %}{{ '<｜tool▁outputs▁begin｜>' if not ns.tool else '\n' }}{%- set ns.tool = true %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{%- endif %}{%- endfor %}"
    "{% if ns.tool %}<｜tool▁outputs▁end｜>{% endif %}"
)
# An end of all follows a conversation that asks for nothing.
PHI = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GPT_OSS = (
    "{%- macro today() %}{{ strftime_now('a day') }}{%- endmacro %}<|start|>system<|message|>Today: {{ today() }}"
    "\nReasoning: {{ reasoning_effort | default('medium') }}<|end|>{%- if messages[0].role == 'system' or tools %}"
    "<|start|>developer<|message|>{%- if messages[0].role == 'system' %}# Instructions\n\n{{ messages[0].content }}"
    "{%- endif %}{% if tools %}\n\n# Tools\n\nnamespace functions {\n{% for tool in tools %}type "
    "{{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;\n{% endfor %}}{% endif %}<|end|>"
    "{%- endif %}{%- set before = namespace(name=none) %}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set later = namespace(found=false) %}{%- for other in messages[loop.index:] %}"
    "{%- if other.role == 'assistant' and not other.tool_calls %}{%- set later.found = true %}{%- endif %}{%- endfor %}"
    "{%- if m.tool_calls %}{%- if m.content and not later.found %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{%- endif %}"
    "{%- set before.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ before.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{%- elif loop.last and not add_generation_prompt %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "<|return|>{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{%- endif %}"
    "{%- elif m.role == 'tool' %}<|start|>functions.{{ before.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{%- elif not (loop.first and m.role == 'system') %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# The same where an answer ends as it is sampled, whatever follows.
GPT_OSS_FINAL = GPT_OSS.replace("<|return|>", "<|end|>").replace(
    "<|start|>assistant{% endif %}", "<|start|>assistant<|channel|>final<|message|>{% endif %}"
)

FAMILIES: dict[str, Family] = {
    "smollm": Family(SMOLLM, byte_level, CHATML_MARKS, ["<|im_end|>", "<|endoftext|>"]),
    "qwen25": Family(QWEN25, byte_level, CHATML_MARKS, ["<|im_end|>", "<|endoftext|>"], QWEN_WORDS[:2]),
    "qwen3": Family(QWEN3, byte_level, CHATML_MARKS, ["<|im_end|>", "<|endoftext|>"], QWEN_WORDS),
    "qwen_vl": Family(QWEN_VL, byte_level, CHATML_MARKS, ["<|im_end|>"], QWEN_WORDS),
    "llama3": Family(
        LLAMA3,
        byte_level,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        ["<|eot_id|>", "<|eom_id|>"],
    ),
    "mistral": Family(
        MISTRAL,
        sentencepiece_with_prefix,
        MISTRAL_MARKS,
        ["</s>"],
        prints_call_ids=True,
    ),
    "mistral7": Family(
        MISTRAL7,
        byte_level,
        (*MISTRAL_MARKS, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]", "[TOOL_CONTENT]"),
        ["</s>"],
        prints_call_ids=True,
    ),
    "gemma": Family(
        GEMMA, sentencepiece, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ["<end_of_turn>", "<eos>"]
    ),
    "glm": Family(
        GLM,
        byte_level,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ["<|user|>", "<|observation|>", "<|endoftext|>"],
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "deepseek": Family(
        DEEPSEEK,
        byte_level,
        DEEPSEEK_MARKS,
        ["<｜end▁of▁sentence｜>"],
    ),
    "phi": Family(
        PHI,
        sentencepiece_with_prefix,
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ["<|end|>", "<|endoftext|>"],
        takes_spaces=True,
    ),
    "gpt_oss": Family(GPT_OSS, byte_level, GPT_OSS_MARKS, ["<|return|>", "<|call|>"]),
    "gpt_oss_final": Family(GPT_OSS_FINAL, byte_level, GPT_OSS_MARKS, ["<|end|>"]),
}
