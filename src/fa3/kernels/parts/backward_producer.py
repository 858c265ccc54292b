"""The producer of the backward: where tiles of work lie, and bringing what they need into shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fa3.spec import BackwardSpec

from . import barriers, copies, tiles
from .backward_work import KeyExtras, KeyLoads, KeySizes, KeyWork, Rows
from .work import Load


class KeyProducer:
    """The loading half of a backward kernel."""

    spec: BackwardSpec
    tile_m: int
    tile_n: int
    key_parts: int

    @cute.jit
    def work_of(
        self,
        sizes: KeySizes,
        extras: KeyExtras,
        n_block: Int32,
        head: Int32,
        batch_index: Int32,
        done: Int32,
        position: Int32,
    ) -> KeyWork:
        """Describe a tile of work."""
        first_key = n_block * self.tile_n
        last_key = cutlass.min(first_key + self.tile_n, sizes.mask.seqlen_k) - 1
        begin, end = sizes.mask.query_tiles(first_key, last_key, self.tile_m, self.spec.mask)
        tiles_per_head = end - begin
        steps = tiles_per_head * sizes.group
        if const_expr(self.spec.mask == "full"):
            # The same, from the host: worked out here they would take registers for all of the kernel.
            tiles_per_head, steps = sizes.m_blocks, sizes.all_steps
        return KeyWork(
            sizes, extras, n_block, head, batch_index, begin, tiles_per_head, steps, done,
            position,
        )  # fmt: skip

    @cute.jit
    def publish_tile(self, sizes: KeySizes, supply: tiles.Supply, number: Int32, tile: Int32) -> tuple:
        """Work out where the block's tile ``number`` lies, publish it, and return the place."""
        n_block, head, batch_index = Int32(-1), Int32(0), Int32(0)
        if tile < sizes.tiles:
            # In a fixed order a block waits for those before it: with the last keys first, those of a causal mask begin
            # at once, each a step behind the next.
            n_block, head, batch_index = tiles.place_of_tile(
                tile,
                sizes.n_blocks,
                sizes.heads,
                sizes.batch,
                sizes.section,
                sizes.levels,
                self.spec.deterministic,
            )
        supply.publish(number, n_block, head, batch_index)
        return n_block, head, batch_index

    @cute.jit
    def load(self, sizes: KeySizes, extras: KeyExtras, supply: tiles.Supply, loads: KeyLoads, rows: Rows):
        """The producer warp: K and V once for each tile, Q and dO, LSE and delta step by step."""
        done, position = Int32(0), Int32(0)
        n_block, head, batch_index = self.publish_tile(sizes, supply, done, cute.arch.block_idx()[0])
        while n_block >= 0:
            work = self.work_of(sizes, extras, n_block, head, batch_index, done, position)
            m_block, query_head = work.first_tile, head * sizes.group
            # Q first: its stage is free before the consumers have stored dK and dV of the tile before.
            if work.steps > 0:
                self.load_rows(work, loads.q, loads.lse, rows.lse, Int32(0), query_head, m_block, self.spec.stages)
            self.load_keys(work, loads)
            for step in cutlass.range(0, work.steps, unroll=1):
                if step > 0:
                    self.load_rows(work, loads.q, loads.lse, rows.lse, step, query_head, m_block, self.spec.stages)
                self.load_rows(
                    work, loads.dout, loads.delta, rows.delta, step, query_head, m_block, self.spec.stages_dout
                )
                m_block, query_head = self.next_rows(work, m_block, query_head)
            position += work.steps
            done += 1
            n_block, head, batch_index = self.publish_tile(sizes, supply, done, supply.fetch())

    @cute.jit
    def next_rows(self, work: KeyWork, m_block: Int32, head: Int32) -> tuple[Int32, Int32]:
        """The query tile and head of the step after this one."""
        m_block = m_block + 1
        if m_block == work.first_tile + work.tiles_per_head:
            m_block = work.first_tile
            head = head + 1
        return m_block, head

    @cute.jit
    def load_keys(self, work: KeyWork, loads: KeyLoads):
        """Bring K of a tile as soon as that of the one before has been read, V when dV has left its place."""
        for load in (loads.k, loads.v):
            barriers.wait_empty(load.empty, work.done, 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(load.full, load.bytes * self.key_parts)
            for part in cutlass.range_constexpr(self.key_parts):
                tile, head = work.n_block * self.key_parts + part, work.head // work.sizes.parts
                source = load.source[None, tile, head, work.batch_index]
                cute.copy(load.tma, source, load.target[None, part], tma_bar_ptr=load.full)

    @cute.jit
    def load_rows(
        self,
        work: KeyWork,
        load: Load,
        statistics: cute.Tensor,
        address: Int64,
        step: Int32,
        head: Int32,
        m_block: Int32,
        stages: cutlass.Constexpr,
    ):
        """Bring a tile of Q or dO, and what belongs to its rows, as soon as a stage is free."""
        position = work.position + step
        barriers.wait_empty(load.empty, position, stages)
        stage = barriers.stage_of(position, stages)
        copies.issue(load, stage, m_block, head, work.batch_index)
        source = address + 4 * self.tile_m * Int64(work.row_tile(head, m_block))
        copies.issue_bulk(load.full + stage, source, statistics[None, stage])
