"""Runs kernel bricks on the CPU: wrappers of them, compiled for the host, that read and write plain tables in memory.

What exists only on the GPU is replaced while compiling: float maximum, reciprocal and conversions by the DSL's
portable ones, the exchange between lanes by that of a warp whose lanes all hold the same values, and waiting for other
threads by nothing, since the wrappers run one thread after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from torch import Tensor

import e4m3_on_host
import matrices_on_host
from fa3.kernels.parts import barriers, ptx


def _fmax(one: cutlass.Float32, other: cutlass.Float32, nan: bool = False) -> cutlass.Float32:
    largest = cute.math.max(one, other)
    if not nan:
        return largest
    # The bits of NaN or'ed to any others are those of a NaN.
    one, other = cutlass.Float32(one), cutlass.Float32(other)
    lost = [cutlass.Int32(x != x) * 0x7FC00000 for x in (one, other)]
    return (largest.bitcast(cutlass.Int32) | lost[0] | lost[1]).bitcast(cutlass.Float32)


def _pack_pair(low: cutlass.Float32, high: cutlass.Float32, dtype: type[cutlass.Numeric]) -> cutlass.Int32:
    pair = cute.make_rmem_tensor(2, dtype)
    pair[0], pair[1] = dtype(low), dtype(high)
    return cute.recast_tensor(pair, cutlass.Int32)[0]


def _unpack(pair: cutlass.Int32, half: int, dtype: type[cutlass.Numeric]) -> cutlass.Float32:
    # Of two: recasting a tensor of one word gives two times its first half.
    both = cute.make_rmem_tensor(2, cutlass.Int32)
    both[0] = pair
    return cutlass.Float32(cute.recast_tensor(both, dtype)[half])


@functools.cache
def _compiled(entry: Callable[..., None], types: tuple[type, ...], constants: tuple[Any, ...]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute.arch, "fmax", _fmax)
        patch.setattr(cute.arch, "rcp_approx", lambda value: 1.0 / value)
        patch.setattr(cute.arch, "shuffle_sync_bfly", lambda value, offset: value)
        patch.setattr(cute.arch, "vote_any_sync", lambda predicate: predicate)
        patch.setattr(cute.arch, "fence_proxy", lambda *_, **__: None)
        patch.setattr(ptx, "pack_pair", _pack_pair)
        patch.setattr(ptx, "unpack", _unpack)
        patch.setattr(ptx, "pack_four", e4m3_on_host.pack_four)
        patch.setattr(cute.arch, "prmt", matrices_on_host.permute_bytes)
        patch.setattr(ptx, "load_matrices_transposed", matrices_on_host.load_matrices_transposed)
        patch.setattr(ptx, "store_matrices", matrices_on_host.store_words)
        patch.setattr(ptx, "store_pair", matrices_on_host.store_words)
        patch.setattr(barriers, "sync_group", lambda group: None)
        return cute.compile(entry, *(t(0) for t in types), *constants, options="--gpu-arch sm_90a")


def call(entry: Callable[..., None], *arguments: Tensor | int | float, constants: tuple[Any, ...] = ()) -> None:
    """Run a wrapper: tensors go as addresses, numbers as 32-bit values; ``constants`` are compiled into it."""
    values = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            assert argument.is_contiguous()
            values.append(cutlass.Int64(argument.data_ptr()))
        else:
            values.append(cutlass.Int32(argument) if isinstance(argument, int) else cutlass.Float32(argument))
    _compiled(entry, tuple(type(v) for v in values), constants)(*values)


def ints(*shape: int) -> Tensor:
    """A result that no correct answer is equal to yet."""
    return torch.full(shape, -(10**6), dtype=torch.int32)


def floats(*shape: int) -> Tensor:
    """As `ints`, in float32."""
    return torch.full(shape, -1e30)
