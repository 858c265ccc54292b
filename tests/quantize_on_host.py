"""The quantize kernel on the CPU, launched as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import quantize_wrappers
from bricks_on_host import call, floats
from fa3.spec import QuantizeSpec


def kernel_on_host(spec: QuantizeSpec) -> Callable[..., None]:
    """What the store would load: a function with the arguments of `fa3.kernels.quantize.QuantizeKernel.__call__`."""
    spec.validate()

    def launch(*arguments: Any) -> None:
        batch, seqlen, heads, first_position, _ = arguments[7:12]
        x_strides, out_strides, amax_strides, signs, scale_factor = arguments[12:]
        sizes = (batch, seqlen, heads, first_position, 0, *x_strides, *out_strides, *amax_strides)
        call(
            quantize_wrappers.quantize,
            torch.tensor(arguments[:6]),
            torch.tensor(sizes, dtype=torch.int32),
            torch.tensor(signs, dtype=torch.int32),
            floats(2, spec.split * spec.threads, spec.units * spec.held),
            scale_factor,
            constants=(spec,),
        )

    return launch


class HostStore:
    """A store of such kernels; ``specs`` are those that were asked for."""

    def __init__(self) -> None:
        self.specs: list[QuantizeSpec] = []

    def load(self, spec: QuantizeSpec) -> Callable[..., None]:
        self.specs.append(spec)
        return kernel_on_host(spec)
