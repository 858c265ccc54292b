"""Timing of calls: short bursts, steady state, host time, with the clock and the power that went with them."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fa3.cli.peers import Call

#: A burst lasts about this long: long enough for the events' resolution, short enough that the power limit
#: does not yet pull the clock down.
BURST_MS = 4.0
#: Calls of one burst at most.
BURST_CALLS = 64
#: Work kept in the queue during a steady run. Two chunks are in flight, so the GPU never waits for the host.
CHUNK_MS = 40.0
#: Seconds of a steady run that are not counted: clock and power are still moving.
SETTLE_SECONDS = 0.3
#: GPU clocks that a call is given to be queued behind before a burst starts (about 130 us): more than any peer's host
#: takes for a call, or the burst would show the host's time.
QUEUE_CLOCKS = 250_000

#: NVML's number of the field with the power drawn at this instant, in milliwatts.
POWER_INSTANT = 186


def seconds(text: str) -> float:
    """The value of ``--limit``: any number of seconds, which nan is not. argparse names the option beside the error."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if math.isnan(limit):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds; inf: no limit")
    return limit


class Sensors:
    """Clock, power and driver of one GPU, through NVML; every reading is None where NVML is missing."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self.problem: str | None = None
        if device.type != "cuda":
            self.problem = "no GPU"
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            # By UUID: NVML numbers the cards of the machine, torch those of CUDA_VISIBLE_DEVICES.
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._nvml = pynvml
        except Exception as error:  # NVML has an error class for everything, and none of them stops a benchmark
            self.problem = f"no clock and power: {type(error).__name__}: {error}"

    def clock_mhz(self) -> float | None:
        """SM clock now."""
        if self._nvml is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        except self._nvml.NVMLError:
            return None

    def watts(self) -> float | None:
        """Power drawn now. The plain power reading is an average over a second, so the instant one is asked first."""
        if self._nvml is None:
            return None
        try:
            field = self._nvml.nvmlDeviceGetFieldValues(self._handle, [POWER_INSTANT])[0]
            if field.nvmlReturn == self._nvml.NVML_SUCCESS and field.value.uiVal:
                return field.value.uiVal / 1e3
            return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3
        except self._nvml.NVMLError:
            return None

    def driver(self) -> str | None:
        """Driver version."""
        return None if self._nvml is None else str(self._nvml.nvmlSystemGetDriverVersion())


@dataclass(frozen=True)
class Sample:
    """One measurement of one implementation: milliseconds a call, and what the card did meanwhile."""

    ms: float
    clock_mhz: float | None = None
    watts: float | None = None


def median(samples: Sequence[Sample]) -> Sample:
    """Median of each reading by itself."""

    def middle(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    return Sample(
        ms=statistics.median(sample.ms for sample in samples),
        clock_mhz=middle([sample.clock_mhz for sample in samples if sample.clock_mhz is not None]),
        watts=middle([sample.watts for sample in samples if sample.watts is not None]),
    )


def synchronize(device: torch.device) -> None:
    """Wait for the device's work, if it is a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def burst(device: torch.device, calls: Sequence[Call], count: int, sensors: Sensors | None = None) -> Sample:
    """Time ``count`` calls in a row, going round ``calls``, each of which has inputs of its own.

    On a GPU this is the GPU's time: the calls queue up behind a pause, so that a slow host is not counted.
    """
    if device.type != "cuda":
        begin = time.perf_counter()
        for index in range(count):
            calls[index % len(calls)]()
        return Sample((time.perf_counter() - begin) * 1e3 / count)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(QUEUE_CLOCKS * (count + 2))
    start.record()
    for index in range(count):
        calls[index % len(calls)]()
    stop.record()
    clock = None if sensors is None else sensors.clock_mhz()  # read while the queue is still running
    stop.synchronize()
    return Sample(start.elapsed_time(stop) / count, clock)


def rounds(count: int, things: int) -> Iterator[int]:
    """Indices of ``things`` in ``count`` rounds, each round in another order.

    A call draws power that the one after it then lacks: nobody may always come after the same neighbour.
    """
    chance = random.Random(0)
    for _ in range(count):
        yield from chance.sample(range(things), things)


def burst_calls(ms: float) -> int:
    """How many calls of ``ms`` milliseconds make a burst."""
    return max(1, min(BURST_CALLS, round(BURST_MS / max(ms, 1e-3))))


def steady(device: torch.device, calls: Sequence[Call], ms: float, seconds: float, sensors: Sensors) -> Sample:
    """Time calls of about ``ms`` milliseconds that run without a pause for ``seconds``, after a settling time.

    Clock and power are read each time a chunk of calls has ended and the next one is running: the clock's median,
    the power's mean, so that milliseconds times watts is the energy of a call.
    """
    chunk = max(1, round(CHUNK_MS / max(ms, 1e-3)))
    clocks: list[float] = []
    watts: list[float] = []
    begin = time.perf_counter()
    settled_at: float | None = None
    counted = 0
    pending: list[torch.cuda.Event] = []
    while True:
        for index in range(chunk):
            calls[index % len(calls)]()
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            pending.append(event)
            if len(pending) > 1:
                pending.pop(0).synchronize()
        now = time.perf_counter()
        if settled_at is None:
            if now - begin >= SETTLE_SECONDS:
                # A chunk has just ended here, and one ends at each later turn: whole chunks are counted.
                settled_at = now
            continue
        counted += chunk
        clock, power = sensors.clock_mhz(), sensors.watts()
        if clock is not None:
            clocks.append(clock)
        if power is not None:
            watts.append(power)
        if now - begin >= seconds:
            break
    synchronize(device)
    return Sample(
        (now - settled_at) * 1e3 / counted,
        statistics.median(clocks) if clocks else None,
        statistics.fmean(watts) if watts else None,
    )


def host_us(device: torch.device, call: Call, count: int) -> float:
    """Microseconds that the host spends in one call, over ``count`` calls queued without waiting for the GPU."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - begin
    synchronize(device)
    return elapsed * 1e6 / count
