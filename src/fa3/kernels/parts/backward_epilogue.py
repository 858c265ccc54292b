"""What leaves the backward kernel: parts of dQ at every step, dK and dV at the end of a tile of work."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from fa3.spec import WARPGROUP_THREADS, WGMMA_ROWS, BackwardSpec

from . import barriers, products, ptx
from .backward_work import KeyShared, KeyWork, Rows
from .work import Consumer


class KeyEpilogue:
    """The storing half of a consumer."""

    spec: BackwardSpec
    dtype: type[cutlass.Numeric]
    tile_m: int
    tile_n: int
    groups: int
    key_parts: int

    @cute.jit
    def add_dq(
        self,
        work: KeyWork,
        rows: Rows,
        head: Int32,
        m_block: Int32,
        me: Consumer,
        shared: KeyShared,
        dq: cute.Tensor,
    ):
        """Add the warpgroup's part of a dQ tile to its sums.

        The sums of a tile are those of the warpgroups' parts one after the other; of a part, four registers of every
        thread come first, then the next four: a warp adds to 512 bytes at a time.
        """
        tile = self.groups * work.row_tile(head, m_block) + me.group
        chunks = cute.size(dq) // 4
        thread = 32 * me.warp + me.lane
        address = rows.dq + 16 * (Int64(tile) * (chunks * WARPGROUP_THREADS) + thread)
        if const_expr(self.spec.deterministic):
            self.pass_turn(me, shared)
            if thread == 0:
                turn_address, turn = rows.turns + 4 * Int64(tile), self.turn_of(work, m_block)
                current = ptx.load_acquire(turn_address)
                while current != turn:
                    current = ptx.load_acquire(turn_address)
                shared.turns[0, me.group] = turn_address
                shared.turns[1, me.group] = Int64(turn + 1)
            barriers.sync_group(me.group)
        for i in cutlass.range_constexpr(chunks):
            ptx.add_to_memory(address + 16 * WARPGROUP_THREADS * i, dq, 4 * i)

    @cute.jit
    def pass_turn(self, me: Consumer, shared: KeyShared):
        """Let the next block add to the tile of dQ that this warpgroup added to last.

        Called a step later, when the sums have long arrived and the fence hardly waits for them; after the last step at
        once.
        """
        cute.arch.fence_acq_rel_gpu()
        barriers.sync_group(me.group)
        if me.warp == 0 and me.lane == 0:
            turn_address = shared.turns[0, me.group]
            if turn_address != 0:
                ptx.store_release(turn_address, Int32(shared.turns[1, me.group]))
            shared.turns[0, me.group] = Int64(0)

    @cute.jit
    def turn_of(self, work: KeyWork, m_block: Int32) -> Int32:
        """How many blocks add to a dQ tile before this one, where the order is fixed: that of the tiles of work."""
        end = work.sizes.n_blocks
        if const_expr(self.spec.mask != "full"):
            mask = work.sizes.mask
            last_query = cutlass.min((m_block + 1) * self.tile_m, mask.seqlen_q) - 1
            _, end = mask.key_tiles(m_block * self.tile_m, last_query, self.tile_n, self.spec.mask)
        return end - 1 - work.n_block

    @cute.jit
    def store(
        self,
        work: KeyWork,
        me: Consumer,
        values: cute.Tensor,
        columns: cutlass.Constexpr,
        store: tuple,
    ):
        """Send dK or dV of the warpgroup through its place in shared memory."""
        tile, tma, source, target = store
        rounded = cute.make_rmem_tensor(values.layout, self.dtype)
        products.round_to(self.dtype, values, rounded)
        self.write(rounded, tile[None, None, me.group], me)
        # Ordinary writes must be visible to TMA before the thread that issues the store goes on.
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.sync_group(me.group)
        if me.warp == 0:
            key_tile, part = work.n_block, me.group
            if const_expr(self.spec.split_keys):
                key_tile, part = work.n_block * self.key_parts + me.group, Int32(0)
            cute.copy(tma, source[None, me.group], target[None, key_tile, part, work.head, work.batch_index])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def write(self, rounded: cute.Tensor, tile: cute.Tensor, me: Consumer):
        """Write an accumulator, rounded, to a (64, columns) tile in shared memory."""
        columns = cute.size(tile, mode=[1])
        mma = products.make_mma(self.dtype, columns, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma)
        copy_slice = copy.get_slice(32 * me.warp + me.lane)
        values = cute.make_tensor(rounded.iterator, cute.make_layout(mma.partition_shape_C((WGMMA_ROWS, columns))))
        cute.copy(copy, copy_slice.retile(values), copy_slice.partition_D(tile))
