"""The end of a start: what there is stays, and is looked at no more."""

import gc

from leyden.libs.service.memory import COLLECT_AFTER_OBJECTS, freeze_heap


def test_the_collector_is_on_and_skips_what_there_is_and_looks_seldom() -> None:
    before = gc.get_threshold()
    gc.disable()
    try:
        freeze_heap()
        skips = gc.get_freeze_count() > 0, len(gc.get_objects()) < gc.get_freeze_count()
        found = gc.isenabled(), *skips, gc.get_threshold()[0]
    finally:
        gc.enable()
        gc.unfreeze()
        gc.set_threshold(*before)
    assert found == (True, True, True, COLLECT_AFTER_OBJECTS)
