"""`make bench-gpu` on a machine without a GPU."""

from collections.abc import Iterator

import pytest
import torch

from tests.bench import gpu


@pytest.fixture(autouse=True)
def _one_thread_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_case_makes_a_step_and_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--device", "cpu", "--shapes", "tiny", "--scale", "40", "--steps", "1", "--siblings", "2"])
    printed = capsys.readouterr().out
    assert [case.name in printed for case in gpu.cases()] == [True] * 7
    assert "out of memory" not in printed


def test_compile_adds_a_row_for_each_case_of_trees() -> None:
    assert sum(case.compiled for case in gpu.cases(compiled=True)) == 5


def test_a_machine_without_a_gpu_gets_the_command_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--device cpu --shapes tiny" in capsys.readouterr().err
