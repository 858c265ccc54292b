"""What the kernels hand from one function to the next."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64


class Sizes(NamedTuple):
    """Sizes of the launch, the same for every block."""

    batch: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    heads_q: Int32
    heads_per_group: Int32
    m_blocks: Int32
    section: Int32
    levels: Int32
    tiles: Int32


class Work(NamedTuple):
    """One tile of the output: where it is, and how far the rings of stages had come when it began."""

    sizes: Sizes
    first_row: Int32
    head: Int32
    batch_index: Int32
    key_tiles: Int32
    #: Tiles that this block has done before, and the key tiles that went through the stages for them.
    done: Int32
    position: Int32


class Load(NamedTuple):
    """TMA copies of tiles into stages: (bytes, stage) and (bytes, tile, head, batch), and the stages' barriers."""

    tma: cute.CopyAtom
    target: cute.Tensor
    source: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    bytes: int


class Loads(NamedTuple):
    """The loads of a forward kernel."""

    q: Load
    k: Load
    v: Load


class Store(NamedTuple):
    """TMA copies of out tiles to global memory, and the address of LSE (0: not wanted)."""

    tma: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor
    lse: Int64


class Shared(NamedTuple):
    """Tiles in shared memory, (rows, columns, warpgroup or stage)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor


class Operands(NamedTuple):
    """What a consumer warpgroup multiplies: descriptors of tiles in shared memory, and registers."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    scores: cute.Tensor
    output: cute.Tensor


class Consumer(NamedTuple):
    """A thread of a consumer warpgroup: which group, which of its four warps, which lane."""

    group: Int32
    warp: Int32
    lane: Int32
    #: Whether this warp loads as well; False where a producer warp does.
    loads: Boolean | bool
