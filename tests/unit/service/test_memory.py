"""The end of a start: what there is stays, and is looked at no more."""

import gc

from libs.service.memory import settle


def test_the_collector_is_on_and_skips_what_there_is() -> None:
    gc.disable()
    try:
        settle()
        found = gc.isenabled(), gc.get_freeze_count() > 0, len(gc.get_objects()) < gc.get_freeze_count()
    finally:
        gc.enable()
        gc.unfreeze()
    assert found == (True, True, True)
