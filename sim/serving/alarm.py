"""Wakes a waiting task at a time, to a tenth of a millisecond where the system can."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_CLOCK_MONOTONIC: Final = 1
_FLAGS: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_NANOSECONDS: Final = 10**9


class _Timer(ctypes.Structure):
    """The system's ``itimerspec``: an interval and a first time."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("first_s", ctypes.c_long),
        ("first_ns", ctypes.c_long),
    )


class Alarm:
    """Calls `ring` once after each `set`, from the running event loop.

    Event loops round what they wait for up to milliseconds, which is much of a step. On
    Linux a timer of the kernel that can be read as a file (timerfd) is as exact as the
    machine; elsewhere the loop's own timer rings.

    Parameters
    ----------
    ring
        What is called.
    """

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._libc: Any = None
        self._file = -1
        if sys.platform == "linux":
            with suppress(OSError, AttributeError, NotImplementedError):
                libc = ctypes.CDLL(None, use_errno=True)
                self._file = libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
                if self._file >= 0:
                    self._libc = libc
                    self._loop.add_reader(self._file, self._read)

    def set(self, delay_s: float) -> None:
        """Ring once, `delay_s` from now; what was set before is forgotten."""
        if self._libc is None:
            self._forget()
            self._handle = self._loop.call_later(delay_s, self._ring)
            return
        # 0 would be none at all.
        seconds, rest = divmod(max(1, round(delay_s * _NANOSECONDS)), _NANOSECONDS)
        self._arm(_Timer(0, 0, seconds, rest))

    def off(self) -> None:
        """Do not ring."""
        if self._libc is None:
            self._forget()
        else:
            self._arm(_Timer())

    def close(self) -> None:
        """Do not ring any more; it cannot be set again."""
        self._forget()
        if self._libc is not None:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._libc = None

    def _arm(self, timer: _Timer) -> None:
        self._libc.timerfd_settime(self._file, 0, ctypes.byref(timer), None)

    def _read(self) -> None:
        with suppress(BlockingIOError):  # set anew since it rang
            os.read(self._file, 8)
            self._ring()

    def _forget(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
