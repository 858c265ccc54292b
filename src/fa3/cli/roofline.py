"""What a problem asks of the chip: FLOPs, exponentials, bytes, and the time each of the three takes at best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa3.plan import DeviceFacts

#: What one Hopper SM does in a clock: dense 16-bit FLOPs of WGMMA (a 64xNx16 product takes N/2 clocks),
#: and exponentials of the special function units.
FLOPS_PER_CLOCK = 4096
EXP_PER_CLOCK = 16


def attention_flops(
    *, batch: int, heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int, causal: bool
) -> float:
    """FLOPs of one forward, as the papers count them.

    Both products, two FLOPs a multiply-add, nothing for softmax; a causal mask counts half, whatever the tiles do.
    """
    flops = 2.0 * batch * heads * seqlen_q * seqlen_k * (head_dim + head_dim_v)
    return flops / 2 if causal else flops


@dataclass(frozen=True)
class Roofline:
    """Least time of a problem, in microseconds, for each of the units that must work on it."""

    tensor_us: float
    exp_us: float
    memory_us: float

    @property
    def bound(self) -> str:
        """The unit that takes longest."""
        times = {"tensor cores": self.tensor_us, "exponentials": self.exp_us, "memory": self.memory_us}
        return max(times, key=lambda unit: times[unit])


def roofline(
    *, flops: float, exponentials: float, bytes_moved: float, device: DeviceFacts, dtype: str = "bf16"
) -> Roofline:
    """Least times on a device at its highest clock, of products in a dtype; no kernel beats the largest of them."""
    from fa3.plan import tensor_flops_per_clock

    clocks_per_us = device.sm_count * device.boost_clock_hz / 1e6
    return Roofline(
        tensor_us=flops / (tensor_flops_per_clock(device, dtype) * clocks_per_us),
        exp_us=exponentials / (EXP_PER_CLOCK * clocks_per_us),
        memory_us=bytes_moved / device.memory_bytes_per_second * 1e6,
    )


def utilisation(tflops: float, sm_count: int, clock_mhz: float) -> float:
    """Share of the tensor cores' rate at the clock they ran at; hardly moves from card to card."""
    return tflops * 1e12 / (sm_count * FLOPS_PER_CLOCK * clock_mhz * 1e6)
