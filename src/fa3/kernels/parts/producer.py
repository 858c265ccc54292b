"""The producer: where tiles of the output lie, and bringing what they need into shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fa3.spec import WGMMA_ROWS, ForwardSpec

from . import barriers, copies, rows, tiles, transpose
from .work import Consumer, Extras, Load, Loads, Sizes, Work


class Producer:
    """The loading half of a forward kernel; a consumer without a producer warp uses it too."""

    spec: ForwardSpec
    dtype: type[cutlass.Numeric]
    mask: str
    tile_m: int
    tile_n: int
    stages: int
    v_stages: int
    groups: int

    @cute.jit
    def work_of(
        self,
        sizes: Sizes,
        extras: Extras,
        m_block: Int32,
        head: Int32,
        batch_index: Int32,
        done: Int32,
        position: Int32,
    ) -> Work:
        """Describe a tile of the output."""
        first_row = sizes.first_row + m_block * self.tile_m
        block_list, cut_steps = Int64(0), Int32(0)
        if const_expr(self.mask == "blocks"):
            block_list, cut_steps, key_tiles = tiles.block_list(extras.blocks, batch_index, head, m_block, self.tile_n)
            last_tile = key_tiles - 1
        else:
            begin, end = self.key_tiles_of_rows(sizes, first_row, first_row + self.tile_m)
            last_tile, key_tiles = end - 1, end - begin
        return Work(
            sizes, extras, first_row, head, batch_index, key_tiles, last_tile, block_list, cut_steps, done, position
        )

    def query_of(self, sizes: Sizes, row: Int32) -> Int32:
        """The query of a row."""
        return rows.query_of(row, sizes.group, self.spec.pack_gqa)

    def key_tiles_of_rows(self, sizes: Sizes, first_row: Int32, end_row: Int32) -> tuple[Int32, Int32]:
        """(first, one past the last) key tile that rows from ``first_row`` to before ``end_row`` need."""
        first, last = self.query_of(sizes, first_row), self.query_of(sizes, cutlass.min(end_row, sizes.rows) - 1)
        return sizes.mask.key_tiles(first, last, self.tile_n, self.mask)

    @cute.jit
    def key_tile_of(self, work: Work, step: Int32) -> Int32:
        """The key tile of a step."""
        if const_expr(self.mask == "blocks"):
            return tiles.listed_key_tile(work.block_list, step, self.tile_n)
        else:
            return work.last_tile - step

    @cute.jit
    def publish_tile(
        self, sizes: Sizes, supply: tiles.Supply, number: Int32, tile: Int32
    ) -> tuple[Int32, Int32, Int32]:
        """Work out where the block's tile ``number`` lies, publish it, and return the place."""
        m_block, head, batch_index = Int32(-1), Int32(0), Int32(0)
        if tile < sizes.tiles:
            m_block, head, batch_index = tiles.place_of_tile(
                tile, sizes.m_blocks, sizes.heads, sizes.batch, sizes.section, sizes.levels, self.spec.causal
            )
        supply.publish(number, m_block, head, batch_index)
        return m_block, head, batch_index

    def tile_bytes(self, smem: cute.ComposedLayout) -> int:
        """Bytes that the load of one tile brings; TMA counts zero-filled elements too."""
        return cute.size_in_bytes(self.dtype, cute.select(smem, mode=[0, 1]))

    @cute.jit
    def load(self, sizes: Sizes, extras: Extras, supply: tiles.Supply, loads: Loads):
        """The producer warp: Q once for each tile, K and V in the order in which the consumers ask for them."""
        done, position = Int32(0), Int32(0)
        m_block, head, batch_index = self.publish_tile(sizes, supply, done, cute.arch.block_idx()[0])
        while m_block >= 0:
            work = self.work_of(sizes, extras, m_block, head, batch_index, done, position)
            # K first: its stage is free before the consumers have done with the q tiles.
            if work.key_tiles > 0:
                self.load_step(work, loads.k, Int32(0), self.stages)
            # Under a window the warpgroups begin and end one after the other: each gets its q tile when it begins,
            # so that the first are in the next tile while the last are still in this one.
            begins = tuple(self.first_step_of(work, g) for g in range(self.groups))
            self.load_q_tiles(work, loads, begins, Int32(0))
            for step in cutlass.range(1, work.key_tiles, unroll=1):
                if const_expr(self.mask == "window"):
                    self.load_q_tiles(work, loads, begins, step)
                self.load_step(work, loads.k, step, self.stages)
                self.load_step(work, loads.v, step - 1, self.v_stages)
            if work.key_tiles > 0:
                self.load_step(work, loads.v, work.key_tiles - 1, self.v_stages)
                if const_expr(self.mask == "window"):
                    self.load_q_tiles(work, loads, begins, work.key_tiles)
            position += work.key_tiles
            done += 1
            m_block, head, batch_index = self.publish_tile(sizes, supply, done, supply.fetch())

    def first_step_of(self, work: Work, group: int) -> Int32:
        """The step at which a warpgroup's q tile is wanted."""
        if self.mask != "window":
            return Int32(0)
        group_row = work.first_row + WGMMA_ROWS * group
        _, end_tile = self.key_tiles_of_rows(work.sizes, group_row, group_row + WGMMA_ROWS)
        return cutlass.min(cutlass.max(work.last_tile + 1 - end_tile, 0), work.key_tiles)

    @cute.jit
    def load_q_tiles(self, work: Work, loads: Loads, begins: tuple, step: Int32):
        """Bring the q tiles of the warpgroups that begin at ``step``, each as soon as it has done with the one before.

        Packed ones they bring themselves.
        """
        if const_expr(not self.spec.pack_gqa):
            for g in cutlass.range_constexpr(self.groups):
                if begins[g] == step:
                    barriers.wait_empty(loads.q.empty + g, work.done, 1)
                    # Of rows before row 0 nothing is read.
                    tile = cutlass.max(work.first_row // WGMMA_ROWS + g, 0)
                    copies.issue(loads.q, g, tile, work.head, work.batch_index)
                    if const_expr(self.spec.qv):
                        copies.issue(loads.qv, g, tile, work.head, work.batch_index)

    @cute.jit
    def load_step(self, work: Work, load: Load, step: Int32, stages: cutlass.Constexpr):
        """Bring the key tile of ``step`` as soon as its stage is free."""
        position = work.position + step
        key_tile = self.key_tile_of(work, step)
        barriers.wait_empty(load.empty, position, stages)
        stage = barriers.stage_of(position, stages)
        head_kv = work.head // work.sizes.heads_per_kv
        copies.issue(load, stage, key_tile, head_kv, work.batch_index)

    @cute.jit
    def transpose(
        self, sizes: Sizes, extras: Extras, supply: tiles.Supply, loads: Loads, rows_address: Int32, address: Int32
    ):
        """One of the producer's warps that load nothing: turn each v tile of rows into one of columns.

        The addresses are those of the first stage of either in shared memory.
        """
        warp, lane = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) - 1, cute.arch.lane_idx()
        tile_bytes = self.tile_n * self.head_dim_v
        done, position = Int32(0), Int32(0)
        m_block, head, batch_index = supply.take(done)
        while m_block >= 0:
            work = self.work_of(sizes, extras, m_block, head, batch_index, done, position)
            for step in cutlass.range(0, work.key_tiles, unroll=1):
                at = position + step
                barriers.wait_full(loads.v.full, at, self.v_stages)
                barriers.wait_empty(loads.v_ready.empty, at, self.stages)
                transpose.transpose_tile(
                    rows_address + barriers.stage_of(at, self.v_stages) * tile_bytes,
                    address + barriers.stage_of(at, self.stages) * tile_bytes,
                    self.tile_n,
                    self.head_dim_v,
                    transpose.AT_ONCE[self.groups],
                    warp,
                    lane,
                )
                # Ordinary writes must be visible to the tensor core; then all lanes have written, and read.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                barriers.release(loads.v_ready.full, at, self.stages)
                barriers.release(loads.v.empty, at, self.v_stages)
            position += work.key_tiles
            done += 1
            m_block, head, batch_index = supply.take(done)

    @cute.jit
    def load_first_steps(self, work: Work, loads: Loads):
        """Without a producer warp: bring Q and fill the stages before the main loop of a tile."""
        self.load_q_tiles(work, loads, (Int32(0),) * self.groups, Int32(0))
        for step in cutlass.range_constexpr(self.stages):
            if step < work.key_tiles:
                self.load_step(work, loads.k, Int32(step), self.stages)
                self.load_step(work, loads.v, Int32(step), self.stages)

    @cute.jit
    def load_next_step(self, work: Work, loads: Loads, me: Consumer, step: Int32):
        """Without a producer warp: refill the stages that all warpgroups left in the step before ``step``."""
        if const_expr(not self.spec.warp_specialized):
            if me.loads:
                next_k = step - 1 + self.stages
                if step >= 1 and next_k < work.key_tiles:
                    self.load_step(work, loads.k, next_k, self.stages)
                next_v = step - 2 + self.stages
                if step >= 2 and next_v < work.key_tiles:
                    self.load_step(work, loads.v, next_v, self.stages)
