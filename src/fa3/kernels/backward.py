"""The main pass of the backward: dK, dV and the float32 sums of dQ.

With P = exp2(scale_log2 * Q K^T - LSE), recomputed, and delta = rowsum(dO * O) - dLSE from the pass before:

    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)        dK = scale * dS^T Q        dQ = scale * dS K

A block keeps the keys of one tile, and dK and dV of them in registers, and walks down the query tiles that see them,
for all the query heads that share them. Scores are held transposed, keys by queries: P^T and dS^T are then the first
operands of dV and dK as they lie in the registers, and LSE and delta belong to columns. Only dQ, whose sum runs over
keys of both warpgroups and of other blocks, needs dS in shared memory; its parts are added to float32 in global
memory, each thread's registers as they are, so that a last small pass puts them in order.

Each of the two consumer warpgroups owns 64 keys (``spec.split_keys``). Beyond 128 columns dK and dV of 64 keys take
the registers of both: then they share 64 keys, split the queries of the scores, hand P and dS to each other through
shared memory, and split the columns of dK and dV.

The steps overlap: dK of a query tile is issued behind the scores of the next one, and runs under its exponentials;
then come dQ of the same tile, dP and dV, which runs under dS.

Reference: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691, algorithm 2.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from fa3.backward_spec import DS_BUFFERS, BackwardSpec
from fa3.spec import WARPGROUP_THREADS, WGMMA_ROWS

from .forward import DTYPES
from .parts import barriers, copies, gradients, products, scores, softmax, tiles
from .parts.backward_epilogue import KeyEpilogue
from .parts.backward_producer import KeyProducer
from .parts.backward_products import KeyProducts
from .parts.backward_scores import KeyScores
from .parts.backward_sums import KeySums
from .parts.backward_work import (
    KeyBarriers,
    KeyExtras,
    KeyLoads,
    KeyOperands,
    KeyShared,
    KeySizes,
    KeyWork,
    Rows,
)
from .parts.extras import extra_types, name_extra_numbers, score_factors
from .parts.mask import Mask
from .parts.registers import REGISTERS
from .parts.work import Consumer, Load

K, MN = OperandMajorMode.K, OperandMajorMode.MN


class BackwardKernel(KeyProducer, KeyProducts, KeyScores, KeySums, KeyEpilogue):
    """Host launch and device code of one ``BackwardSpec``."""

    def __init__(self, spec: BackwardSpec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.tile_m, self.tile_n = spec.tile_m, spec.tile_n
        self.head_dim, self.head_dim_v = spec.head_dim, spec.head_dim_v
        self.groups = spec.consumer_warpgroups
        self.key_parts = spec.tile_n // WGMMA_ROWS
        # A warpgroup's columns of dK and dV.
        share = 1 if spec.split_keys else self.groups
        self.dk_columns, self.dv_columns = spec.head_dim // share, spec.head_dim_v // share
        # Columns at which second operands begin, in Q and in K.
        self.q_part, self.k_part = self.dk_columns, min(spec.dq_columns, self.dk_columns)
        self.score_mod, self.mask_mod = scores.find_mod(spec.score_mod), scores.find_mod(spec.mask_mod)
        self.derivative = scores.find_mod(spec.derivative)

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        q: Int64,
        k: Int64,
        v: Int64,
        dout: Int64,
        dk: Int64,
        dv: Int64,
        lse: Int64,
        delta: Int64,
        dq: Int64,
        turns: Int64,
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
        dk_strides: tuple,
        dv_strides: tuple,
        softmax_scale: Float32,
        parts: Int32,
        section: Int32,
        levels: Int32,
        blocks: Int32,
        extra_numbers: tuple | None,
    ):
        """Build the TMA descriptors and launch.

        The first eleven arguments are device addresses; `Rows` explains lse, delta, dq and turns, ``tiles.Supply``
        the counter. Strides are (batch, row, head) in elements, multiples of 8, addresses of 16 bytes. The query heads
        of a K/V head come in ``parts``, each of which has its own head of dk and dv. ``section`` and ``levels`` are
        explained at ``tiles.place_of_tile``; ``blocks`` thread blocks run. ``extra_numbers`` are those of
        ``extra_types``, in its order.
        """
        spec = self.spec
        numbers = name_extra_numbers(spec, extra_numbers)
        views = []
        for address, strides, rows, columns, heads in (
            (q, q_strides, seqlen_q, head_dim, heads_q),
            (k, k_strides, seqlen_k, head_dim, heads_kv),
            (v, v_strides, seqlen_k, head_dim_v, heads_kv),
            (dout, dout_strides, seqlen_q, head_dim_v, heads_q),
            (dk, dk_strides, seqlen_k, head_dim, heads_kv * parts),
            (dv, dv_strides, seqlen_k, head_dim_v, heads_kv * parts),
        ):
            batch_stride, row_stride, head_stride = strides
            shape = (rows, columns, heads, batch)
            views.append(copies.global_tensor(self.dtype, address, shape, (row_stride, head_stride, batch_stride)))
        q_view, k_view, v_view, dout_view, dk_view, dv_view = views

        q_smem, k_smem, v_smem, dout_smem, dk_smem, dv_smem = self.shared_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        q_tma, q_tensor = copies.make_tma(load, q_view, q_smem)
        k_tma, k_tensor = copies.make_tma(load, k_view, k_smem)
        v_tma, v_tensor = copies.make_tma(load, v_view, v_smem)
        dout_tma, dout_tensor = copies.make_tma(load, dout_view, dout_smem)
        dk_tma, dk_tensor = copies.make_tma(store, dk_view, dk_smem)
        dv_tma, dv_tensor = copies.make_tma(store, dv_view, dv_smem)

        n_blocks = (seqlen_k + self.tile_n - 1) // self.tile_n
        m_blocks = (seqlen_q + self.tile_m - 1) // self.tile_m
        left, right, chunk = numbers["window"]
        # The heads of tiles are the parts.
        heads, group = heads_kv * parts, heads_q // (heads_kv * parts)
        sizes = KeySizes(
            batch, heads_q, heads, parts, group, m_blocks, n_blocks, m_blocks * group, section, levels,
            n_blocks * heads * batch, Mask(seqlen_q, seqlen_k, left, right, chunk),
        )  # fmt: skip
        tanh_factor, mod_factor, scale = score_factors(spec, numbers["softcap"], softmax_scale)
        extras = KeyExtras(
            tanh_factor, mod_factor, numbers["score_aux"], numbers["mask_aux"], numbers["blocks"], numbers["list_turns"]
        )
        self.kernel(
            (q_tma, q_tensor),
            (k_tma, k_tensor),
            (v_tma, v_tensor),
            (dout_tma, dout_tensor),
            (dk_tma, dk_tensor),
            (dv_tma, dv_tensor),
            Rows(lse, delta, dq, turns),
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
        """Layouts of q, k, v, dout, and of dk and dv; rows by columns."""
        spec = self.spec
        q_part, k_part, dv_part = self.q_part, self.k_part, self.dv_columns
        return (
            copies.shared_layout(self.dtype, (self.tile_m, self.head_dim, spec.stages), K, part=q_part),
            copies.shared_layout(self.dtype, (WGMMA_ROWS, self.head_dim, self.key_parts), K, part=k_part),
            copies.shared_layout(self.dtype, (WGMMA_ROWS, self.head_dim_v, self.key_parts), K, part=dv_part),
            copies.shared_layout(self.dtype, (self.tile_m, self.head_dim_v, spec.stages_dout), K, part=dv_part),
            copies.shared_layout(self.dtype, (WGMMA_ROWS, self.dk_columns, self.groups), K, part=k_part),
            copies.shared_layout(self.dtype, (WGMMA_ROWS, self.dv_columns, self.groups), K, part=dv_part),
        )

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(
        self,
        q_tma: tuple,
        k_tma: tuple,
        v_tma: tuple,
        dout_tma: tuple,
        dk_tma: tuple,
        dv_tma: tuple,
        rows: Rows,
        sizes: KeySizes,
        extras: KeyExtras,
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
            for atom, _ in (q_tma, k_tma, v_tma, dout_tma, dk_tma, dv_tma):
                cpasync.prefetch_descriptor(atom)

        q_smem, k_smem, v_smem, dout_smem, dk_smem, dv_smem = self.shared_layouts()
        score_tiles = DS_BUFFERS * self.key_parts
        ds_smem = copies.shared_layout(dtype, (WGMMA_ROWS, self.tile_m, score_tiles), K, part=spec.score_rows)
        dq_chunks = self.tile_m * spec.head_dim // (4 * self.groups * WARPGROUP_THREADS)
        dq_smem = cute.make_layout((4, WARPGROUP_THREADS, dq_chunks, self.groups, max(1, spec.dq_stages)))
        listed_words = 3 * spec.stages if spec.mask == "blocks" else 0
        p_elements = 0 if spec.split_keys else cute.cosize(ds_smem)

        @cute.struct
        class SharedStorage:
            k_empty: cute.struct.MemRange[Int64, 1]
            v_empty: cute.struct.MemRange[Int64, 1]
            k_full: cute.struct.MemRange[Int64, 1]
            v_full: cute.struct.MemRange[Int64, 1]
            q_full: cute.struct.MemRange[Int64, spec.stages]
            q_empty: cute.struct.MemRange[Int64, spec.stages]
            dout_full: cute.struct.MemRange[Int64, spec.stages_dout]
            dout_empty: cute.struct.MemRange[Int64, spec.stages_dout]
            ds_full: cute.struct.MemRange[Int64, DS_BUFFERS]
            p_full: cute.struct.MemRange[Int64, DS_BUFFERS]
            dq_full: cute.struct.MemRange[Int64, max(1, spec.dq_stages)]
            dq_empty: cute.struct.MemRange[Int64, max(1, spec.dq_stages)]
            tile_full: cute.struct.MemRange[Int64, tiles.SLOTS]
            tile_empty: cute.struct.MemRange[Int64, tiles.SLOTS]
            tile_slots: cute.struct.MemRange[Int32, 3 * tiles.SLOTS]
            listed: cute.struct.MemRange[Int32, listed_words]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, self.tile_m * spec.stages], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, self.tile_m * spec.stages_dout], 128]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_smem)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_smem)], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_smem)], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(dout_smem)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(ds_smem)], 1024]
            p: cute.struct.Align[cute.struct.MemRange[dtype, p_elements], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, cute.size(dq_smem) if spec.dq_stages else 0], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(SharedStorage)

        def tensor(memory: Any, smem: cute.ComposedLayout) -> cute.Tensor:
            return memory.get_tensor(smem.outer, swizzle=smem.inner)

        def columns_first(smem: cute.ComposedLayout, part: int) -> cute.ComposedLayout:
            rows_of, columns_of, count = (cute.size(smem, mode=[i]) for i in range(3))
            return copies.shared_layout(dtype, (columns_of, rows_of, count), MN, part=part)

        shared = KeyShared(
            tensor(storage.k, k_smem),
            tensor(storage.k, columns_first(k_smem, self.k_part)),
            tensor(storage.v, v_smem),
            tensor(storage.q, q_smem),
            tensor(storage.q, columns_first(q_smem, self.q_part)),
            tensor(storage.dout, dout_smem),
            tensor(storage.dout, columns_first(dout_smem, self.dv_columns)),
            tensor(storage.ds, ds_smem),
            tensor(storage.ds, columns_first(ds_smem, spec.score_rows)),
            None if const_expr(spec.split_keys) else tensor(storage.p, ds_smem),
            storage.dq.get_tensor(dq_smem) if const_expr(spec.dq_stages > 0) else None,
        )
        extras = extras._replace(
            score_aux=scores.make_aux(spec.score_aux, extras.score_aux),
            mask_aux=scores.make_aux(spec.mask_aux, extras.mask_aux),
        )
        k_full, k_empty = storage.k_full.data_ptr(), storage.k_empty.data_ptr()
        v_full, v_empty = storage.v_full.data_ptr(), storage.v_empty.data_ptr()
        q_full, q_empty = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        dout_full, dout_empty = storage.dout_full.data_ptr(), storage.dout_empty.data_ptr()
        between = KeyBarriers(
            storage.ds_full.data_ptr(), storage.p_full.data_ptr(), storage.dq_full.data_ptr(),
            storage.dq_empty.data_ptr(),
        )  # fmt: skip
        # Where the order is fixed, a block may wait only for tiles that running blocks have: all of them come from the
        # counter, the first ones too.
        first_tiles = Int32(0) if spec.deterministic else blocks
        supply = tiles.Supply(
            counter,
            sizes.tiles + blocks - first_tiles,
            first_tiles,
            storage.tile_slots.get_tensor(cute.make_layout((3, tiles.SLOTS))),
            storage.tile_full.data_ptr(),
            storage.tile_empty.data_ptr(),
        )

        if warp_index == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(k_full, 1)
                cute.arch.mbarrier_init(v_full, 1)
                # One warp of each warpgroup, when all have read k; and when dK and dV have left shared memory.
                cute.arch.mbarrier_init(k_empty, self.groups)
                cute.arch.mbarrier_init(v_empty, self.groups)
                # Every consumer warp releases a stage, and says that its part of P or dS is there, for itself.
                for full, empty, count in (
                    (q_full, q_empty, spec.stages),
                    (dout_full, dout_empty, spec.stages_dout),
                ):
                    for s in cutlass.range_constexpr(count):
                        cute.arch.mbarrier_init(full + s, 1)
                        cute.arch.mbarrier_init(empty + s, 4 * self.groups)
                for s in cutlass.range_constexpr(tiles.SLOTS):
                    cute.arch.mbarrier_init(supply.full + s, 1)
                    cute.arch.mbarrier_init(supply.empty + s, 4 * self.groups + (1 if spec.dq_stages else 0))
                for s in cutlass.range_constexpr(spec.dq_stages):
                    cute.arch.mbarrier_init(between.dq_full + s, 4 * self.groups)
                    cute.arch.mbarrier_init(between.dq_empty + s, 1)
                for s in cutlass.range_constexpr(DS_BUFFERS):
                    cute.arch.mbarrier_init(between.ds_full + s, 4 * self.groups)
                    cute.arch.mbarrier_init(between.p_full + s, 4 * self.groups)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # Tiles of the global tensors: (rows, columns, tile, head, batch).
        def make_load(
            pair: tuple, tile: cute.Tensor, smem: cute.ComposedLayout, full: Any, empty: Any, bytes_beside: int = 0
        ) -> Load:
            atom, in_global = pair
            rows_of, columns_of = cute.size(smem, mode=[0]), cute.size(smem, mode=[1])
            global_tiles = cute.local_tile(in_global, (rows_of, columns_of), (None, 0, None, None))
            size = cute.size_in_bytes(dtype, cute.select(smem, mode=[0, 1]))
            return Load(atom, *copies.partition(atom, tile, global_tiles), full, empty, size + bytes_beside)

        loads = KeyLoads(
            make_load(k_tma, shared.k, k_smem, k_full, k_empty),
            make_load(v_tma, shared.v, v_smem, v_full, v_empty),
            make_load(q_tma, shared.q, q_smem, q_full, q_empty, 4 * self.tile_m),
            make_load(dout_tma, shared.dout, dout_smem, dout_full, dout_empty, 4 * self.tile_m),
            storage.lse.get_tensor(cute.make_layout((self.tile_m, spec.stages))),
            storage.delta.get_tensor(cute.make_layout((self.tile_m, spec.stages_dout))),
            storage.listed.get_tensor(cute.make_layout((3, spec.stages))) if spec.mask == "blocks" else None,
        )
        stores = []
        # dV takes the place of v. dK takes that of dS, and of P where there is one: the next k comes the earlier.
        for pair, memory, smem in ((dk_tma, storage.ds, dk_smem), (dv_tma, storage.v, dv_smem)):
            atom, in_global = pair
            columns_of = cute.size(smem, mode=[1])
            global_tiles = cute.local_tile(in_global, (WGMMA_ROWS, columns_of), (None, None, None, None))
            tile = tensor(memory, smem)
            stores.append((tile, atom, *copies.partition(atom, tile, global_tiles)))
        stores = tuple(stores)

        producer_registers, consumer_registers = REGISTERS[self.groups]
        if group_index == 0:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp_index == 0:
                self.load(sizes, extras, supply, loads, rows)
            if const_expr(spec.dq_stages > 0):
                if warp_index == 1:
                    self.add_sums(sizes, extras, supply, between, rows, shared)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            thread = thread - WARPGROUP_THREADS
            warp_in_group = cute.arch.make_warp_uniform(thread // 32) % 4
            me = Consumer(group_index - 1, warp_in_group, thread % 32, False)
            self.attend(sizes, extras, supply, loads, between, me, shared, stores, softmax_scale, scale_log2)

    # ---- consumers

    @cute.jit
    def attend(
        self,
        sizes: KeySizes,
        extras: KeyExtras,
        supply: tiles.Supply,
        loads: KeyLoads,
        between: KeyBarriers,
        me: Consumer,
        shared: KeyShared,
        stores: tuple,
        softmax_scale: Float32,
        scale_log2: Float32,
    ):
        """One consumer warpgroup: its keys, or its columns, of each tile of the block."""
        operands = self.make_operands(shared, me)
        done, position = Int32(0), Int32(0)
        n_block, head, batch_index = supply.take(done)
        while n_block >= 0:
            work = self.work_of(sizes, extras, n_block, head, batch_index, done, position)
            operands.dk.fill(0.0)
            operands.dv.fill(0.0)
            barriers.wait_full(loads.k.full, done, 1)
            if work.steps > 0:
                self.walk(work, loads, between, me, shared, operands, scale_log2)
            else:
                barriers.wait_full(loads.v.full, done, 1)
            # All have read K, V and dS.
            barriers.sync_groups(self.groups)
            if me.warp == 0:
                barriers.release(loads.k.empty, done, 1)
            for i in cutlass.range_constexpr(cute.size(operands.dk)):
                operands.dk[i] = operands.dk[i] * softmax_scale
            self.store(work, me, operands.dv, self.dv_columns, stores[1])
            self.store(work, me, operands.dk, self.dk_columns, stores[0])
            if me.warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                barriers.release(loads.v.empty, done, 1)
            position += work.steps
            done += 1
            n_block, head, batch_index = supply.take(done)

    @cute.jit
    def walk(
        self,
        work: KeyWork,
        loads: KeyLoads,
        between: KeyBarriers,
        me: Consumer,
        shared: KeyShared,
        operands: KeyOperands,
        scale_log2: Float32,
    ):
        """The main loop over the query tiles of one tile of keys."""
        # With a block mask the loader says where a step is.
        m_block, head = work.first_tile, work.head * work.sizes.group
        self.step(work, Int32(0), m_block, head, loads, between, me, shared, operands, scale_log2, True)
        for step in cutlass.range(1, work.steps, unroll=1):
            if const_expr(self.spec.mask != "blocks"):
                m_block, head, _ = self.next_rows(work, m_block, head, Int32(0))
            self.step(work, step, m_block, head, loads, between, me, shared, operands, scale_log2, False)
        # dK and dQ of the last query tile.
        last = work.position + work.steps - 1
        self.issue_dk(last, me.group, between, operands)
        dq = self.issue_dq(last, operands)
        warpgroup.wait_group(0)
        self.release_rows(loads.dout, last, self.spec.stages_dout)
        self.release_rows(loads.q, last, self.spec.stages)
        if const_expr(self.spec.dq_stages > 0):
            self.send_dq(last, between, me, shared, dq)
            self.make_visible()
            self.show_dq(last, between)

    @cute.jit
    def step(
        self,
        work: KeyWork,
        step: Int32,
        m_block: Int32,
        head: Int32,
        loads: KeyLoads,
        between: KeyBarriers,
        me: Consumer,
        shared: KeyShared,
        operands: KeyOperands,
        scale_log2: Float32,
        first: cutlass.Constexpr,
    ):
        """Scores, P, dV and dS of this query tile; dK and dQ of the one before, which the first step lacks."""
        spec = self.spec
        position = work.position + step
        q_stage, dout_stage = (barriers.stage_of(position, n) for n in (spec.stages, spec.stages_dout))
        barriers.wait_full(loads.q.full, position, spec.stages)
        listed_cut = Boolean(True)
        if const_expr(spec.mask == "blocks"):
            m_block, head, listed_cut = self.listed_place(loads.listed[None, q_stage])
        q_tile = operands.q[None, None, None, q_stage]
        raw_scores = self.accumulator(self.scores_mma(), spec.score_rows)
        products.issue(self.scores_mma(), raw_scores, operands.k, q_tile, accumulate=False)
        if const_expr(not first):
            self.issue_dk(position - 1, me.group, between, operands)
        lse = gradients.of_lane(self.rows_of(loads.lse[None, q_stage], me), me.lane)
        # dK of the tile before runs on under the exponentials; dV of it is done.
        warpgroup.wait_group(0 if const_expr(first) else 1)
        if const_expr(not first):
            self.release_rows(loads.dout, position - 1, spec.stages_dout)

        queries = self.first_query_of(m_block, me)
        keys = self.keys_of(work, me)
        p = operands.p if const_expr(spec.split_keys) else self.rounded_scores()
        self.probabilities(work, m_block, head, keys, queries, me, lse, raw_scores, p, scale_log2, listed_cut)
        if const_expr(first):
            # V is there, so dK of the tile before has left the place of P and dS.
            barriers.wait_full(loads.v.full, work.done, 1)
        if const_expr(not spec.split_keys):
            self.share(p, shared.p, position, between.p_full, me)
        if const_expr(not first):
            warpgroup.wait_group(0)
            self.release_rows(loads.q, position - 1, spec.stages)
            dq = self.issue_dq(position - 1, operands)
        barriers.wait_full(loads.dout.full, position, spec.stages_dout)
        dout_tile = operands.dout[None, None, None, dout_stage]
        dp = self.accumulator(self.scores_mma(), spec.score_rows)
        products.issue(self.scores_mma(), dp, operands.v, dout_tile, accumulate=False)
        dout_columns = operands.dout_columns[None, None, None, dout_stage]
        if const_expr(spec.split_keys):
            p_operand = operands.p
        else:
            barriers.wait_full(between.p_full, position, DS_BUFFERS)
            p_operand = operands.p[None, None, None, barriers.stage_of(position, DS_BUFFERS)]
        products.issue(self.dv_mma(), operands.dv, p_operand, dout_columns, accumulate=True)
        if const_expr(not first and spec.dq_stages > 0):
            warpgroup.wait_group(2)
            self.send_dq(position - 1, between, me, shared, dq)
        delta = gradients.of_lane(self.rows_of(loads.delta[None, dout_stage], me), me.lane)
        # dV runs on under dS; dQ of the tile before is done. In the first step, a copy of the loop's, nothing runs on:
        # that would cost more registers than there are.
        warpgroup.wait_group(0 if const_expr(first) else 1)
        ds = self.rounded_scores()
        gradients.score_gradients(
            p, dp, delta, ds, self.dtype, self.derivative, raw_scores, work.extras.mod_factor, spec.softcap,
            work.batch_index, head, keys, queries, work.extras.score_aux,
        )  # fmt: skip
        self.share(ds, shared.ds, position, between.ds_full, me)
        if const_expr(not first and spec.dq_stages > 0):
            self.show_dq(position - 1, between)

    @cute.jit
    def listed_place(self, slot: cute.Tensor) -> tuple[Int32, Int32, Boolean]:
        """(query tile, head, whether the mask cuts it) of a step, as the loader has written them."""
        uniform = cute.arch.make_warp_uniform
        return uniform(slot[0]), uniform(slot[1]), uniform(slot[2]) != 0

    @cute.jit
    def release_rows(self, load: Load, position: Int32, stages: cutlass.Constexpr):
        """Tell the loader that this warp has read a tile of Q or dO, and what came with it."""
        # All lanes have read the statistics of their columns.
        cute.arch.sync_warp()
        barriers.release(load.empty, position, stages)


def compile_backward(spec: BackwardSpec, options: str) -> Any:
    """Compile the spec's host entry; needs no GPU."""
    addresses = [Int64(0)] * 11
    strides = [(Int64(0),) * 3] * 6
    extras = tuple(kind(1) for _, types in extra_types(spec) for kind in types)
    return cute.compile(
        BackwardKernel(spec),
        *addresses,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False),
        *[Int32(1)] * 7,
        *strides,
        Float32(1.0),
        *[Int32(1)] * 4,
        extras or None,
        options=options,
    )
