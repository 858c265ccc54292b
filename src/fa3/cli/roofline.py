"""What a problem asks of the chip: FLOPs, exponentials, bytes, and the time each of the three takes at best."""

from __future__ import annotations

from dataclasses import dataclass

#: What one Hopper SM does in a clock: dense 16-bit FLOPs of WGMMA (a 64xNx16 product takes N/2 clocks),
#: and exponentials of the special function units.
FLOPS_PER_CLOCK = 4096
EXP_PER_CLOCK = 16

#: The card assumed where there is none: clock at which the data sheet's dense figure (989 TFLOPS on 132 SMs) holds,
#: and the data sheet's memory bandwidth.
H200_CLOCK_MHZ = 1830.0
H200_BYTES_PER_SECOND = 4.8e12


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
    *,
    flops: float,
    exponentials: float,
    bytes_moved: float,
    sm_count: int,
    clock_mhz: float = H200_CLOCK_MHZ,
    bytes_per_second: float = H200_BYTES_PER_SECOND,
) -> Roofline:
    """Roofline of a problem on a card of ``sm_count`` SMs running at ``clock_mhz``."""
    clocks_per_us = sm_count * clock_mhz
    return Roofline(
        tensor_us=flops / (FLOPS_PER_CLOCK * clocks_per_us),
        exp_us=exponentials / (EXP_PER_CLOCK * clocks_per_us),
        memory_us=bytes_moved / bytes_per_second * 1e6,
    )


def utilisation(tflops: float, sm_count: int, clock_mhz: float) -> float:
    """Share of the tensor cores' rate at the clock they ran at; hardly moves from card to card."""
    return tflops * 1e12 / (sm_count * FLOPS_PER_CLOCK * clock_mhz * 1e6)
