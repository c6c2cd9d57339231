"""What a trainer that lost its run leaves alone."""

from pathlib import Path

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.store.database import Database
from leyden.libs.store.locks import AdvisoryLock, LockLost
from leyden.services.trainer import saving
from leyden.services.trainer.learner import make_accelerator, start_learner
from leyden.services.trainer.saving import Saver
from leyden.services.trainer.settings import Settings

DSN = "postgresql://nobody@127.0.0.1:1/nothing"
CONFIG = RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}})


class LostLater(AdvisoryLock):
    """A lock that is held for so many questions."""

    def __init__(self, answers: int) -> None:
        super().__init__(DSN, "trainer:run-a")
        self._answers = answers

    async def check(self) -> None:
        self._answers -= 1
        if self._answers < 0:
            raise LockLost("another trainer may have gone on")


def opened(lock: AdvisoryLock, model: Path, folder: Path) -> Saver:
    settings = Settings(run_id="run-a", database_url=DSN, folder=folder)
    learner = start_learner(model, CONFIG, make_accelerator("cpu", "float32"))
    return Saver(settings, CONFIG, Database(DSN), lock, learner)


async def test_who_lost_the_run_leaves_the_room_of_another(tiny_model: Path, tmp_path: Path) -> None:
    room = tmp_path / "run-a" / "versions" / ".next.partial" / "model.safetensors"
    room.parent.mkdir(parents=True)
    room.write_bytes(b"another's")
    saver = opened(LostLater(0), tiny_model, tmp_path)
    with pytest.raises(LockLost):
        await saver.finish()
    await saver.close()
    assert room.read_bytes() == b"another's"


@pytest.mark.parametrize(("lock", "told"), [(LostLater(1), LockLost), (LostLater(9), FileNotFoundError)])
async def test_room_that_another_trainer_cleared_is_a_lost_run_and_no_trouble_with_files(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: AdvisoryLock, told: type[Exception]
) -> None:
    def cleared(*_: object) -> None:
        raise FileNotFoundError("model.filling")

    monkeypatch.setattr(saving, "reserve_export", cleared)
    saver = opened(lock, tiny_model, tmp_path)
    with pytest.raises(told):
        await saver.finish()
    await saver.close()
