"""Doors of the API and the gateway let streams and uploads through."""

from __future__ import annotations

from tests.contract.chart.chart import FULLNAME, Object, of_kind


def doors(kind: str) -> dict[str, Object]:
    return {one["metadata"]["name"].removeprefix(f"{FULLNAME}-"): one for one in of_kind("gateway-api", kind)}


def test_ingresses_do_not_buffer_and_annotations_of_values_win() -> None:
    found = doors("Ingress")
    assert set(found) == {"api", "gateway"}
    nginx = "nginx.ingress.kubernetes.io"
    for name, seconds in (("api", "3600"), ("gateway", "600")):
        annotations = found[name]["metadata"]["annotations"]
        assert annotations[f"{nginx}/proxy-buffering"] == "off"
        assert annotations[f"{nginx}/proxy-read-timeout"] == seconds


def test_routes_lead_to_the_ports_of_services() -> None:
    ports = {
        (one["metadata"]["name"], port["port"])
        for one in of_kind("gateway-api", "Service")
        for port in one["spec"].get("ports", ())
    }
    found = doors("HTTPRoute")
    assert set(found) == {"api", "gateway"}
    for route in found.values():
        (rule,) = route["spec"]["rules"]
        assert rule["timeouts"] == {"request": "3600s"}
        assert {(one["name"], one["port"]) for one in rule["backendRefs"]} <= ports


def test_the_gateways_policy_lets_the_controller_of_the_ingress_in() -> None:
    policy = next(
        one for one in of_kind("gateway-api", "NetworkPolicy") if one["metadata"]["name"] == f"{FULLNAME}-gateway"
    )
    assert "ingress-nginx" in str(policy["spec"]["ingress"])
