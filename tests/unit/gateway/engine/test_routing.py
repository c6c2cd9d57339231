"""Routed experts of an engine's answer: their form in the record, and what the gateway refuses."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from leyden.libs.contracts.samples import RoutedExperts
from leyden.services.gateway.engine import routing
from leyden.services.gateway.engine.routing import Chosen, cut_experts, decode_experts, read_experts
from leyden.services.gateway.engine.sglang import EngineLost, read_event, request_body
from leyden.services.gateway.errors import Unavailable
from tests.fakes.sglang_types import api_types
from tests.unit.gateway.engine.test_sglang import STOP, builder, event, request


def encoded(values: Any) -> dict[str, str]:
    return {"routed_experts": base64.b64encode(np.array(values, "<i4").tobytes()).decode()}


def test_a_request_asks_for_experts_from_a_position_on_only_where_they_are_replayed() -> None:
    _, tokens = builder()
    bodies = [orjson.loads(request_body(request(routed_from=start), tokens, "r", None)) for start in (None, 7)]
    fields = [(body.get("return_routed_experts"), body.get("routed_experts_start_len")) for body in bodies]
    assert fields == [(None, None), (True, 7)]
    assert api_types().GenerateRequest.from_json_value(bodies[1]).routed_experts_start_len == 7


def chosen(values: Any) -> Chosen:
    _, found = cut_experts(event([5], **encoded(values)))
    assert found is not None
    return decode_experts(found)


def test_experts_are_stored_in_the_smallest_numbers_and_padding_is_none() -> None:
    wide = read_experts(chosen([[[0, 255], [3, -1]]] * 2), 1, 4)
    assert wide == RoutedExperts(1, 4, 2, np.array([[0, 255, 3, 65535]] * 2, "<u2").tobytes())
    narrow = read_experts(chosen([[[0, 254], [3, -1]]]), 0, 2)
    assert narrow == RoutedExperts(0, 4, 1, bytes([0, 254, 3, 255]))
    assert RoutedExperts.parse(narrow.stored()) == narrow


def test_experts_of_many_pieces_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(-1, 300, 1000)
    expected, sizes = chosen(values), list[int]()

    def decode(piece: memoryview, **options: bool) -> bytes:
        sizes.append(len(piece))
        return base64.b64decode(piece, **options)

    monkeypatch.setattr(routing, "_PIECE_BYTES", 16)
    monkeypatch.setattr(routing, "base64", SimpleNamespace(b64decode=decode))
    assert chosen(values) == expected
    # One call keeps the event loop waiting, in whatever thread it is.
    assert set(sizes[:-1]) == {16}
    assert len(sizes) == 334
    assert expected == Chosen(1000, 2, np.where(values < 0, 65535, values).astype("<u2").tobytes())


def test_a_call_without_a_new_token_or_with_too_many_bytes_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_experts(chosen([]), 3, 4) is None
    monkeypatch.setattr(routing, "MAX_BYTES", 3)
    lost = routing.ROUTINGS_LOST._value.get()
    assert read_experts(chosen([[1, 2, 3, 4]]), 0, 2) is None
    assert routing.ROUTINGS_LOST._value.get() == lost + 1


@pytest.mark.parametrize("values", [[1, 2, 3], [], [70000, 1]])
def test_malformed_experts_are_refused(values: list[int]) -> None:
    with pytest.raises(ValueError, match="expert"):
        read_experts(chosen(values), 0, 3)


@pytest.mark.parametrize(
    "said", ["routed_experts", '"routed_experts', '"routed_experts": "', '{"routed_experts":"AAAA"}']
)
def test_a_text_that_names_experts_is_none(said: str) -> None:
    document = orjson.loads(event([5, 2], finish=STOP, **encoded([[1, 2]])))
    data = orjson.dumps({"text": said, **document, "said": said})
    rest, found = cut_experts(data)
    assert found is not None
    assert base64.b64decode(found) == np.array([1, 2], "<i4").tobytes()
    assert orjson.loads(rest)["said"] == said
    assert cut_experts(orjson.dumps({"text": said})) == (orjson.dumps({"text": said}), None)


def test_the_last_event_has_the_experts_of_prompt_and_answer_but_the_last_token() -> None:
    made, tokens = builder(routed_from=1)
    made.add_event(read_event(event([5], total=1)))
    made.add_event(read_event(event([5, 2], finish=STOP, **encoded([[1, 2], [3, 4]]))))
    assert tokens.routed_experts == RoutedExperts(1, 2, 1, bytes([1, 2, 3, 4]))


def test_an_answer_without_experts_fails_with_the_engines_flag() -> None:
    made, _ = builder(routed_from=0)
    with pytest.raises(Unavailable, match="--enable-return-routed-experts"):
        made.add_event(read_event(event([5, 2], finish=STOP)))


@pytest.mark.parametrize("experts", [{"routed_experts": "?"}, encoded([[1, 2]])])
def test_an_answer_with_malformed_experts_is_lost_with_all_its_tokens(experts: dict[str, Any]) -> None:
    made, tokens = builder(routed_from=0)
    with pytest.raises(EngineLost):
        made.add_event(read_event(event([5, 2], finish=STOP, **experts)))
    # The next engine would go on behind the end of the answer.
    assert tokens.ids == []
