"""The reference of the gateway's requests: fields and bounds of the request models, and the effect of each field."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

Schema = Mapping[str, Any]
GATEWAY = "leyden.services.gateway"
CHANGED = "Another value than its neutral one makes the call untrainable."
CALLS = "`required` and a named tool constrain decoding."
SAMPLING = {
    "model": "Any name; the answer echoes it.",
    "tools": "Functions. The template lists them, and the gateway parses calls in the answer. No hosted tools.",
    "stream": "One body, or server-sent events.",
    "temperature": "By default the run's, else 1. With 0 the call is untrainable.",
    "top_p": CHANGED,
    "chat_template_kwargs": "Passed to the chat template.",
}
CHAT = SAMPLING | {
    "messages": "The conversation; text parts alone.",
    "tools": f"{SAMPLING['tools']} A custom tool is a function of one text.",
    "tool_choice": f"`none` lists the tools and parses no calls. {CALLS}",
    "functions": "OpenAI's functions from before there were tools; the answer has one `function_call`.",
    "function_call": "As `tool_choice`, for `functions`.",
    "parallel_tool_calls": "`false`: the answer and the next prompt have the first sampled call.",
    "stream_options": "`include_usage` adds a chunk with the numbers of tokens.",
    "n": "At most GATEWAY_MAX_CHOICES.",
    "max_tokens": "At most the room that the context leaves.",
    "max_completion_tokens": "Goes before `max_tokens`.",
    **dict.fromkeys(("top_k", "min_p", "min_tokens", "frequency_penalty", "presence_penalty"), CHANGED),
    **dict.fromkeys(("repetition_penalty", "logit_bias"), CHANGED),
    "stop": "One text, or several; an empty one stops nothing.",
    "seed": "It repeats within a rollout: siblings that send the same one get different answers, and so do choices. "
    "Without one, each choice's seed is a hash of its call's id.",
    "logprobs": "Of the temperature-scaled distribution.",
    "top_logprobs": "Needs `logprobs`.",
    "response_format": "`json_schema` and `json_object` constrain decoding; the prompt does not name the schema.",
}
RESPONSES = SAMPLING | {
    "input": "A text or items; the items of an earlier answer by their ids.",
    "tools": f"{SAMPLING['tools']} A custom tool is a function of one text; a namespace begins its tools' names.",
    "instructions": "The first system message.",
    "previous_response_id": "Continues the tokens of that response. 404 for an id that this attempt did not store.",
    "conversation": "Continues a stored conversation. Excludes `previous_response_id`.",
    "tool_choice": CHAT["tool_choice"],
    "parallel_tool_calls": CHAT["parallel_tool_calls"],
    "background": "`true` is refused.",
    "store": "`false`: no later request can name the response.",
    "max_output_tokens": CHAT["max_tokens"],
    "top_logprobs": "The number of alternatives to each token.",
    "include": "`message.output_text.logprobs` adds log-probabilities.",
    "metadata": "Echoed.",
    "truncation": "No effect.",
    "text": "`format` constrains decoding, as `response_format` of chat completions.",
}
MESSAGES = SAMPLING | {
    "messages": "The conversation, without images and documents; the last message is not the assistant's.",
    "system": "The first system message; those among `messages` stay in their place.",
    "tool_choice": "`any` and a named tool constrain decoding. `disable_parallel_tool_use` leaves the first call.",
    "max_tokens": "May be absent; at most the room that the context leaves.",
    "top_k": CHANGED,
    "stop_sequences": "Texts that end the answer.",
    "thinking": "The template gets `enable_thinking`, and the answer's reasoning is a thinking block.",
    "output_config": "`format` constrains decoding to a JSON schema.",
    "output_format": "The same, by its older name.",
    "mcp_servers": "Refused: send the servers' tools in `tools`.",
}
OLLAMA = {
    "model": SAMPLING["model"],
    "messages": CHAT["messages"],
    "tools": SAMPLING["tools"],
    "stream": "Absent as `true`: lines of JSON. `false`: one body.",
    "think": "The template gets `enable_thinking`.",
    "format": "`json` and a schema constrain decoding; the prompt does not name the schema.",
    "options": "Parameters of sampling: see Options. Others have no effect.",
    "logprobs": CHAT["logprobs"],
    "top_logprobs": CHAT["top_logprobs"],
}
GEMINI = {
    "contents": "The conversation, without media, the last not the model's. Adjacent ones of the model are one turn.",
    "systemInstruction": "The first system message.",
    "tools": f"{SAMPLING['tools']} `computerUse` is refused.",
    "toolConfig": "`ANY` constrains decoding to calls, of the allowed functions; `NONE` parses no calls.",
    "generationConfig": "Parameters of sampling: see GenerationConfig. Others have no effect.",
    "cachedContent": "Refused: send the contents.",
}
COMPLETIONS = {
    "prompt": "One text, or one list of token ids, without the chat template. Special tokens in it are control tokens.",
    "logprobs": "The number of alternatives to each token.",
}
EMBEDDINGS = {
    "model": "Any name; the answer names the model that made it.",
    "input": "One text, or at most 2048, of at most 8192 tokens each and 300,000 together. An empty one is refused, and"
    " so are token ids: the model has a vocabulary of its own.",
    "encoding_format": "`base64`: float32, little-endian; OpenAI's SDK asks for it by itself.",
    "dimensions": "The first ones of each vector, as a unit vector.",
}

OLLAMA_EMBED = {name: EMBEDDINGS[name] for name in ("model", "input", "dimensions")}
GEMINI_EMBED = {
    "content": "Its parts are one text; parts other than text are refused.",
    "outputDimensionality": EMBEDDINGS["dimensions"],
}
GEMINI_BATCH = {"requests": "Each as for `embedContent`, all with the same `outputDimensionality`."}


class Part(NamedTuple):
    """One dialect. Args: unknown: the fate of a field that is in none of the lists."""

    title: str
    module: str
    model: str
    notes: Mapping[str, str]
    unknown: str


OTHERS = "Every other field is recorded without an effect."
TRANSLATED = (
    "Every other field has no effect. The request becomes one of `/v1/embeddings`, with the same bounds and span."
)
PARTS = (
    Part("`POST /v1/chat/completions`", "dialects.chat_completions", "_Body", CHAT, OTHERS),
    Part("`POST /v1/responses`", "dialects.responses.dialect", "_Body", RESPONSES, OTHERS),
    Part("`POST /v1/messages`", "dialects.messages", "_Body", MESSAGES, OTHERS),
    Part("`POST /api/chat`", "dialects.ollama", "_Body", OLLAMA, OTHERS),
    Part("`POST /v1beta/models/MODEL:generateContent`", "dialects.gemini.dialect", "_Body", GEMINI, OTHERS),
    Part(
        "`POST /v1/completions`",
        "dialects.completions",
        "_Own",
        COMPLETIONS,
        "Every other field is one of chat completions or has no effect; `max_tokens` is 16 by default.",
    ),
    Part(
        "`POST /v1/embeddings`",
        "embeddings.bundled",
        "Body",
        EMBEDDINGS,
        "Every other field has no effect. The bundled model reads these. A server that the run or the settings name"
        " gets the body as it is, but for its `model`, and may read more. Either way the request is a span of the tool"
        " `embeddings`, which does not train.",
    ),
    Part("`POST /api/embed`", "embeddings.vendors", "_OllamaBody", OLLAMA_EMBED, TRANSLATED),
    Part("`POST /v1beta/models/MODEL:embedContent`", "embeddings.vendors", "_One", GEMINI_EMBED, TRANSLATED),
    Part("`POST /v1beta/models/MODEL:batchEmbedContents`", "embeddings.vendors", "_Batch", GEMINI_BATCH, TRANSLATED),
)


def requests_page(note: str) -> str:
    """The page. Args: note: its first line, which names its source."""
    lines = [note, "# Requests of agents", ""]
    lines += [
        "The gateway reads these bodies below `/r/{rollout}/{attempt}`; null means unset. An *untrainable* call is"
    ]
    lines += ["answered and recorded, and no step trains on it. [Model families](../model-families.md) explains tools,"]
    lines += [
        "reasoning and constrained decoding, whose calls the run's `training.constrained_calls` leaves out or trains."
    ]
    for part in PARTS:
        lines += ["", *_part(part, import_module(f"{GATEWAY}.{part.module}"))]
    return "\n".join(lines) + "\n"


def _part(part: Part, module: ModuleType) -> Iterator[str]:
    schema = getattr(module, part.model).model_json_schema()
    _same_fields(part, schema["properties"])
    yield from (f"## {part.title}", "")
    yield from _table(schema, part.notes)
    for name, remedy in getattr(module, "REMEDIES", {}).items():
        yield from ("", f"`{name}` is refused: {remedy}.")
    yield from ("", part.unknown)
    for name, nested in sorted(schema.get("$defs", {}).items(), key=lambda pair: _name(pair[0])):
        yield from ("", f"### {_name(name)}", "")
        yield from _table(nested, None)


def _same_fields(part: Part, fields: Collection[str]) -> None:
    """Raises: ValueError: a field without a note, or a note without a field."""
    if wrong := set(fields) ^ set(part.notes):
        raise ValueError(f"docs/requests.py: notes of {part.module} and its fields differ in {sorted(wrong)}")


def _table(schema: Schema, notes: Mapping[str, str] | None) -> Iterator[str]:
    yield "| field | value | required |" + (" effect |" if notes else "")
    yield "|---|---|---|" + ("---|" if notes else "")
    for name, field in schema["properties"].items():
        required = "yes" if name in schema.get("required", ()) else "no"
        cells = [f"`{name}`", _value(field), required, *([notes[name]] if notes else [])]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(field: Schema) -> str:
    """A field's type with its bounds, without null."""
    if choices := field.get("anyOf"):
        return " or ".join(_value(choice) for choice in choices if choice.get("type") != "null")
    if reference := field.get("$ref"):
        return _name(reference.rpartition("/")[2])
    if values := field.get("enum") or ([field["const"]] if "const" in field else None):
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    kind = field.get("type", "any value")
    if kind == "array":
        kind = f"array of ({_value(field['items'])})"
    return f"{kind}{_bounds(field)}"


def _bounds(field: Schema) -> str:
    """Limits in words; pydantic names those of a converted integer `ge` and `le`."""
    words = {"minimum": "≥", "ge": "≥", "exclusiveMinimum": ">", "exclusiveMaximum": "<", "maximum": "≤", "le": "≤"}
    lengths = {"minLength": "≥", "minItems": "≥", "minProperties": "≥"}
    lengths |= {"maxLength": "≤", "maxItems": "≤", "maxProperties": "≤"}
    found = [f"{sign} {field[name]}" for name, sign in words.items() if name in field]
    found += [f"length {sign} {field[name]}" for name, sign in lengths.items() if name in field]
    return f", {', '.join(found)}" if found else ""


def _name(model: str) -> str:
    return model.lstrip("_")
