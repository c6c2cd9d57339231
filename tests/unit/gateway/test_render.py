"""Rendering without transformers: limits, ends of turn, templates."""

from __future__ import annotations

import json

import pytest

from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.render import ChatModel, ModelUnreadable
from leyden.services.gateway.request import ToolCall, Turn
from tests.fakes.chat_model import CHATML, CHATML_WITH_TOOLS, EOS, HE, make_chat_model


def test_limits_and_ends_of_turn_are_read_from_the_folder(tmp_path):
    folder = make_chat_model(tmp_path / "m", context_length=512)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 257]}))
    model = ChatModel(folder)
    assert (model.name, model.vocab_size, model.context_length) == ("m", 320, 512)
    assert model.eos_ids == {EOS, 257}
    assert (model.template_has_tools, model.closing) == (False, "<|im_end|>\n")
    assert ChatModel(folder, context_length=100).context_length == 100


def test_marks_are_single_tokens_and_text_is_merged(tmp_path):
    model = ChatModel(make_chat_model(tmp_path / "m"))
    assert model.encode("<|im_end|>he").tolist() == [EOS, HE]
    assert model.encode("he", after=EOS).tolist() == [HE]
    assert model.decode([EOS, HE]) == "<|im_end|>he"


def test_siblings_share_the_tokens_of_their_prompt_and_cannot_change_them(tmp_path):
    model = ChatModel(make_chat_model(tmp_path / "m"))
    ids = model.encode("the same task")
    assert model.encode("the same task") is ids
    assert not ids.flags.writeable


def test_arguments_are_objects_for_the_template_and_text_where_they_are_no_json(tmp_path):
    model = ChatModel(make_chat_model(tmp_path / "m", CHATML_WITH_TOOLS))
    turns = [Turn("assistant", "", tool_calls=(ToolCall("1", "f", '{"b":1,"a":"é"}'), ToolCall("2", "g", "{broken")))]
    text = model.render(turns, (), {}, add_generation_prompt=False)
    assert '"arguments": {"b": 1, "a": "é"}' in text
    assert '"arguments": "{broken"' in text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_template_that_refuses_or_does_not_work_is_a_bad_request(tmp_path, template):
    model = ChatModel(make_chat_model(tmp_path / "m", template))
    with pytest.raises(BadRequest):
        model.render([Turn("user", "x")], (), {}, add_generation_prompt=True)


def test_a_template_may_mark_generations_and_read_options(tmp_path):
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ style }}"
    model = ChatModel(make_chat_model(tmp_path / "m", template))
    assert model.render([Turn("user", "x")], (), {"style": "!"}, add_generation_prompt=True) == "x!"
    with pytest.raises(BadRequest):
        model.render([Turn("user", "x")], (), {"messages": []}, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_folder_that_lacks_something_says_what(tmp_path, name):
    folder = make_chat_model(tmp_path / "m", CHATML)
    (folder / name).unlink()
    with pytest.raises(ModelUnreadable, match=name):
        ChatModel(folder)
