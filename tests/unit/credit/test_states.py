from leyden.services.credit.air import tool_uses
from leyden.services.credit.forest import call_forest
from leyden.services.credit.states import state_keys
from tests.unit.credit.cases import call, chain, span


def keys(calls: list, spans: list) -> list[str]:
    forest = call_forest(calls)
    found = state_keys(forest, tool_uses([node.call for node in forest.nodes], spans))
    return [found[node.call.id] for node in forest.nodes]


def test_the_state_is_the_history_of_tools_and_statuses() -> None:
    spans = [span("memory", at=0.5), span("search", "error", at=1.5), span("a", at=2.5), span("b", at=2.6)]
    assert keys(chain("x", 5, "memory", "search", "a b"), spans) == [
        "",
        "memory:ok",
        "memory:ok>search:error",
        "memory:ok>search:error>a:ok+b:ok",
        "memory:ok>search:error>a:ok+b:ok>-",
    ]


def test_later_roots_are_states_of_their_own() -> None:
    assert keys([call("a", [1], [2], at=0), call("b", [9], [2], at=1)], []) == ["", "root1"]


def test_a_long_history_stays_short_and_distinct() -> None:
    found = keys(chain("x", 300), [])
    assert max(map(len, found)) <= 440
    assert len(set(found)) == 300
