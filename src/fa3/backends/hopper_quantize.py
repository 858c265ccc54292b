"""Quantization on GPUs of compute capability 9.0: see `fa3.kernels.quantize`; `fa3.quantization` is the definition.

As `fa3.backends.hopper` it works out once what depends on shapes, strides and dtypes, and never synchronizes. Takes
device memory for the results, and where heads share a scale 4 bytes for each until its kernels are done. Copied are
inputs that cannot be read 16 bytes at a time: an address or a stride that is no multiple of 16 bytes, cos and sin that
are not contiguous or neither float32 nor of x's dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa3.backends import hopper
from fa3.compiler.store import default_store
from fa3.e4m3 import SMALLEST_AMAX, slots_of
from fa3.quantization import QK_DTYPES, round_up_amax, scale_factor, sign_words
from fa3.quantize_plan import plan_quantize

#: Bytes that are read at a time.
_ALIGNMENT = 16

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}

_NO_SIGNS = (0,) * 8


@dataclass(slots=True)
class _Launch:
    """All of a call that does not change while shapes, strides, dtypes, device and options stay the same."""

    out_shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    copy: bool
    #: Dtype that cos and sin are read in.
    angles: torch.dtype | None
    #: float32 numbers of the amax in two passes: one for all heads or one for each; 0 where there is one pass.
    amax_count: int
    find_amax: Callable[..., Any] | None
    function: Callable[..., Any] | None
    #: Arguments after the addresses and the stream.
    arguments: tuple[Any, ...]
    empty_scale: float
    out_dtype: torch.dtype


_known: dict[Any, _Launch] = {}


def quantize_tensor(
    x: Tensor,
    *,
    rows: int | str,
    rotate: bool = False,
    seed: int = 0,
    rope: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    first_position: int = 0,
    transpose: bool = False,
    power_of_two: bool = False,
    out: str = "e4m3",
) -> tuple[Tensor, Tensor]:
    """Quantize q, k or v to 8 bits on a Hopper GPU; arguments and results as `fa3.quantization.quantize_tensor`.

    Raises:
        TypeError: x is neither fp16 nor bf16.
        ValueError: cos and sin do not reach the last position; more rows than a launch can have.
        CompileError, StoreError: a kernel is not in the store and cannot be compiled here.
    """
    key = (
        x.shape, x.stride(), x.dtype, x.get_device(), rows, rotate, seed, interleaved, first_position, transpose,
        power_of_two, out, None if rope is None else (rope[0].shape, rope[1].shape, rope[0].dtype, rope[1].dtype),
    )  # fmt: skip
    launch = _known.get(key)
    if launch is None:
        if len(_known) >= hopper.MAX_REMEMBERED:
            _known.clear()
        launch = _known[key] = _prepare(
            x, rows, rotate, seed, rope, interleaved and rope is not None, first_position, transpose, power_of_two, out
        )
    device = x.get_device()
    if launch.function is not None and hopper._current_device() != device:
        with torch.cuda.device(device):
            return _run(launch, x, rope, device)
    return _run(launch, x, rope, device)


def _run(launch: _Launch, x: Tensor, rope: tuple[Tensor, Tensor] | None, device: int) -> tuple[Tensor, Tensor]:
    out = x.new_empty(launch.out_shape, dtype=launch.out_dtype)
    scale = x.new_empty(launch.scale_shape, dtype=torch.float32)
    if launch.function is None:
        return out, scale.fill_(launch.empty_scale)
    arguments = launch.arguments
    if launch.copy:
        x = x.clone(memory_format=torch.contiguous_format)
    elif x.data_ptr() % _ALIGNMENT:
        # The same strides at an unaligned address: the copy has strides of its own.
        x = x.clone(memory_format=torch.contiguous_format)
        arguments = (*arguments[:5], hopper._contiguous_strides(x.shape), *arguments[6:])
    cos = sin = None
    if rope is not None and launch.angles is not None:
        cos, sin = (_readable_angles(table, launch.angles) for table in rope)
    angles = (0, 0) if cos is None or sin is None else (cos.data_ptr(), sin.data_ptr())
    stream = ctypes.c_void_p(hopper._current_stream(device))
    x_address, amax_address = x.data_ptr(), 0
    if launch.find_amax is not None:
        amax = torch.zeros(launch.amax_count, dtype=torch.float32, device=x.device)
        amax_address = amax.data_ptr()
        launch.find_amax(x_address, 0, 0, amax_address, *angles, stream, *arguments)
    launch.function(x_address, out.data_ptr(), scale.data_ptr(), amax_address, *angles, stream, *arguments)
    return out, scale


def _readable_angles(table: Tensor, dtype: torch.dtype) -> Tensor:
    table = table.to(dtype).contiguous()
    return table.clone() if table.data_ptr() % _ALIGNMENT else table


def _prepare(
    x: Tensor,
    rows: int | str,
    rotate: bool,
    seed: int,
    rope: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    first_position: int,
    transpose: bool,
    power_of_two: bool,
    out: str,
) -> _Launch:
    """Check a call whose key is new, plan it, and load its kernels."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"x has dtype {x.dtype}: the kernel reads {' and '.join(map(str, _DTYPES))}")
    batch, seqlen, heads, head_dim = x.shape
    angles = None
    if rope is not None:
        angles = x.dtype if all(table.dtype is x.dtype for table in rope) else torch.float32
        for name, table in zip(("cos", "sin"), rope, strict=True):
            if first_position < 0 or table.shape[0] < first_position + seqlen or table.shape[1] != head_dim // 2:
                raise ValueError(
                    f"{name} has shape {tuple(table.shape)}: positions {first_position} to "
                    f"{first_position + seqlen - 1} need at least ({first_position + seqlen}, {head_dim // 2})"
                )
    planned = plan_quantize(
        dtype=_DTYPES[x.dtype],
        batch=max(batch, 1),
        seqlen=max(seqlen, 1),
        heads=max(heads, 1),
        head_dim=head_dim,
        rows=rows,
        rotate=rotate,
        rope="" if angles is None else "same" if angles is x.dtype else "fp32",
        interleaved=interleaved,
        transpose=transpose,
        power_of_two=power_of_two,
        out=out,
        facts=hopper.device_facts(x.device),
    )
    factor = scale_factor(planned.spec.hadamard_block, out)
    out_shape: tuple[int, ...] = (batch, seqlen, heads, head_dim)
    out_strides = hopper._contiguous_strides(out_shape)
    if transpose:
        slots = slots_of(seqlen)
        out_shape = (batch, heads, head_dim, slots)
        out_strides = (heads * head_dim * slots, slots, head_dim * slots)
    copy = x.stride(-1) != 1 or hopper._must_copy(x)
    amax_count = 0 if planned.amax is None else batch * heads if rows == "head" else 1
    arguments = (
        batch,
        seqlen,
        heads,
        first_position,
        planned.heads_per_block,
        hopper._contiguous_strides(x.shape) if copy else hopper._strides(x),
        out_strides,
        (heads, 1) if rows == "head" else (0, 0),
        sign_words(seed, head_dim) if rotate else _NO_SIGNS,
        factor,
    )
    empty = x.numel() == 0
    return _Launch(
        out_shape=out_shape,
        scale_shape=(batch, heads, -(-seqlen // rows)) if isinstance(rows, int) else (batch, heads),
        copy=copy,
        angles=angles,
        amax_count=amax_count,
        find_amax=None if empty or planned.amax is None else default_store().load(planned.amax),
        function=None if empty else default_store().load(planned.spec),
        arguments=arguments,
        empty_scale=_empty_scale(factor, power_of_two),
        out_dtype=QK_DTYPES[out],
    )


def _empty_scale(factor: float, power_of_two: bool) -> float:
    """The scale of no rows."""
    amax = torch.tensor(SMALLEST_AMAX, dtype=torch.float32)
    return (round_up_amax(amax) if power_of_two else amax).item() * factor
