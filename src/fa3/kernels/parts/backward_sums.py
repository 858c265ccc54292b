"""How dQ tiles get to their float32 sums in global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from fa3.backward_spec import BackwardSpec
from fa3.spec import BLOCK

from . import barriers, ptx, tiles
from .backward_work import KeyBarriers, KeyExtras, KeyShared, KeySizes, KeyWork, Rows
from .work import Consumer

#: What ``Rows.turns`` says of a tile whose first part has been stored, where the order is not fixed.
STORED = 2


class KeySums:
    """The way of dQ, from a consumer's registers through shared memory, and from there by a warp of its own.

    The sums of a tile are those of the warpgroups' parts one after the other; of a part, four registers of every thread
    come first, then the next four: a warp writes 512 bytes at a time, and nobody needs a matrix.
    """

    spec: BackwardSpec
    tile_m: int
    tile_n: int
    groups: int

    @cute.jit
    def send_dq(self, position: Int32, between: KeyBarriers, me: Consumer, shared: KeyShared, dq: cute.Tensor):
        """Write the warpgroup's part of a dQ tile to shared memory; to be seen behind a fence, and `show_dq`."""
        barriers.wait_empty(between.dq_empty, position, self.spec.dq_stages)
        tile = shared.dq[None, None, None, me.group, barriers.stage_of(position, self.spec.dq_stages)]
        for i in cutlass.range_constexpr(cute.size(dq) // 4):
            values = cute.make_tensor(dq.iterator + 4 * i, cute.make_layout(4))
            cute.autovec_copy(values, tile[None, 32 * me.warp + me.lane, i])

    @cute.jit
    def show_dq(self, position: Int32, between: KeyBarriers):
        """Say that this warp has written its part of a dQ tile to shared memory."""
        barriers.release(between.dq_full, position, self.spec.dq_stages)

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
        """The warp that adds dQ tiles from shared memory to their sums; where the order is fixed, each in its turn."""
        spec = self.spec
        size = 4 * self.tile_m * spec.head_dim
        lane = cute.arch.lane_idx()
        done, position = Int32(0), Int32(0)
        n_block, head, batch_index = supply.take(done)
        while n_block >= 0:
            work = self.work_of(sizes, extras, n_block, head, batch_index, done, position)
            m_block, query_head, rank = self.first_rows(work)
            row_tile = work.row_tile(query_head, m_block)
            state = Int32(0)
            if work.steps > 0:
                state = self.state_of(rows, row_tile)
            for step in cutlass.range(position, position + work.steps, unroll=1):
                turn = (
                    self.turn_of(work, m_block, query_head, rank) if const_expr(spec.deterministic) else Int32(STORED)
                )
                target, turn_address = rows.dq + size * Int64(row_tile), rows.turns + 4 * Int64(row_tile)
                stage = barriers.stage_of(step, spec.dq_stages)
                if const_expr(spec.mask == "blocks"):
                    # Reading a list takes time, of which there is more before the tile is there than after it.
                    m_block, query_head, rank = self.next_rows(work, m_block, query_head, rank)
                barriers.wait_full(between.dq_full, step, spec.dq_stages)
                if const_expr(spec.mask != "blocks"):
                    m_block, query_head, rank = self.next_rows(work, m_block, query_head, rank)
                row_tile = work.row_tile(query_head, m_block)
                # One thread for all of it: copies that it has started are what it can wait for.
                if lane == 0:
                    first = self.take_turn(turn_address, turn, state)
                    source = shared.dq[None, None, None, None, stage].iterator.toint()
                    # The first one stores: there are no zeros to add to.
                    if first:
                        ptx.store_bulk(target, source, size)
                    else:
                        ptx.add_bulk(target, source, size)
                    cute.arch.cp_async_bulk_commit_group()
                    if step + 1 < position + work.steps:
                        state = self.state_of(rows, row_tile)
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.mbarrier_arrive(between.dq_empty + stage)
                    if first or spec.deterministic:
                        # Others come next: it must have arrived.
                        cute.arch.cp_async_bulk_wait_group(0)
                        cute.arch.fence_proxy("async.global")
                        ptx.store_release(turn_address, turn + 1 if const_expr(spec.deterministic) else turn)
                cute.arch.sync_warp()
            position += work.steps
            done += 1
            n_block, head, batch_index = supply.take(done)
        # Shared memory must stay until the last one has been read.
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def state_of(self, rows: Rows, row_tile: Int32) -> Int32:
        """The turn of a dQ tile, ahead of its time; it may go up until then."""
        state = ptx.load_acquire(rows.turns + 4 * Int64(row_tile))
        # What has been seen so is ordered before copies.
        cute.arch.fence_proxy("async.global")
        return state

    @cute.jit
    def take_turn(self, turn_address: Int64, turn: Int32, state: Int32) -> Boolean:
        """Wait until a part may be added to a tile; whether it is the first. ``state`` as `state_of` returned it."""
        first = Boolean(False)
        if const_expr(self.spec.deterministic):
            first = turn == 0
        elif state != STORED:
            state = ptx.claim(turn_address)
            first = state == 0
            cute.arch.fence_proxy("async.global")
        if not first:
            if state != turn:
                while state != turn:
                    state = ptx.load_acquire(turn_address)
                cute.arch.fence_proxy("async.global")
        return first

    @cute.jit
    def turn_of(self, work: KeyWork, m_block: Int32, head: Int32, rank: Int32) -> Int32:
        """How many blocks add to a dQ tile before this one, where the order is fixed: that of the tiles of work."""
        end = work.sizes.n_blocks
        if const_expr(self.spec.mask == "blocks"):
            # Those of the listed blocks of keys behind this one, and those behind this one in its own.
            key_block = work.n_block * self.tile_n // BLOCK
            counts, _, *strides = work.extras.blocks
            (turns,) = work.extras.list_turns
            address, _, _ = tiles.block_list((counts, turns, *strides), work.batch_index, head, key_block, BLOCK)
            end = cutlass.min(end, (key_block + 1) * (BLOCK // self.tile_n))
            end = end + tiles.listed_key_tile(address, rank, BLOCK)
        elif const_expr(self.spec.mask != "full"):
            mask = work.sizes.mask
            last_query = cutlass.min((m_block + 1) * self.tile_m, mask.seqlen_q) - 1
            _, end = mask.key_tiles(m_block * self.tile_m, last_query, self.tile_n, self.spec.mask)
        return end - 1 - work.n_block
