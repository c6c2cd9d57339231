"""The doctor says one cause once."""

from leyden.libs.cli.cluster.release_doctor import once_each
from leyden.libs.cli.view.findings import Finding


def test_one_cause_of_many_pods_is_one_finding_with_its_remedy() -> None:
    pods = [Finding(f"pod-{number}", "problem", "no schema", "see the log") for number in range(12)]
    other = Finding("pod-x", "problem", "no model", "see the log")
    assert list(once_each([*pods[:5], other, *pods[5:]])) == [
        Finding("pod-0", "problem", "no schema (and 11 more pods)", "see the log"),
        other,
    ]
