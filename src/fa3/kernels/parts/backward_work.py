"""What the functions of the backward kernel hand to each other."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .mask import Mask
from .work import Load


class KeySizes(NamedTuple):
    """Sizes of the launch, the same for every block. A tile of work is ``tile_n`` keys of one head of tiles."""

    batch: Int32
    heads_q: Int32
    #: Heads of tiles: the query heads of a K/V head come in ``parts``, and each part is one.
    heads: Int32
    parts: Int32
    #: Query heads of a head of tiles.
    group: Int32
    m_blocks: Int32
    n_blocks: Int32
    #: Query tiles of the query heads of a head of tiles.
    all_steps: Int32
    section: Int32
    levels: Int32
    tiles: Int32
    mask: Mask


class KeyExtras(NamedTuple):
    """What only some calls ask for, as in `fa3.kernels.parts.work.Extras`."""

    tanh_factor: Float32
    mod_factor: Float32
    score_aux: tuple
    mask_aux: tuple
    #: Lists of a block mask as of the forward, but of the query tiles that see a block of keys; and, if the order is
    #: fixed, the address of what `fa3.key_lists.KeyLists` calls their turns.
    blocks: tuple
    list_turns: tuple


class Rows(NamedTuple):
    """Addresses of what there is for each query row: float32, ``m_blocks * tile_m`` of them for each head."""

    #: LSE in log2 units; +inf for rows that see no key, and behind the last.
    lse: Int64
    #: rowsum(dout * out) - dLSE; 0 for the same rows.
    delta: Int64
    #: Sums of dQ, before the softmax scale; the order of a tile's elements is explained at ``KeySums``.
    dq: Int64
    #: int32 for each query tile and head, 0 before the launch: how many blocks have added to the tile, if the order is
    #: fixed; else 1 when one is about to store the first part, and `STORED` then.
    turns: Int64


class KeyWork(NamedTuple):
    """One tile of work: its keys, and the steps over the query tiles that see them, head after head of the group."""

    sizes: KeySizes
    extras: KeyExtras
    n_block: Int32
    head: Int32
    batch_index: Int32
    #: The first query tile, and how many of each head; 0 where lists say that.
    first_tile: Int32
    tiles_per_head: Int32
    steps: Int32
    #: Tiles that this block has done before, and the steps that went through the stages for them.
    done: Int32
    position: Int32

    def row_tile(self, head: Int32, m_block: Int32) -> Int32:
        """Number of a query tile among those of all query heads and batch entries."""
        return (self.batch_index * self.sizes.heads_q + head) * self.sizes.m_blocks + m_block


class KeyLoads(NamedTuple):
    """The loads of a backward kernel. The stages of q bring the LSE too, those of dout delta."""

    k: Load
    v: Load
    q: Load
    dout: Load
    #: (tile_m, stage) float32.
    lse: cute.Tensor
    delta: cute.Tensor
    #: With a block mask, (3, stage of q) int32: query tile and head of a step, and 1 if the mask cuts it.
    listed: cute.Tensor | None


class KeyShared(NamedTuple):
    """Tiles in shared memory. Each operand has two views of the same bytes: rows and columns, or columns and rows."""

    k: cute.Tensor
    k_columns: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    q_columns: cute.Tensor
    dout: cute.Tensor
    dout_columns: cute.Tensor
    #: dS transposed, (64 keys, queries, tile), and (queries, 64 keys, tile).
    ds: cute.Tensor
    ds_rows: cute.Tensor
    #: P transposed; only where the warpgroups share their keys.
    p: cute.Tensor | None
    #: Float32 dQ in the order of the sums, (4 registers, thread, chunk, warpgroup, stage).
    dq: cute.Tensor | None


class KeyBarriers(NamedTuple):
    """Barriers between the consumers, and the warp that adds dQ."""

    #: dS, or P, of a step is in shared memory.

    ds_full: cute.Pointer
    p_full: cute.Pointer
    #: dQ of a step is in shared memory; and has left it.
    dq_full: cute.Pointer
    dq_empty: cute.Pointer


class KeyOperands(NamedTuple):
    """What a consumer warpgroup multiplies: descriptors of tiles in shared memory, and registers."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    dout: cute.Tensor
    #: Second operands of dK and dV, and both of dQ.
    q_columns: cute.Tensor
    dout_columns: cute.Tensor
    ds_rows: cute.Tensor
    k_columns: cute.Tensor
    #: First operand of dV: registers, or tiles in shared memory where the warpgroups share their keys; and of dK.
    p: cute.Tensor
    ds: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
