"""A recorder in the place of the kernels of gradients: what they would be launched with, without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa3.backends import hopper, hopper_backward
from fa3.backward_spec import BackwardSpec, FinishSpec, PrepareSpec, QueryGradientSpec
from fa3.kernel_spec import KernelSpec
from fa3.options import Options
from recorder import install as install_forward

#: Arguments of each kernel, in order.
ARGUMENTS: dict[type, tuple[str, ...]] = {
    PrepareSpec: (
        *("out", "dout", "lse", "dlse", "lse_log2", "delta", "turns", "stream"),
        *("batch", "seqlen_q", "heads", "head_dim_v", "out_strides", "dout_strides"),
    ),
    BackwardSpec: (
        *("q", "k", "v", "dout", "dk", "dv", "lse", "delta", "dq", "turns", "counter", "stream"),
        *("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v"),
        *(f"{name}_strides" for name in ("q", "k", "v", "dout", "dk", "dv")),
        *("softmax_scale", "parts", "section", "levels", "blocks", "extra_numbers"),
    ),
    QueryGradientSpec: (
        *("q", "k", "v", "dout", "dq", "lse", "delta", "counter", "stream"),
        *("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v"),
        *(f"{name}_strides" for name in ("q", "k", "v", "dout", "dq")),
        *("softmax_scale", "rows_per_head", "section", "levels", "blocks", "extra_numbers"),
    ),
    FinishSpec: (
        *("sums", "turns", "dq", "stream", "batch", "seqlen_q", "heads", "head_dim", "dq_strides"),
        "softmax_scale",
    ),
}


class BackwardRecorder:
    """A store whose kernels write down their arguments, and their spec as ``spec``."""

    def __init__(self) -> None:
        #: Specs in the order in which they were loaded: three for each call that was planned.
        self.specs: list[KernelSpec] = []
        self.calls: list[dict[str, Any]] = []
        #: Called at a launch with its arguments, while the memory that they point to lives.
        self.look: Callable[[dict[str, Any]], None] = lambda call: None

    def load(self, spec: KernelSpec) -> Callable[..., None]:
        self.specs.append(spec)

        def kernel(*arguments: Any) -> None:
            self.calls.append({"spec": spec, **dict(zip(ARGUMENTS[type(spec)], arguments, strict=True))})
            if isinstance(spec, PrepareSpec):
                # Numbers: what memory happens to hold may be NaN.
                call = self.calls[-1]
                rows = -(-call["seqlen_q"] // spec.tile_m) * spec.tile_m
                write(call["delta"], torch.zeros(call["batch"] * call["heads"] * rows))
            self.look(self.calls[-1])

        return kernel

    def of(self, kind: type) -> list[dict[str, Any]]:
        """The launches of one kind."""
        return [call for call in self.calls if type(call["spec"]) is kind]

    def one(self, kind: type) -> dict[str, Any]:
        """The only launch of one kind."""
        (call,) = self.of(kind)
        return call


def install(patch: pytest.MonkeyPatch) -> BackwardRecorder:
    """Put a new recorder in the place of the kernels, for tensors of the CPU."""
    install_forward(patch)
    recorder = BackwardRecorder()
    patch.setattr(hopper_backward, "default_store", lambda: recorder)
    patch.setattr(hopper_backward, "_known", {})
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(hopper, "_capturing", lambda: False)
    return recorder


def results_of(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dout, out and LSE of a call."""
    shape = (*q.shape[:3], v.shape[3])
    return (
        torch.randn(shape).to(q.dtype),
        torch.randn(shape).to(q.dtype),
        torch.randn(q.shape[0], q.shape[2], q.shape[1]),
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    dlse: Tensor | None = None,
    softmax_scale: float | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    given: tuple[Tensor, Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """A call; ``given`` are dout, out and LSE."""
    dout, out, lse = given or results_of(q, v)
    asked = Options(**options) if options else None
    return hopper_backward.backward(dout, dlse, q, k, v, out, lse, softmax_scale, causal, asked, into)


def contiguous(tensor: Tensor) -> tuple[int, ...]:
    """(batch, row, head) strides, as kernels take them."""
    return tensor.stride()[:3]


def write(address: int, values: Tensor) -> None:
    """What a kernel would have written."""
    ctypes.memmove(address, values.data_ptr(), values.nbytes)


def fill(address: int, count: int, value: float) -> None:
    """The same value everywhere, in bf16."""
    write(address, torch.full((count,), value, dtype=torch.bfloat16))
