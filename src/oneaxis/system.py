"""How busy the machine was while a stage worked: host CPU and memory, and GPUs where there are any, every few seconds.

A thread reads a few counters (well under a millisecond: it must not disturb a load client in the same process); the
series goes into the stage's provenance, so that it is there whether or not a tracking server was, and comes back with
a stage that is restored. A long stage is sampled more thinly: there are never more than `MAX_SAMPLES`.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

PERIOD_S = 2.0
MAX_SAMPLES = 240


class Series:
    """Samples in time, each with `at_s` (Unix time) and what could be read then."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self.period_s = period_s
        self._samples: list[dict[str, float]] = []

    def add(self, sample: dict[str, float]) -> None:
        """Append one sample; at the limit every second one is dropped and the period doubles."""
        self._samples.append({name: round(value, 1) for name, value in sample.items()})
        if len(self._samples) > MAX_SAMPLES:
            self._samples = self._samples[::2]
            self.period_s *= 2

    def as_json(self) -> dict[str, Any]:
        """For the provenance: the period and one list per quantity, a GPU's named `gpu_<index>_...`; null: unread.

        No list when the stage ended before the first sample.
        """
        names = sorted({name for sample in self._samples for name in sample})
        return {"period_s": self.period_s, **{name: [sample.get(name) for sample in self._samples] for name in names}}


@contextmanager
def sampled(period_s: float = PERIOD_S) -> Iterator[Series]:
    """Sample the machine during the block."""
    series, over = Series(period_s), threading.Event()
    psutil.cpu_percent(None)

    def watch() -> None:
        gpus = Gpus(_library())
        while not over.wait(series.period_s):
            series.add(_sample(gpus))

    thread = threading.Thread(target=watch, daemon=True, name="system-metrics")
    thread.start()
    try:
        yield series
    finally:
        over.set()
        thread.join(2.0)


def _sample(gpus: "Gpus") -> dict[str, float]:
    memory = psutil.virtual_memory()
    return {
        "at_s": time.time(),
        "cpu_utilization_percentage": psutil.cpu_percent(None),
        "system_memory_usage_megabytes": (memory.total - memory.available) / 1e6,
        "system_memory_usage_percentage": memory.percent,
        **gpus.sample(),
    }


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class Gpus:
    """The host's NVIDIA GPUs through NVML, the library of the driver; none where it is absent or will not start.

    Called by ctypes, since its Python package is not among vLLM's dependencies. Source: NVML API reference.
    """

    def __init__(self, library: Any) -> None:
        self._nvml, self._handles = library, []
        count = ctypes.c_uint()
        if library is None or library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                self._handles.append((index, handle))

    def sample(self) -> dict[str, float]:
        """Utilisation (%), memory (MB) and power (W) of each GPU; what it will not tell is left out."""
        found: dict[str, float] = {}
        for index, handle in self._handles:
            used, memory, milliwatts = _Utilization(), _Memory(), ctypes.c_uint()
            if self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) == 0:
                found[f"gpu_{index}_utilization_percentage"] = float(used.gpu)
            if self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                found[f"gpu_{index}_memory_usage_megabytes"] = memory.used / 1e6
            if self._nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts)) == 0:
                found[f"gpu_{index}_power_usage_watts"] = milliwatts.value / 1e3
        return found


def _library() -> Any:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
