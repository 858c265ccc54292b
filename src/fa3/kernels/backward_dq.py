"""dQ by queries: the pass after a main one that makes dK and dV alone (``dq_stages=0`` of its spec).

A block owns a tile of queries and walks over the keys that they see, as in the forward, and dQ is summed in registers:

    P = exp2(scale_log2 * Q K^T - LSE)        dS = P * (dO V^T - delta)        dQ = scale * dS K

So nothing is added in global memory, and dQ comes out the same in every run, whatever the order of the blocks. The
price is that scores and dP, two products of five, are made a second time.

A consumer warpgroup has 64 queries. Its rows are those of the scores, so dS, rounded, is the first operand of dQ as it
lies in the registers. K is read twice from the same bytes, by rows for the scores and by columns for dQ.

The steps overlap: behind dQ of a key tile the scores and dP of the next one are issued. dQ comes first because K of its
tile is released when it is done, and there is no more of K in shared memory than that and the tile after it. The
exponentials run under dP, and dS under the products of the other warpgroup.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from fa3.backward_spec import QueryGradientSpec
from fa3.spec import WARPGROUP_THREADS, WGMMA_ROWS

from .forward import DTYPES
from .parts import barriers, copies, layout, products, query_scores, scores, softmax, tiles
from .parts.backward_epilogue import write_tile
from .parts.extras import extra_types, name_extra_numbers, score_factors
from .parts.mask import Mask
from .parts.producer import Producer
from .parts.query_work import QueryLoads, QueryOperands, QueryPlace, QueryRows, QueryShared, QueryStore
from .parts.registers import REGISTERS
from .parts.work import Consumer, Extras, Load, Sizes, Work

K, MN = OperandMajorMode.K, OperandMajorMode.MN
SMEM, RMEM = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM


class QueryGradientKernel(Producer):
    """Host launch and device code of one ``QueryGradientSpec``."""

    def __init__(self, spec: QueryGradientSpec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.tile_m, self.tile_n, self.stages = spec.tile_m, spec.tile_n, spec.stages
        self.head_dim, self.head_dim_v = spec.head_dim, spec.head_dim_v
        self.groups = spec.consumer_warpgroups
        self.mask = spec.mask
        self.score_mod, self.mask_mod = scores.find_mod(spec.score_mod), scores.find_mod(spec.mask_mod)
        self.derivative = scores.find_mod(spec.derivative)
        self.modified = spec.softcap or bool(spec.score_mod)

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        q: Int64,
        k: Int64,
        v: Int64,
        dout: Int64,
        dq: Int64,
        lse: Int64,
        delta: Int64,
        counter: Int64,
        stream: cuda.CUstream,
        batch: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        heads_q: Int32,
        heads_kv: Int32,
        head_dim: Int32,
        head_dim_v: Int32,
        q_strides: tuple,
        k_strides: tuple,
        v_strides: tuple,
        dout_strides: tuple,
        dq_strides: tuple,
        softmax_scale: Float32,
        rows_per_head: Int32,
        section: Int32,
        levels: Int32,
        blocks: Int32,
        extra_numbers: tuple | None,
    ):
        """Build the TMA descriptors and launch.

        The first eight arguments are device addresses; `QueryRows` explains lse and delta, of which there are
        ``rows_per_head``, at least ``seqlen_q``; ``tiles.Supply`` the counter. Strides are (batch, row, head) in
        elements, multiples of 8, addresses of 16 bytes. ``section`` and ``levels`` are explained at
        ``tiles.place_of_tile``; ``blocks`` thread blocks run. ``extra_numbers`` are those of ``extra_types``, in its
        order.
        """
        spec = self.spec
        numbers = name_extra_numbers(spec, extra_numbers)
        views = []
        for address, strides, rows, columns, heads in (
            (q, q_strides, seqlen_q, head_dim, heads_q),
            (k, k_strides, seqlen_k, head_dim, heads_kv),
            (v, v_strides, seqlen_k, head_dim_v, heads_kv),
            (dout, dout_strides, seqlen_q, head_dim_v, heads_q),
            (dq, dq_strides, seqlen_q, head_dim, heads_q),
        ):
            batch_stride, row_stride, head_stride = strides
            shape = (rows, columns, heads, batch)
            views.append(copies.global_tensor(self.dtype, address, shape, (row_stride, head_stride, batch_stride)))
        q_view, k_view, v_view, dout_view, dq_view = views

        q_smem, dout_smem, k_smem, v_smem = self.shared_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        q_tma, q_tensor = copies.make_tma(load, q_view, q_smem)
        dout_tma, dout_tensor = copies.make_tma(load, dout_view, dout_smem)
        k_tma, k_tensor = copies.make_tma(load, k_view, k_smem)
        v_tma, v_tensor = copies.make_tma(load, v_view, v_smem)
        dq_tma, dq_tensor = copies.make_tma(store, dq_view, q_smem)

        m_blocks = (seqlen_q + self.tile_m - 1) // self.tile_m
        left, right, chunk = numbers["window"]
        sizes = Sizes(
            batch, seqlen_q, Int32(0), heads_q, heads_q // heads_kv, Int32(1), m_blocks, section, levels,
            m_blocks * heads_q * batch, Mask(seqlen_q, seqlen_k, left, right, chunk),
        )  # fmt: skip
        tanh_factor, mod_factor, scale = score_factors(spec, numbers["softcap"], softmax_scale)
        extras = Extras(
            Int64(0), Int32(0), tanh_factor, mod_factor, numbers["score_aux"], numbers["mask_aux"], numbers["blocks"]
        )
        self.kernel(
            (q_tma, q_tensor),
            (dout_tma, dout_tensor),
            (k_tma, k_tensor),
            (v_tma, v_tensor),
            (dq_tma, dq_tensor),
            QueryRows(lse, delta, rows_per_head),
            sizes,
            extras,
            counter,
            blocks,
            softmax_scale,
            scale * softmax.LOG2_E,
        ).launch(
            grid=[blocks, 1, 1],
            block=[spec.threads, 1, 1],
            stream=stream,
            # Without this the compiler drops the register reallocation.
            min_blocks_per_mp=1,
        )

    def shared_layouts(self) -> tuple[cute.ComposedLayout, ...]:
        """Layouts of q, whose place dq takes, of dout, k and v; rows by columns."""
        spec, dtype = self.spec, self.dtype
        return (
            copies.shared_layout(dtype, (WGMMA_ROWS, self.head_dim, self.groups), K),
            copies.shared_layout(dtype, (WGMMA_ROWS, self.head_dim_v, self.groups), K),
            copies.shared_layout(dtype, (self.tile_n, self.head_dim, spec.stages), K),
            copies.shared_layout(dtype, (self.tile_n, self.head_dim_v, spec.stages_v), K),
        )

    # ---- products of one warpgroup

    def scores_mma(self) -> cute.TiledMma:
        """S = Q K^T and dP = dO V^T, both operands from shared memory."""
        return products.make_mma(self.dtype, self.tile_n, SMEM, K)

    def dq_mma(self) -> cute.TiledMma:
        """dQ += dS K, dS from registers, K with its columns contiguous."""
        return products.make_mma(self.dtype, self.head_dim, RMEM, MN)

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(
        self,
        q_tma: tuple,
        dout_tma: tuple,
        k_tma: tuple,
        v_tma: tuple,
        dq_tma: tuple,
        rows: QueryRows,
        sizes: Sizes,
        extras: Extras,
        counter: Int64,
        blocks: Int32,
        softmax_scale: Float32,
        scale_log2: Float32,
    ):
        """Set up shared memory and barriers, and send each warpgroup into its role."""
        spec, dtype = self.spec, self.dtype
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group_index = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)

        if warp_index == 0:
            for atom, _ in (q_tma, dout_tma, k_tma, v_tma, dq_tma):
                cpasync.prefetch_descriptor(atom)

        q_smem, dout_smem, k_smem, v_smem = self.shared_layouts()

        listed_words = spec.stages if spec.mask == "blocks" else 0

        @cute.struct
        class SharedStorage:
            q_full: cute.struct.MemRange[Int64, self.groups]
            q_empty: cute.struct.MemRange[Int64, self.groups]
            dout_full: cute.struct.MemRange[Int64, self.groups]
            dout_empty: cute.struct.MemRange[Int64, self.groups]
            k_full: cute.struct.MemRange[Int64, spec.stages]
            k_empty: cute.struct.MemRange[Int64, spec.stages]
            v_full: cute.struct.MemRange[Int64, spec.stages_v]
            v_empty: cute.struct.MemRange[Int64, spec.stages_v]
            tile_full: cute.struct.MemRange[Int64, tiles.SLOTS]
            tile_empty: cute.struct.MemRange[Int64, tiles.SLOTS]
            tile_slots: cute.struct.MemRange[Int32, 3 * tiles.SLOTS]
            listed: cute.struct.MemRange[Int32, listed_words]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_smem)], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(dout_smem)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_smem)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_smem)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(SharedStorage)

        def tensor(memory: Any, smem: cute.ComposedLayout) -> cute.Tensor:
            return memory.get_tensor(smem.outer, swizzle=smem.inner)

        # The same bytes as k: the columns of a key lie along a row of the swizzle in both, so both orders agree.
        k_columns = copies.shared_layout(dtype, (self.head_dim, self.tile_n, spec.stages), MN)
        shared = QueryShared(
            tensor(storage.q, q_smem),
            tensor(storage.dout, dout_smem),
            tensor(storage.k, k_smem),
            tensor(storage.k, k_columns),
            tensor(storage.v, v_smem),
        )
        extras = extras._replace(
            score_aux=scores.make_aux(spec.score_aux, extras.score_aux),
            mask_aux=scores.make_aux(spec.mask_aux, extras.mask_aux),
        )
        q_full, q_empty = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        dout_full, dout_empty = storage.dout_full.data_ptr(), storage.dout_empty.data_ptr()
        k_full, k_empty = storage.k_full.data_ptr(), storage.k_empty.data_ptr()
        v_full, v_empty = storage.v_full.data_ptr(), storage.v_empty.data_ptr()
        supply = tiles.Supply(
            counter,
            sizes.tiles,
            blocks,
            storage.tile_slots.get_tensor(cute.make_layout((3, tiles.SLOTS))),
            storage.tile_full.data_ptr(),
            storage.tile_empty.data_ptr(),
        )

        if warp_index == 0:
            with cute.arch.elect_one():
                # The warp that stored dq of a warpgroup releases its q, whose place that took. All else every warp
                # that reads it releases for itself.
                for full, empty, count, warps in (
                    (q_full, q_empty, self.groups, 1),
                    (dout_full, dout_empty, self.groups, 4),
                    (k_full, k_empty, spec.stages, 4 * self.groups),
                    (v_full, v_empty, spec.stages_v, 4 * self.groups),
                    (supply.full, supply.empty, tiles.SLOTS, 4 * self.groups),
                ):
                    for s in cutlass.range_constexpr(count):
                        cute.arch.mbarrier_init(full + s, 1)
                        cute.arch.mbarrier_init(empty + s, warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # Tiles of the global tensors: (rows, columns, tile, head, batch).
        def make_load(pair: tuple, tile: cute.Tensor, smem: cute.ComposedLayout, full: Any, empty: Any) -> Load:
            atom, in_global = pair
            shape = cute.size(smem, mode=[0]), cute.size(smem, mode=[1])
            global_tiles = cute.local_tile(in_global, shape, (None, 0, None, None))
            return Load(atom, *copies.partition(atom, tile, global_tiles), full, empty, self.tile_bytes(smem))

        loads = QueryLoads(
            make_load(q_tma, shared.q, q_smem, q_full, q_empty),
            make_load(dout_tma, shared.dout, dout_smem, dout_full, dout_empty),
            make_load(k_tma, shared.k, k_smem, k_full, k_empty),
            make_load(v_tma, shared.v, v_smem, v_full, v_empty),
            storage.listed.get_tensor(cute.make_layout(spec.stages)) if spec.mask == "blocks" else None,
        )
        dq_atom, dq_tensor = dq_tma
        dq_tiles = cute.local_tile(dq_tensor, (WGMMA_ROWS, self.head_dim), (None, 0, None, None))
        store = QueryStore(dq_atom, *copies.partition(dq_atom, shared.q, dq_tiles))

        producer_registers, consumer_registers = REGISTERS[self.groups]
        if group_index == 0:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp_index == 0:
                self.load(sizes, extras, supply, loads)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            thread = thread - WARPGROUP_THREADS
            warp_in_group = cute.arch.make_warp_uniform(thread // 32) % 4
            me = Consumer(group_index - 1, warp_in_group, thread % 32, False)
            self.attend(sizes, extras, supply, loads, rows, me, shared, store, softmax_scale, scale_log2)

    # ---- producer

    @cute.jit
    def load(self, sizes: Sizes, extras: Extras, supply: tiles.Supply, loads: QueryLoads):
        """The producer warp: Q and dO once for each tile, K and V step by step."""
        done, position = Int32(0), Int32(0)
        m_block, head, batch_index = self.publish_tile(sizes, supply, done, cute.arch.block_idx()[0])
        while m_block >= 0:
            work = self.work_of(sizes, extras, m_block, head, batch_index, done, position)
            # In the order in which they become free: the places of q only when dq of the tile before has left them.
            if work.key_tiles > 0:
                self.say_key_tile(work, loads, Int32(0))
                self.load_keys(work, loads.k, Int32(0), self.spec.stages)
                self.load_keys(work, loads.v, Int32(0), self.spec.stages_v)
            self.load_queries(work, loads.dout)
            self.load_queries(work, loads.q)
            for step in cutlass.range(1, work.key_tiles, unroll=1):
                self.say_key_tile(work, loads, step)
                self.load_keys(work, loads.k, step, self.spec.stages)
                self.load_keys(work, loads.v, step, self.spec.stages_v)
            position += work.key_tiles
            done += 1
            m_block, head, batch_index = self.publish_tile(sizes, supply, done, supply.fetch())

    @cute.jit
    def load_queries(self, work: Work, load: Load):
        """Bring each warpgroup's tile of Q or dO as soon as its place is free."""
        for g in cutlass.range_constexpr(self.groups):
            barriers.wait_empty(load.empty + g, work.done, 1)
            copies.issue(load, Int32(g), work.first_row // WGMMA_ROWS + g, work.head, work.batch_index)

    @cute.jit
    def load_keys(self, work: Work, load: Load, step: Int32, stages: cutlass.Constexpr):
        """Bring the K or V tile of ``step`` as soon as a stage is free."""
        position = work.position + step
        barriers.wait_empty(load.empty, position, stages)
        head = work.head // work.sizes.heads_per_kv
        copies.issue(load, barriers.stage_of(position, stages), self.key_tile_of(work, step), head, work.batch_index)

    @cute.jit
    def say_key_tile(self, work: Work, loads: QueryLoads, step: Int32):
        """With a block mask, tell the consumers the key tile of a step that is about to be loaded.

        Looking it up they would need registers for the list, and have none left.
        """
        if const_expr(self.mask == "blocks"):
            position = work.position + step
            word = 2 * self.key_tile_of(work, step)
            if step < work.cut_steps:
                word = word + 1
            barriers.wait_empty(loads.k.empty, position, self.spec.stages)
            if cute.arch.lane_idx() == 0:
                loads.listed[barriers.stage_of(position, self.spec.stages)] = word
            # The lane that arrives at the barrier next may be another one.
            cute.arch.sync_warp()

    # ---- consumers

    @cute.jit
    def attend(
        self,
        sizes: Sizes,
        extras: Extras,
        supply: tiles.Supply,
        loads: QueryLoads,
        rows: QueryRows,
        me: Consumer,
        shared: QueryShared,
        store: QueryStore,
        softmax_scale: Float32,
        scale_log2: Float32,
    ):
        """One consumer warpgroup: its 64 rows of each tile of the block."""
        operands = self.make_operands(shared, me)
        done, position = Int32(0), Int32(0)
        m_block, head, batch_index = supply.take(done)
        while m_block >= 0:
            work = self.work_of(sizes, extras, m_block, head, batch_index, done, position)
            operands.dq.fill(0.0)
            self.walk(work, me, loads, rows, operands, scale_log2)
            for i in cutlass.range_constexpr(cute.size(operands.dq)):
                operands.dq[i] = operands.dq[i] * softmax_scale
            self.send(work, me, loads.q, shared, store, operands.dq)
            position += work.key_tiles
            done += 1
            m_block, head, batch_index = supply.take(done)

    def accumulator(self, mma: cute.TiledMma, columns: int) -> cute.Tensor:
        """Registers for a product of 64 rows. Those of the scores are made anew in each step, as in the main pass."""
        return cute.make_rmem_tensor(mma.partition_shape_C((WGMMA_ROWS, columns)), Float32)

    def make_operands(self, shared: QueryShared, me: Consumer) -> QueryOperands:
        """Descriptors of the tiles that this warpgroup multiplies, and its registers."""
        scores_mma, dq_mma = self.scores_mma(), self.dq_mma()
        scores_slice, dq_slice = scores_mma.get_slice(0), dq_mma.get_slice(0)
        return QueryOperands(
            q=scores_mma.make_fragment_A(scores_slice.partition_A(shared.q[None, None, me.group])),
            dout=scores_mma.make_fragment_A(scores_slice.partition_A(shared.dout[None, None, me.group])),
            k=scores_mma.make_fragment_B(scores_slice.partition_B(shared.k)),
            v=scores_mma.make_fragment_B(scores_slice.partition_B(shared.v)),
            ds=layout.make_probability_operand(self.tile_n, self.dtype),
            k_columns=dq_mma.make_fragment_B(dq_slice.partition_B(shared.k_columns)),
            dq=self.accumulator(dq_mma, self.head_dim),
        )

    @cute.jit
    def place_of(self, work: Work, me: Consumer, rows: QueryRows) -> QueryPlace:
        """The thread's two rows in a tile of work."""
        sizes = work.sizes
        group_row = work.first_row + WGMMA_ROWS * me.group
        last_row = cutlass.min(group_row + WGMMA_ROWS, sizes.rows) - 1
        first = group_row + layout.first_row(me.warp, me.lane)
        queries = first, first + 8
        lse, delta = (cute.make_rmem_tensor(layout.ROWS_PER_THREAD, Float32) for _ in range(2))
        start = (Int64(work.batch_index) * sizes.heads + work.head) * rows.per_head
        for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
            # There may be no statistics of the last rows of a tile; what comes of those is not stored.
            place = start + cutlass.min(queries[r], rows.per_head - 1)
            for address, values in ((rows.lse, lse), (rows.delta, delta)):
                pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
                values[r] = cute.make_tensor(pointer + place, cute.make_layout(1))[0]
        whole = sizes.mask.whole_key_tiles(group_row, last_row, self.tile_n, self.mask)
        return QueryPlace(queries, lse, delta, whole)

    @cute.jit
    def walk(
        self,
        work: Work,
        me: Consumer,
        loads: QueryLoads,
        rows: QueryRows,
        operands: QueryOperands,
        scale_log2: Float32,
    ):
        """The main loop over the key tiles of one tile of queries."""
        place = self.place_of(work, me, rows)
        # The first and, with a window, the last key tiles may be of no use to this group's rows.
        group_row = work.first_row + WGMMA_ROWS * me.group
        first, end = Int32(0), work.key_tiles
        if const_expr(self.mask != "blocks"):
            begin_tile, end_tile = self.key_tiles_of_rows(work.sizes, group_row, group_row + WGMMA_ROWS)
            first = work.last_tile + 1 - end_tile
            if const_expr(self.mask == "window"):
                end = work.last_tile + 1 - begin_tile
        if group_row >= work.sizes.rows or first >= end:
            first, end = work.key_tiles, work.key_tiles
        for step in cutlass.range(0, first, unroll=1):
            self.skip_step(work, step, loads)
        barriers.wait_full(loads.q.full + me.group, work.done, 1)
        barriers.wait_full(loads.dout.full + me.group, work.done, 1)
        if first < end:
            self.step(work, first, me, loads, place, operands, scale_log2, True)
            for step in cutlass.range(first + 1, end, unroll=1):
                self.step(work, step, me, loads, place, operands, scale_log2, False)
            # dQ of the last key tile.
            last = work.position + end - 1
            self.issue_dq(last, operands)
            barriers.release(loads.dout.empty + me.group, work.done, 1)
            warpgroup.wait_group(0)
            barriers.release(loads.k.empty, last, self.spec.stages)
        else:
            barriers.release(loads.dout.empty + me.group, work.done, 1)
        if const_expr(self.mask == "window"):
            for step in cutlass.range(end, work.key_tiles, unroll=1):
                self.skip_step(work, step, loads)

    @cute.jit
    def skip_step(self, work: Work, step: Int32, loads: QueryLoads):
        """A step whose keys this group does not see: let the tiles pass."""
        position = work.position + step
        for load, stages in ((loads.k, self.spec.stages), (loads.v, self.spec.stages_v)):
            barriers.wait_full(load.full, position, stages)
            barriers.release(load.empty, position, stages)

    @cute.jit
    def step(
        self,
        work: Work,
        step: Int32,
        me: Consumer,
        loads: QueryLoads,
        place: QueryPlace,
        operands: QueryOperands,
        scale_log2: Float32,
        first: cutlass.Constexpr,
    ):
        """Scores, P and dS of this key tile; dQ of the one before, which the first step lacks."""
        spec = self.spec
        position = work.position + step
        if const_expr(not first):
            self.issue_dq(position - 1, operands)
        barriers.wait_full(loads.k.full, position, spec.stages)
        key_tile, listed_cut = Int32(0), Boolean(True)
        if const_expr(self.mask == "blocks"):
            # Read behind the products it would cost registers that there are not.
            key_tile, listed_cut = self.listed_place(position, loads)
        raw_scores = self.accumulator(self.scores_mma(), self.tile_n)
        k_tile = operands.k[None, None, None, barriers.stage_of(position, spec.stages)]
        products.issue(self.scores_mma(), raw_scores, operands.q, k_tile, accumulate=False)
        barriers.wait_full(loads.v.full, position, spec.stages_v)
        dp = self.accumulator(self.scores_mma(), self.tile_n)
        v_tile = operands.v[None, None, None, barriers.stage_of(position, spec.stages_v)]
        products.issue(self.scores_mma(), dp, operands.dout, v_tile, accumulate=False)
        if const_expr(not first):
            warpgroup.wait_group(2)
            barriers.release(loads.k.empty, position - 1, spec.stages)
        warpgroup.wait_group(1)

        raw = layout.rows_and_columns(raw_scores)
        if const_expr(self.mask != "blocks"):
            key_tile = self.key_tile_of(work, step)
        first_key = key_tile * self.tile_n + layout.first_column(me.lane)
        p = self.changed(work, place, raw, first_key)
        if const_expr(self.mask == "blocks"):
            # A block of keys that ends behind the last one is cut.
            if listed_cut:
                self.hide(work, place, p, first_key)
                work.sizes.mask.hide(p, place.queries, first_key, self.mask)
        else:
            self.hide(work, place, p, first_key)
            if key_tile < place.whole[0] or key_tile >= place.whole[1]:
                work.sizes.mask.hide(p, place.queries, first_key, self.mask)
        query_scores.exponentiate(p, scale_log2, place.lse)
        query_scores.keep_before_here(p)

        warpgroup.wait_group(0)
        barriers.release(loads.v.empty, position, spec.stages_v)
        ds = layout.rows_and_columns(dp)
        query_scores.score_gradients(p, ds, place.delta)
        if const_expr(self.modified):
            query_scores.before_changes(
                ds, raw, self.derivative, work.extras.mod_factor, spec.softcap, work.batch_index, work.head,
                place.queries, first_key, work.extras.score_aux,
            )  # fmt: skip
        products.round_to(self.dtype, dp, operands.ds)

    @cute.jit
    def listed_place(self, position: Int32, loads: QueryLoads) -> tuple[Int32, Boolean]:
        """(key tile, whether the mask cuts it) of a step whose K is there, as the loader has written them."""
        word = cute.arch.make_warp_uniform(loads.listed[barriers.stage_of(position, self.spec.stages)])
        return word // 2, word % 2 == 1

    @cute.jit
    def changed(self, work: Work, place: QueryPlace, raw: cute.Tensor, first_key: Int32) -> cute.Tensor:
        """Scores after softcap and ``score_mod``; ``raw`` becomes what derivatives are taken at."""
        extras, heads = work.extras, (work.head, work.head)
        values = raw
        if const_expr(self.spec.softcap):
            scores.cap(raw, extras.tanh_factor)
        if const_expr(self.modified):
            values = layout.rows_and_columns(cute.make_rmem_tensor(cute.make_layout(cute.size(raw)), Float32))
            for c in cutlass.range_constexpr(cute.size(raw, mode=[1])):
                for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
                    values[r, c] = raw[r, c]
        if const_expr(self.score_mod is not None):
            scores.modify(
                self.score_mod, values, extras.mod_factor, work.batch_index, heads, place.queries, first_key,
                extras.score_aux,
            )  # fmt: skip
        return values

    @cute.jit
    def hide(self, work: Work, place: QueryPlace, values: cute.Tensor, first_key: Int32):
        """Hide the keys that the ``mask_mod``, if there is one, lets no query of the thread see."""
        if const_expr(self.mask_mod is not None):
            scores.hide(
                self.mask_mod, values, work.batch_index, (work.head, work.head), place.queries, first_key,
                work.extras.mask_aux,
            )  # fmt: skip

    @cute.jit
    def issue_dq(self, position: Int32, operands: QueryOperands):
        """Issue dQ += dS K of a key tile."""
        k_columns = operands.k_columns[None, None, None, barriers.stage_of(position, self.spec.stages)]
        products.issue(self.dq_mma(), operands.dq, operands.ds, k_columns, accumulate=True)

    @cute.jit
    def send(
        self,
        work: Work,
        me: Consumer,
        load_q: Load,
        shared: QueryShared,
        store: QueryStore,
        dq: cute.Tensor,
    ):
        """Send dQ of the warpgroup through the place of its q tile, and release that."""
        rounded = cute.make_rmem_tensor(dq.layout, self.dtype)
        products.round_to(self.dtype, dq, rounded)
        # The warpgroup's scores are done in all of its warps.
        barriers.sync_group(me.group)
        write_tile(self.dtype, rounded, shared.q[None, None, me.group], me)
        # Ordinary writes must be visible to TMA before the thread that issues the store goes on.
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.sync_group(me.group)
        if me.warp == 0:
            tile = work.first_row // WGMMA_ROWS + me.group
            cute.copy(store.tma, store.source[None, me.group], store.target[None, tile, work.head, work.batch_index])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            barriers.release(load_q.empty + me.group, work.done, 1)


def compile_query_gradient(spec: QueryGradientSpec, options: str) -> Any:
    """Compile the spec's host entry; needs no GPU."""
    extras = tuple(kind(1) for _, types in extra_types(spec) for kind in types)
    return cute.compile(
        QueryGradientKernel(spec),
        *[Int64(0)] * 8,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False),
        *[Int32(1)] * 7,
        *[(Int64(0),) * 3] * 5,
        Float32(1.0),
        *[Int32(1)] * 4,
        extras or None,
        options=options,
    )
