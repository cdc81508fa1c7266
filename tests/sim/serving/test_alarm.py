"""The alarm of the served clock, with the kernel's timer and with the loop's."""

from __future__ import annotations

import asyncio
import sys
from time import monotonic

import pytest

from sim.serving.alarm import Alarm


@pytest.mark.parametrize("platform", [sys.platform, "another"])
def test_an_alarm_rings_once_and_not_early_and_not_when_it_is_off(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.serving.alarm.sys.platform", platform)
    rung: list[float] = []

    async def wait() -> None:
        alarm = Alarm(lambda: rung.append(monotonic() - began_s))
        began_s = monotonic()
        alarm.set(10)
        alarm.set(0.02)
        await asyncio.sleep(0.1)
        assert len(rung) == 1
        # loops round to a millisecond
        assert rung[0] >= 0.019
        alarm.set(0.01)
        alarm.off()
        await asyncio.sleep(0.03)
        alarm.set(0)
        await asyncio.sleep(0.03)
        assert len(rung) == 2
        alarm.set(0.01)
        alarm.close()
        alarm.close()
        await asyncio.sleep(0.03)

    asyncio.run(wait())
    assert len(rung) == 2
