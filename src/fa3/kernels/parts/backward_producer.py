"""The producer of the backward: where tiles of work lie, and bringing what they need into shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fa3.backward_spec import BackwardSpec
from fa3.spec import BLOCK

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
        if const_expr(self.spec.mask == "blocks"):
            begin, tiles_per_head = Int32(0), Int32(0)
            steps = tiles.listed_steps(
                extras.blocks, batch_index, head * sizes.group, sizes.group, first_key // BLOCK, BLOCK
            )
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
    def first_tile(self, supply: tiles.Supply) -> Int32:
        """The block's first tile: its own number, or, where the order is fixed, the first that no running block has."""
        tile = cute.arch.block_idx()[0]
        if const_expr(self.spec.deterministic):
            tile = supply.fetch()
        return tile

    @cute.jit
    def load(self, sizes: KeySizes, extras: KeyExtras, supply: tiles.Supply, loads: KeyLoads, rows: Rows):
        """The producer warp: K and V once for each tile, Q and dO, LSE and delta step by step."""
        done, position = Int32(0), Int32(0)
        n_block, head, batch_index = self.publish_tile(sizes, supply, done, self.first_tile(supply))
        while n_block >= 0:
            work = self.work_of(sizes, extras, n_block, head, batch_index, done, position)
            m_block, query_head, rank = self.first_rows(work)
            # Q first: its stage is free before the consumers have stored dK and dV of the tile before.
            if work.steps > 0:
                self.load_queries(work, loads, rows, Int32(0), query_head, m_block, rank)
            self.load_keys(work, loads)
            for step in cutlass.range(0, work.steps, unroll=1):
                if step > 0:
                    self.load_queries(work, loads, rows, step, query_head, m_block, rank)
                self.load_rows(
                    work, loads.dout, loads.delta, rows.delta, step, query_head, m_block, self.spec.stages_dout
                )
                m_block, query_head, rank = self.next_rows(work, m_block, query_head, rank)
            position += work.steps
            done += 1
            n_block, head, batch_index = self.publish_tile(sizes, supply, done, supply.fetch())

    @cute.jit
    def first_rows(self, work: KeyWork) -> tuple[Int32, Int32, Int32]:
        """(query tile, head, rank) of the first step; ``rank`` is the tile's place in the list of its head, or 0."""
        m_block, head, rank = work.first_tile, work.head * work.sizes.group, Int32(0)
        if const_expr(self.spec.mask == "blocks"):
            m_block, head, rank = self.listed_rows(work, head, rank)
        return m_block, head, rank

    @cute.jit
    def next_rows(self, work: KeyWork, m_block: Int32, head: Int32, rank: Int32) -> tuple[Int32, Int32, Int32]:
        """The same of the step after this one; behind the last, some tile and head."""
        if const_expr(self.spec.mask == "blocks"):
            m_block, head, rank = self.listed_rows(work, head, rank + 1)
        else:
            m_block = m_block + 1
            if m_block == work.first_tile + work.tiles_per_head:
                m_block = work.first_tile
                head = head + 1
        return m_block, head, rank

    @cute.jit
    def listed_rows(self, work: KeyWork, head: Int32, rank: Int32) -> tuple[Int32, Int32, Int32]:
        """The same of the query tile of this rank, or of the first of the next head of which any are listed."""
        last_head = (work.head + 1) * work.sizes.group - 1
        address, _, count = self.list_of(work, head)
        while rank == count and head < last_head:
            head = head + 1
            rank = Int32(0)
            address, _, count = self.list_of(work, head)
        # Where no step is left, something that can be read.
        m_block = tiles.listed_key_tile(address, cutlass.max(cutlass.min(rank, count - 1), 0), BLOCK)
        return m_block, head, rank

    @cute.jit
    def list_of(self, work: KeyWork, head: Int32) -> tuple[Int64, Int32, Int32]:
        """A head's list of query tiles that see the keys: its address, how many tiles are cut, and how many there are.

        Its blocks are tiles, so each is one step.
        """
        key_block = work.n_block * self.tile_n // BLOCK
        return tiles.block_list(work.extras.blocks, work.batch_index, head, key_block, BLOCK)

    @cute.jit
    def load_queries(
        self, work: KeyWork, loads: KeyLoads, rows: Rows, step: Int32, head: Int32, m_block: Int32, rank: Int32
    ):
        """Bring Q and the LSE of a step; with a block mask also say where it is, for the consumers."""
        if const_expr(self.spec.mask == "blocks"):
            position = work.position + step
            _, cut, _ = self.list_of(work, head)
            barriers.wait_empty(loads.q.empty, position, self.spec.stages)
            if cute.arch.lane_idx() == 0:
                slot = loads.listed[None, barriers.stage_of(position, self.spec.stages)]
                slot[0] = m_block
                slot[1] = head
                slot[2] = Int32(1) if rank < cut else Int32(0)
            # The lane that arrives at the barrier next may be another one.
            cute.arch.sync_warp()
        self.load_rows(work, loads.q, loads.lse, rows.lse, step, head, m_block, self.spec.stages)

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
