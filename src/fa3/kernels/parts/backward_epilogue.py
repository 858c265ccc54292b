"""What leaves the backward kernel: parts of dQ at every step, dK and dV at the end of a tile of work."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from fa3.spec import WARPGROUP_THREADS, WGMMA_ROWS, BackwardSpec

from . import barriers, products, ptx, tiles
from .backward_work import KeyBarriers, KeyExtras, KeyShared, KeySizes, KeyWork, Rows
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
    def put_dq(
        self,
        position: Int32,
        piece: cutlass.Constexpr,
        between: KeyBarriers,
        me: Consumer,
        shared: KeyShared,
        dq: cute.Tensor,
    ):
        """Write a piece of the warpgroup's part of a dQ tile to shared memory, in the order of the sums, once there is
        room.
        """
        spec = self.spec
        at = position * spec.dq_pieces + piece
        barriers.wait_empty(between.dq_empty, at, spec.dq_stages)
        tile = shared.dq[None, None, None, me.group, barriers.stage_of(at, spec.dq_stages)]
        thread = 32 * me.warp + me.lane
        chunks = cute.size(dq) // (4 * spec.dq_pieces)
        for i in cutlass.range_constexpr(chunks):
            values = cute.make_tensor(dq.iterator + 4 * (piece * chunks + i), cute.make_layout(4))
            cute.autovec_copy(values, tile[None, thread, i])

    @cute.jit
    def show_dq(self, position: Int32, piece: cutlass.Constexpr, between: KeyBarriers):
        """Say that a piece is there, behind the fence that made it visible."""
        barriers.release(between.dq_full, position * self.spec.dq_pieces + piece, self.spec.dq_stages)

    @cute.jit
    def add_sums(
        self,
        sizes: KeySizes,
        extras: KeyExtras,
        supply: tiles.Supply,
        between: KeyBarriers,
        rows: Rows,
        shared: KeyShared,
    ):
        """A warp that adds the dQ tiles in shared memory to their sums in global memory."""
        spec = self.spec
        size = 4 * self.tile_m * spec.head_dim
        lane = cute.arch.lane_idx()
        done, position = Int32(0), Int32(0)
        n_block, head, batch_index = supply.take(done)
        while n_block >= 0:
            work = self.work_of(sizes, extras, n_block, head, batch_index, done, position)
            m_block, query_head = work.first_tile, head * sizes.group
            for step in cutlass.range(0, work.steps, unroll=1):
                row_tile = work.row_tile(query_head, m_block)
                target = rows.dq + size * Int64(row_tile)
                turn_address, turn = rows.turns + 4 * Int64(row_tile), self.turn_of(work, m_block)
                for piece in cutlass.range_constexpr(spec.dq_pieces):
                    at = (position + step) * spec.dq_pieces + piece
                    stage = barriers.stage_of(at, spec.dq_stages)
                    barriers.wait_full(between.dq_full, at, spec.dq_stages)
                    if const_expr(spec.deterministic and piece == 0):
                        if lane == 0:
                            current = ptx.load_acquire(turn_address)
                            while current != turn:
                                current = ptx.load_acquire(turn_address)
                        cute.arch.sync_warp()
                    if lane == 0:
                        # A piece of each warpgroup's part.
                        runs, run = (1, size) if spec.dq_pieces == 1 else (self.groups, size // (self.groups * spec.dq_pieces))
                        for i in cutlass.range_constexpr(runs):
                            source = shared.dq[None, None, None, i, stage].iterator.toint()
                            ptx.add_bulk(target + (i * spec.dq_pieces + piece) * run, source, run)
                        cute.arch.cp_async_bulk_commit_group()
                        if const_expr(spec.deterministic and piece == spec.dq_pieces - 1):
                            cute.arch.cp_async_bulk_wait_group(0)
                            ptx.store_release(turn_address, turn + 1)
                        else:
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                        cute.arch.mbarrier_arrive(between.dq_empty + stage)
                    cute.arch.sync_warp()
                m_block, query_head = self.next_rows(work, m_block, query_head)
            position += work.steps
            done += 1
            n_block, head, batch_index = supply.take(done)
        cute.arch.cp_async_bulk_wait_group(0)

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
