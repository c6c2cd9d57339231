"""Model folders with the chat templates that the families' makers published, and a byte-level tokenizer.

The templates lie in the wheel of TRL, which the tests read without importing it. It has none of Mistral and of
Phi-4-mini: these two are our own, in the format of the family.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path

from tests.contract.gateway.recorded_models import MISTRAL, MISTRAL7
from tests.fakes.chat_model import CHATML, make_chat_model

PHI4 = (
    "{% if tools %}<|system|><|tool|>{{ tools | tojson }}<|/tool|><|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}<|tool_call|>["
    '{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}{{ ", " if not loop.last }}{% endfor %}]<|/tool_call|>'
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CHECK = "{%%- if %s | length != 9 %%}{{ raise_exception('ids have length 9') }}{%%- endif %%}"
MISTRAL_OF_MAKERS = MISTRAL.replace("{%- set out =", _CHECK % "call.id" + "{%- set out =").replace(
    "[TOOL_RESULTS]", _CHECK % "m.tool_call_id" + "[TOOL_RESULTS]"
)
"""Ids of tool calls have nine characters, as in the makers' templates; the recorded sessions have others, too."""
LISTS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
"""DeepSeek's templates leave the tools to the system message; before them this makes a template that lists tools."""


@dataclass(frozen=True)
class ModelFamily:
    """A family's template, its special tokens, and what the gateway is to make of them.

    Args: template: its text, or the name of one of TRL's; eos: the tokens that end an answer; plain_marks: added tokens
        that are no special ones
    """

    template: str
    parser: str
    eos: Sequence[str]
    marks: Sequence[str] = ()
    prefix: str = ""
    plain_marks: Sequence[str] = ()

    def write(self, folder: Path) -> Path:
        """Writes the model folder and returns it."""
        source = self.template if "{" in self.template else published_template(self.template)
        marks = [mark for mark in (*self.eos, *self.marks) if mark not in {"<|im_end|>", "<|im_start|>"}]
        make_chat_model(
            folder,
            self.prefix + source,
            more_marks=list(dict.fromkeys(marks)),
            plain_marks=self.plain_marks,
            context_length=2**15,
        )
        tokens = {
            token["content"]: token["id"]
            for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        }
        config = json.loads((folder / "config.json").read_text())
        config["eos_token_id"] = [tokens[mark] for mark in self.eos]
        (folder / "config.json").write_text(json.dumps(config))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"eos_token": self.eos[0], "bos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder


def published_template(name: str) -> str:
    """Returns a template of TRL's wheel, such as `qwen3`."""
    [found] = [file for file in files("trl") or () if file.match(f"trl/chat_templates/{name}.jinja")]
    return Path(str(found.locate())).read_text(encoding="utf-8")


_DEEPSEEK = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
FAMILIES: dict[str, ModelFamily] = {
    "smollm": ModelFamily(CHATML, "hermes", ["<|im_end|>"]),
    "qwen2_5": ModelFamily("qwen2_5", "hermes", ["<|im_end|>"]),
    "qwen3": ModelFamily("qwen3", "hermes", ["<|im_end|>"]),
    "qwen3_instruct_2507": ModelFamily("qwen3_instruct_2507", "hermes", ["<|im_end|>"]),
    "qwen3_6": ModelFamily("qwen3_6", "qwen3_coder", ["<|im_end|>"]),
    "llama3_1": ModelFamily("llama3_1", "llama3", ["<|eot_id|>", "<|eom_id|>"], _LLAMA),
    "llama3_2": ModelFamily("llama3_2", "llama3", ["<|eot_id|>", "<|eom_id|>"], _LLAMA),
    "mistral": ModelFamily(MISTRAL_OF_MAKERS, "mistral", ["</s>"], ["[INST]", "[/INST]", "[TOOL_CALLS]"]),
    "mistral_v11": ModelFamily(MISTRAL7, "mistral", ["</s>"], ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"]),
    "glm4_5": ModelFamily(
        "glm4moe",
        "glm",
        ["<|user|>", "<|observation|>"],
        ["[gMASK]", "<sop>", "<|system|>", "<|assistant|>"],
    ),
    "deepseek_v3": ModelFamily("deepseekv3", "hermes", ["<｜end▁of▁sentence｜>"], plain_marks=_DEEPSEEK),
    "deepseek_v3_tools": ModelFamily(
        "deepseekv3", "deepseek", ["<｜end▁of▁sentence｜>"], prefix=LISTS_TOOLS, plain_marks=_DEEPSEEK
    ),
    "deepseek_r1": ModelFamily("deepseek_r1_distill", "hermes", ["<｜end▁of▁sentence｜>"], plain_marks=_DEEPSEEK),
    "gpt_oss": ModelFamily(
        "gptoss",
        "gpt_oss",
        ["<|return|>", "<|call|>"],
        ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|constrain|>"],
    ),
    "gemma3": ModelFamily("gemma3", "hermes", ["<end_of_turn>"], ["<start_of_turn>"]),
    "gemma4": ModelFamily("gemma4_v5", "gemma4", ["<turn|>", "<|tool_response>"], ["<|turn>", "<tool_response|>"]),
    "phi3": ModelFamily("phi3", "hermes", ["<|end|>"], ["<|user|>", "<|assistant|>", "<|system|>"]),
    "phi4": ModelFamily(PHI4, "phi4", ["<|end|>"], ["<|user|>", "<|assistant|>", "<|system|>"]),
}
