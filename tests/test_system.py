"""Machine load while a stage works. NVML is faked: an object that fills in what is passed by reference."""

import time
from typing import Any

from oneaxis.system import MAX_SAMPLES, Gpus, Series, sampled


def test_a_block_is_sampled_from_beginning_to_end() -> None:
    began = time.time()
    with sampled(period_s=0.15) as series:
        while len(series.as_json().get("at_s", [])) < 3 and time.time() < began + 30:
            time.sleep(0.02)
    told = series.as_json()
    assert len(told["at_s"]) >= 3
    assert began - 0.1 <= told["at_s"][0] < told["at_s"][-1] <= time.time() + 0.1
    assert all(0 <= value <= 100 for value in told["cpu_utilization_percentage"])
    assert told["system_memory_usage_megabytes"][0] > 0


def test_a_short_block_has_no_samples() -> None:
    with sampled() as series:
        pass
    assert series.as_json() == {"period_s": 2.0}


def test_long_series_are_thinned_and_gaps_kept() -> None:
    series = Series(1.0)
    for number in range(MAX_SAMPLES + 1):
        series.add({"at_s": float(number), **({"gpu": 1.0} if number == 2 else {})})
    told = series.as_json()
    assert told["period_s"] == 2.0
    assert told["at_s"][:3] == [0.0, 2.0, 4.0]
    assert len(told["at_s"]) == MAX_SAMPLES // 2 + 1
    assert told["gpu"][:3] == [None, 1.0, None]


class Nvml:
    """Two GPUs; the second does not tell its power."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, used: Any) -> int:
        used._obj.gpu = 10 * handle.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, _handle: Any, memory: Any) -> int:
        memory._obj.used = 3_000_000
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 250_000
        return 0 if handle.value == 1 else 3


def test_gpus_say_what_they_can() -> None:
    assert Gpus(Nvml()).sample() == {
        "gpu_0_utilization_percentage": 10.0, "gpu_0_memory_usage_megabytes": 3.0, "gpu_0_power_usage_watts": 250.0,
        "gpu_1_utilization_percentage": 20.0, "gpu_1_memory_usage_megabytes": 3.0,
    }  # fmt: skip
    assert Gpus(None).sample() == {}
