"""Lets one process of a soak see another time: its folder stands first in that `PYTHONPATH`."""

import os
import time

_SHIFT_S = float(os.environ.get("TINKERMQ_SOAK_SHIFT_S", "0"))
_time, _time_ns = time.time, time.time_ns


def _shifted() -> float:
    return _time() + _SHIFT_S


def _shifted_ns() -> int:
    return _time_ns() + int(_SHIFT_S * 1e9)


time.time, time.time_ns = _shifted, _shifted_ns
