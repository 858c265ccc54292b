"""A recorder in the place of the hopper backend's kernels: what they would be launched with, without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa3 import mods
from fa3.backends import hopper
from fa3.mods import BlockMask, MaskMod
from fa3.options import Options
from fa3.plan import H200
from fa3.spec import ForwardSpec

#: Arguments of a launch, in order; ``extras`` are those that only some kernels have, as one tuple.
NAMES = (
    *("q", "k", "v", "out", "lse", "sink", "counter", "stream"),
    *("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v"),
    *(f"{tensor}_{stride}_stride" for tensor in ("q", "k", "v", "out") for stride in ("batch", "row", "head")),
    *("softmax_scale", "section", "levels", "blocks", "sink_bytes", "extras"),
)
SIZES = NAMES[8:15]

#: Those that are not the same in another call of the same kind.
OF_ONE_CALL = ("q", "k", "v", "out", "lse", "sink", "counter", "stream")


class Recorder:
    """A store whose kernels write down their arguments, and their spec as ``spec``."""

    def __init__(self) -> None:
        #: Specs in the order in which they were loaded: one for each call that was planned.
        self.specs: list[ForwardSpec] = []
        self.calls: list[dict[str, Any]] = []
        #: Called at a launch with its arguments, while the memory that they point to lives.
        self.look: Callable[[dict[str, Any]], None] = lambda call: None

    def load(self, spec: ForwardSpec) -> Callable[..., None]:
        self.specs.append(spec)

        def kernel(*arguments: Any) -> None:
            self.calls.append({"spec": spec, **dict(zip(NAMES, arguments, strict=True))})
            self.look(self.calls[-1])

        return kernel

    @property
    def last(self) -> dict[str, Any]:
        return self.calls[-1]


def install(patch: pytest.MonkeyPatch) -> Recorder:
    """Put a new recorder in the place of the kernels, for tensors of the CPU."""
    recorder = Recorder()
    patch.setattr(hopper, "default_store", lambda: recorder)
    patch.setattr(hopper, "device_facts", lambda device: H200)
    patch.setattr(hopper, "_current_device", lambda: -1)  # what a CPU tensor says of its device
    patch.setattr(hopper, "_current_stream", lambda device: 0)
    patch.setattr(hopper, "_capturing", lambda: False)
    patch.setattr(hopper, "_launches", {})
    patch.setattr(hopper, "_counters", {})
    zeros = torch.zeros
    # Counters are asked for by the number of their device.
    patch.setattr(torch, "zeros", lambda *size, device="cpu", **kind: zeros(*size, device="cpu", **kind))
    return recorder


@contextlib.contextmanager
def forgotten():
    """No call is remembered inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "_launches", {})
        yield


def tensors(
    batch: int = 2,
    seqlen_q: int = 100,
    seqlen_k: int = 130,
    heads_q: int = 4,
    heads_kv: int = 2,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v."""
    return (
        torch.randn(batch, seqlen_q, heads_q, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, heads_kv, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, heads_kv, head_dim_v or head_dim).to(dtype),
    )


def strides_of(call: dict[str, Any], tensor: str) -> tuple[int, int, int]:
    """(batch, row, head) strides of one of q, k, v and out."""
    batch, row, head = (call[f"{tensor}_{stride}_stride"] for stride in ("batch", "row", "head"))
    return batch, row, head


def memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """A copy of ``count`` elements at an address."""
    size = count * dtype.itemsize
    return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=dtype)


def keep_score(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor, *aux: Tensor) -> Tensor:
    """The PyTorch twin of modifications of scores."""
    return score


def keep_key(batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor, *aux: Tensor) -> Tensor:
    """The PyTorch twin of masks."""
    return kv_index >= 0


def forward(
    *tensors_of_call: Tensor,
    causal: bool = False,
    lse: bool = False,
    softmax_scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """A call with options."""
    return hopper.forward(*tensors_of_call, softmax_scale, causal, lse, Options(**options))


def block_mask(
    batch: int = 1, heads: int = 1, seqlen_q: int = 100, seqlen_k: int = 130, aux: tuple[Tensor, ...] = ()
) -> BlockMask:
    """A block mask without blocks, of a mask that has no say here."""
    query_blocks, key_blocks = -(-seqlen_q // 128), -(-seqlen_k // 128)
    return BlockMask(
        MaskMod("one:mask", keep_key, aux),
        seqlen_q,
        seqlen_k,
        counts=torch.zeros(batch, heads, query_blocks, 2, dtype=torch.int32),
        indices=torch.zeros(batch, heads, query_blocks, key_blocks, dtype=torch.int32),
    )


def options_of_every_kind() -> dict[str, dict[str, Any]]:
    """Arguments that each of the options has, or none."""
    bias, ids = torch.zeros(4, 9), torch.zeros(2, 130, dtype=torch.int32)
    return {
        "window": {"window_left": 10},
        "softcap": {"softcap": 5.0},
        "qv": {"qv": torch.zeros(2, 100, 4, 128, dtype=torch.bfloat16)},
        "score_mod": {"score_mod": mods.relative_bias(bias)},
        "mask_mod": {"mask_mod": mods.document(ids)},
        "sink": {"sink": torch.zeros(4)},
    }
