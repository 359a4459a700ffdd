"""The garbage collector is paused while packages are imported, and only then."""

import gc

import pytest

from megatron_rl.compat.startup import paused_collector


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_paused_and_skips_what_was_made(fails: bool) -> None:
    """The collector is disabled inside and enabled afterwards, also after an error. It does not
    track what was created inside.
    """
    try:
        with paused_collector():
            assert not gc.isenabled()
            made = [{} for _ in range(1000)]
            if fails:
                raise ImportError("broken package")
    except ImportError:
        assert fails
    assert gc.isenabled() and gc.get_freeze_count() >= len(made)
    assert not {id(each) for each in made} & {id(each) for each in gc.get_objects()}


def test_a_collector_that_was_disabled_stays_disabled() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
