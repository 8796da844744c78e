"""When a save is due by the clock."""

from __future__ import annotations

import time

from hfai.checkpoint.peers import Peers
from hfai.checkpoint.schedule import Schedule


def test_a_first_call_in_no_time_does_not_put_the_first_save_off() -> None:
    schedule = Schedule(Peers(), None, minutes=0.2 / 60)
    assert not schedule.is_due(0)  # microseconds after it was made
    begin, step = time.monotonic(), 0
    while not schedule.is_due(step):
        time.sleep(0.005)
        step += 1
        assert time.monotonic() - begin < 5, "no save is due after 25 times the minutes"
    assert step > 10


def test_it_is_asked_again_a_few_times_a_save_and_not_at_every_call() -> None:
    schedule = Schedule(Peers(), None, minutes=60)
    for step in range(20_000):
        assert not schedule.is_due(step)
    assert schedule._asked < 20
