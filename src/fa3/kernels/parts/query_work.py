"""What the functions of the kernel that makes dQ by queries hand to each other, beside the forward's.

See `fa3.kernels.backward_dq`; tiles of work are those of the forward, `fa3.kernels.parts.work.Work`.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from .work import Load


class QueryRows(NamedTuple):
    """Addresses of what there is for each query row: float32, ``per_head`` of them for each head."""

    #: LSE in log2 units; +inf for rows that see no key, and behind the last.
    lse: Int64
    #: rowsum(dout * out) - dLSE; 0 for the same rows.
    delta: Int64
    per_head: Int32


class QueryLoads(NamedTuple):
    """The loads: of q and dout a tile for each warpgroup, of k and v one for all."""

    q: Load
    dout: Load
    k: Load
    v: Load
    #: With a block mask, (stage of k) int32: twice the key tile of a step, and 1 more if the mask cuts it.
    listed: cute.Tensor | None


class QueryShared(NamedTuple):
    """Tiles in shared memory, (rows, columns, warpgroup or stage)."""

    #: Also the place of dq.
    q: cute.Tensor
    dout: cute.Tensor
    k: cute.Tensor
    #: The same bytes as k, (columns, rows, stage).
    k_columns: cute.Tensor
    v: cute.Tensor


class QueryStore(NamedTuple):
    """TMA copies of dq tiles to global memory."""

    tma: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor


class QueryOperands(NamedTuple):
    """What a consumer warpgroup multiplies: descriptors of tiles in shared memory, and registers."""

    q: cute.Tensor
    dout: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    #: Operands of dQ += dS K, and its sums.
    ds: cute.Tensor
    k_columns: cute.Tensor
    dq: cute.Tensor


class QueryPlace(NamedTuple):
    """The thread's two rows in a tile of work, and what belongs to them."""

    queries: tuple[Int32, Int32]
    #: (2) float32 registers each.
    lse: cute.Tensor
    delta: cute.Tensor
    #: (first, one past the last) key tile of which every row of the warpgroup sees every key.
    whole: tuple[Int32, Int32]
