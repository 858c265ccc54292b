"""The forward kernel: out = softmax(softmax_scale * Q K^T + mask) V, and its log-sum-exp.

Blocks are persistent: each takes one tile of ``tile_m`` query rows of one head after the other, and each of its
consumer warpgroups owns 64 rows. A producer warp brings Q once for each tile and K and V tile by tile through
TMA into a ring of stages, running ahead into the next tile while the consumers finish theirs; the consumers
multiply by WGMMA and do the online softmax in registers. Key tiles run from the last one that a row can see
down to the first, so that those which a mask cuts come first and the rest of the loop has no masking code.

Three switches of the spec say how the work overlaps. ``warp_specialized``: loads are issued by a warp that
does nothing else; off, warp 0 of the first consumer warpgroup issues them between its products.
``pingpong``: the warpgroups take turns at issuing their products, so that one's softmax runs under the
others' products. ``overlap``: inside a warpgroup, the scores of tile j+1 are waited for while the PV
product of tile j still runs, and the softmax of j+1 runs under it.

In order: the launch, the roles of a block (`kernel`), a consumer (`attend`), its main loop (`attend_tile`), one step
of it (`step`). Under `parts` are what comes before the first tile (`setup`), the producer, the softmax of a step
(`softmax_step`), what FP8 does differently (`fp8`), and the epilogue.

Reference: FlashAttention-3, Shah et al. 2024, https://arxiv.org/abs/2407.08608, algorithms 1 and 2.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from fa3.spec import FP8, INT8, WARPGROUP_THREADS, WGMMA_ROWS, ForwardSpec

from .parts import barriers, layout, products, ptx, rows, scaled_softmax, scores, softmax, tiles
from .parts.epilogue import Epilogue
from .parts.extras import extra_types, name_extra_numbers, score_factors
from .parts.fp8 import Fp8
from .parts.fp8_parts import Fp8Parts
from .parts.producer import Producer
from .parts.registers import REGISTERS, TRANSPOSING_REGISTERS
from .parts.setup import Descriptors, Setup
from .parts.softmax_step import SoftmaxStep
from .parts.work import Consumer, Extras, GlobalRows, Loads, Operands, Shared, Sizes, Store, Work

DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, FP8: cutlass.Float8E4M3FN, INT8: cutlass.Int8}


class ForwardKernel(Setup, Producer, SoftmaxStep, Fp8, Fp8Parts, Epilogue):
    """Host launch and device code of one ``ForwardSpec``."""

    def __init__(self, spec: ForwardSpec):
        self.spec = spec
        self.dtype, self.out_dtype = DTYPES[spec.dtype], DTYPES[spec.out_dtype or spec.dtype]
        self.qk_dtype = DTYPES[spec.qk_dtype or spec.dtype]
        # The tensor core takes FP8 along the keys alone.
        self.v_major = OperandMajorMode.K if spec.fp8 else OperandMajorMode.MN
        self.transposes = spec.transpose_stages > 0
        self.tile_m, self.tile_n, self.stages = spec.tile_m, spec.tile_n, spec.stages
        self.v_stages = spec.transpose_stages or spec.stages
        self.head_dim, self.head_dim_v = spec.head_dim, spec.head_dim_v
        self.groups = spec.consumer_warpgroups
        self.mask = spec.mask
        self.softmax_state = scaled_softmax.State if spec.fp8 else softmax.State
        self.score_mod, self.mask_mod = scores.find_mod(spec.score_mod), scores.find_mod(spec.mask_mod)

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        q: Int64,
        k: Int64,
        v: Int64,
        out: Int64,
        lse: Int64,
        sink: Int64,
        counter: Int64,
        stream: cuda.CUstream,
        batch: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        heads_q: Int32,
        heads_kv: Int32,
        head_dim: Int32,
        head_dim_v: Int32,
        q_batch_stride: Int64,
        q_row_stride: Int64,
        q_head_stride: Int64,
        k_batch_stride: Int64,
        k_row_stride: Int64,
        k_head_stride: Int64,
        v_batch_stride: Int64,
        v_row_stride: Int64,
        v_head_stride: Int64,
        out_batch_stride: Int64,
        out_row_stride: Int64,
        out_head_stride: Int64,
        softmax_scale: Float32,
        section: Int32,
        levels: Int32,
        blocks: Int32,
        sink_bytes: Int32,
        extra_numbers: tuple | None,
    ):
        """Build the TMA descriptors and launch.

        The first seven arguments are device addresses, multiples of 16 bytes; ``lse`` and ``sink`` may be 0, then the
        one is not written and the other not read; ``counter`` is explained at ``tiles.Supply``. Strides are in elements
        and must be multiples of 8, of e4m3 of 16. ``section`` and ``levels`` are explained at ``tiles.place_of_tile``;
        ``blocks`` thread blocks run. ``sink_bytes`` are 2 (bf16) or 4 (float32). ``extra_numbers`` are those of
        ``extra_types``, in its order.
        """
        numbers = name_extra_numbers(self.spec, extra_numbers)
        q_rows = GlobalRows(q, q_batch_stride, q_row_stride, q_head_stride, head_dim)
        k_rows = GlobalRows(k, k_batch_stride, k_row_stride, k_head_stride, head_dim)
        v_rows = GlobalRows(v, v_batch_stride, v_row_stride, v_head_stride, head_dim_v)
        out_rows = GlobalRows(out, out_batch_stride, out_row_stride, out_head_stride, head_dim_v)
        qv_rows = GlobalRows(*numbers["qv"], head_dim_v) if const_expr(self.spec.qv) else None
        queries, keys = (seqlen_q, heads_q, batch), (seqlen_k, heads_kv, batch)
        sizes = self.sizes(batch, seqlen_q, seqlen_k, heads_q, heads_kv, section, levels, numbers["window"])
        tanh_factor, mod_factor, scale = score_factors(self.spec, numbers["softcap"], softmax_scale)
        extras = Extras(
            sink, sink_bytes, tanh_factor, mod_factor, numbers["score_aux"], numbers["mask_aux"], numbers["blocks"],
            numbers["scales"],
        )  # fmt: skip
        self.kernel(
            self.descriptors(q_rows, k_rows, v_rows, out_rows, qv_rows, queries, keys),
            q_rows,
            out_rows,
            lse,
            sizes,
            extras,
            counter,
            blocks,
            scale * softmax.LOG2_E,
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.spec.threads, 1, 1],
            stream=stream,
            # Without this the compiler drops the register reallocation.
            min_blocks_per_mp=1,
        )

    def qk_mma(self) -> cute.TiledMma:
        """S = Q K^T of one warpgroup, both operands from shared memory."""
        return products.make_mma(self.qk_dtype, self.tile_n, warpgroup.OperandSource.SMEM, OperandMajorMode.K)

    def pv_mma(self) -> cute.TiledMma:
        """O += P V of one warpgroup, P from registers, V with its columns contiguous, of FP8 with its keys."""
        return products.make_mma(self.dtype, self.head_dim_v, warpgroup.OperandSource.RMEM, self.v_major)

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(
        self,
        descriptors: Descriptors,
        packed_q: GlobalRows,
        packed_out: GlobalRows,
        lse: Int64,
        sizes: Sizes,
        extras: Extras,
        counter: Int64,
        blocks: Int32,
        scale_log2: Float32,
    ):
        """Set up shared memory and barriers, and send each warpgroup into its role."""
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group_index = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)

        if warp_index == 0:
            for descriptor in descriptors:
                if const_expr(descriptor is not None):
                    cpasync.prefetch_descriptor(descriptor.tma)

        layouts = self.layouts()
        storage = self.allocate(layouts)
        shared = self.shared_tiles(storage, layouts)
        extras = extras._replace(
            score_aux=scores.make_aux(spec.score_aux, extras.score_aux),
            mask_aux=scores.make_aux(spec.mask_aux, extras.mask_aux),
        )
        rings = self.rings(storage)
        supply = self.supply(storage, counter, sizes.tiles, blocks)
        if warp_index == 0:
            self.init_barriers(rings, supply)
        if const_expr(spec.fp8):
            self.write_ones(thread, storage.ones.data_ptr(), cute.cosize(layouts.ones))
        cute.arch.sync_threads()
        loads = self.loads(descriptors, layouts, shared, rings, packed_q)
        store_out = self.store_of(descriptors.out, shared, packed_out, lse)

        if const_expr(spec.warp_specialized):
            registers = TRANSPOSING_REGISTERS if self.transposes else REGISTERS
            producer_registers, consumer_registers = registers[self.groups]
            if group_index == 0:
                cute.arch.setmaxregister_decrease(producer_registers)
                if warp_index == 0:
                    self.load(sizes, extras, supply, loads)
                elif const_expr(self.transposes):
                    v_rows_address, v_address = storage.v_rows.data_ptr().toint(), storage.v.data_ptr().toint()
                    self.transpose(sizes, extras, supply, loads, Int32(v_rows_address), Int32(v_address))
            else:
                cute.arch.setmaxregister_increase(consumer_registers)
                thread = thread - WARPGROUP_THREADS
                group = group_index - 1
                self.attend(sizes, extras, supply, loads, group, thread, shared, store_out, scale_log2)
        else:
            self.attend(sizes, extras, supply, loads, group_index, thread, shared, store_out, scale_log2)

    # ---- consumers

    @cute.jit
    def attend(
        self,
        sizes: Sizes,
        extras: Extras,
        supply: tiles.Supply,
        loads: Loads,
        group: Int32,
        thread: Int32,
        shared: Shared,
        store_out: Store,
        scale_log2: Float32,
    ):
        """One consumer warpgroup: its 64 rows of each tile of the block."""
        warp_in_group = cute.arch.make_warp_uniform(thread // 32) % 4
        me = Consumer(
            group, warp_in_group, thread % 32, False if const_expr(self.spec.warp_specialized) else thread < 32
        )
        qk_mma, pv_mma = self.qk_mma(), self.pv_mma()
        qk_slice, pv_slice = qk_mma.get_slice(0), pv_mma.get_slice(0)
        output = cute.make_rmem_tensor(pv_mma.partition_shape_C((WGMMA_ROWS, self.head_dim_v)), Float32)
        operands = Operands(
            qk_mma.make_fragment_A(qk_slice.partition_A(shared.q[None, None, group])),
            qk_mma.make_fragment_B(qk_slice.partition_B(shared.k)),
            pv_mma.make_fragment_B(pv_slice.partition_B(shared.v)),
            self.make_qv_operand(qk_mma, qk_slice, shared, group),
            qk_mma.make_fragment_B(qk_slice.partition_B(shared.v_keys)) if const_expr(self.spec.qv) else None,
            layout.make_probability_operand(self.tile_n, self.dtype),
            cute.make_rmem_tensor(qk_mma.partition_shape_C((WGMMA_ROWS, self.tile_n)), Float32),
            output,
        )
        if const_expr(self.spec.fp8):
            operands = self.with_fp8_operands(operands, shared)
        if const_expr(self.spec.parts > 1):
            operands = self.with_parts(operands, shared)
        state = self.softmax_state.make(scale_log2)

        if const_expr(self.spec.pingpong):
            # The last group lets group 0 begin; the grant left over at the end is never taken.
            if group == self.groups - 1:
                barriers.give_turn(group, self.groups)

        done, position = Int32(0), Int32(0)
        if const_expr(not self.spec.warp_specialized):
            if me.loads:
                self.publish_tile(sizes, supply, done, cute.arch.block_idx()[0])
        m_block, head, batch_index = supply.take(done)
        while m_block >= 0:
            work = self.work_of(sizes, extras, m_block, head, batch_index, done, position)
            if const_expr(not self.spec.warp_specialized):
                if me.loads:
                    self.load_first_steps(work, loads)
            if const_expr(self.spec.pack_gqa):
                q_tile = shared.q[None, None, group]
                rows.load_packed(self.dtype, self.head_dim, loads.packed_q, work, me, q_tile)
            operands.output.fill(0.0)
            state.reset()
            me_here = self.with_scales(work, me) if const_expr(self.spec.fp8) else me
            self.attend_tile(work, me_here, loads, operands, state)
            self.finish_rows(work, me, store_out.lse, state)
            if const_expr(self.spec.fp8):
                state.multiply(me_here.scales.output)
            state.normalize(layout.rows_and_columns(operands.output))
            self.store(work, me, loads.q, shared, store_out, operands.output)
            position += work.key_tiles
            done += 1
            if const_expr(not self.spec.warp_specialized):
                if me.loads:
                    self.publish_tile(sizes, supply, done, supply.fetch())
            m_block, head, batch_index = supply.take(done)
        # Shared memory must live until TMA has read the last out tile.
        if me.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def make_qv_operand(self, mma: cute.TiledMma, mma_slice: Any, shared: Shared, group: Int32) -> cute.Tensor | None:
        """Descriptors of the group's qv tile."""
        if not self.spec.qv:
            return None
        return mma.make_fragment_A(mma_slice.partition_A(shared.qv[None, None, group]))

    @cute.jit
    def attend_tile(self, work: Work, me: Consumer, loads: Loads, operands: Operands, state: softmax.State):
        """The main loop over the key tiles of one tile of the output."""
        sizes = work.sizes
        group_row = work.first_row + WGMMA_ROWS * me.group
        # The first and, with a window, the last key tiles may be of no use to this group's rows.
        first, end = Int32(0), work.key_tiles
        if const_expr(self.mask != "blocks"):
            begin_tile, end_tile = self.key_tiles_of_rows(sizes, group_row, group_row + WGMMA_ROWS)
            first = work.last_tile + 1 - end_tile
            if const_expr(self.mask == "window"):
                end = work.last_tile + 1 - begin_tile
        if group_row < 0 or group_row >= sizes.rows or first >= end:
            first, end = work.key_tiles, work.key_tiles
        for step in cutlass.range(0, first, unroll=1):
            self.skip_step(work, step, me, loads)
        if const_expr(not self.spec.pack_gqa):
            barriers.wait_full(loads.q.full + me.group, work.done, 1)

        if first < end:
            self.step(work, first, Int32(0), me, loads, operands, state, masked=True, first=True)
            self.attend_steps(work, me, group_row, first + 1, end, loads, operands, state)
            if const_expr(self.spec.out_has_own_tile and not self.spec.pack_gqa):
                barriers.release(loads.q.empty + me.group, work.done, 1)

            last = work.position + end - 1
            barriers.wait_full(loads.v_ready.full, last, self.stages)
            if const_expr(self.spec.parts > 1):
                self.multiply_in_parts(operands, state, loads, last)
            else:
                self.issue_pv(operands, last, end - first)
                warpgroup.wait_group(0)
                self.finish_pv(operands, state, loads, last, end - first, last=True)
        elif const_expr(self.spec.out_has_own_tile and not self.spec.pack_gqa):
            barriers.release(loads.q.empty + me.group, work.done, 1)
        if const_expr(self.mask == "window"):
            for step in cutlass.range(end, work.key_tiles, unroll=1):
                self.skip_step(work, step, me, loads)

    @cute.jit
    def whole_steps(self, work: Work, group_row: Int32) -> tuple[Int32, Int32]:
        """(first, one past the last) step of a group's rows whose key tile no mask but a ``mask_mod`` cuts."""
        sizes = work.sizes
        first_whole, end_whole = work.cut_steps, work.key_tiles
        if const_expr(self.mask != "blocks"):
            last_row = cutlass.min(group_row + WGMMA_ROWS, sizes.rows) - 1
            queries = self.query_of(sizes, group_row), self.query_of(sizes, last_row)
            begin_tile, end_tile = sizes.mask.whole_key_tiles(*queries, self.tile_n, self.mask)
            first_whole, end_whole = work.last_tile + 1 - end_tile, work.last_tile + 1 - begin_tile
        return first_whole, end_whole

    @cute.jit
    def attend_steps(
        self,
        work: Work,
        me: Consumer,
        group_row: Int32,
        start: Int32,
        end: Int32,
        loads: Loads,
        operands: Operands,
        state: softmax.State,
    ):
        """The steps after the first: those whose key tile has a key that a row does not see need masking."""
        sizes = work.sizes
        if const_expr(self.mask in ("window", "blocks") or (self.mask_mod is not None)):
            first_whole, end_whole = self.whole_steps(work, group_row)
            for step in cutlass.range(start, end, unroll=1):
                cut = True
                if const_expr(self.mask == "blocks" or self.mask_mod is None):
                    cut = step < first_whole or step >= end_whole
                self.step(work, step, step - start + 1, me, loads, operands, state, masked=cut)
        else:
            first_whole = start
            if const_expr(self.spec.causal):
                # Only the first row's keys end earlier than those of the rows below it.
                queries = self.query_of(sizes, group_row), self.query_of(sizes, group_row)
                _, end_tile = sizes.mask.whole_key_tiles(*queries, self.tile_n, self.mask)
                first_whole = cutlass.max(work.last_tile + 1 - end_tile, start)
                for step in cutlass.range(start, cutlass.min(first_whole, end), unroll=1):
                    self.step(work, step, step - start + 1, me, loads, operands, state, masked=True)
            for step in cutlass.range(first_whole, end, unroll=1):
                self.step(work, step, step - start + 1, me, loads, operands, state, masked=False)

    @cute.jit
    def skip_step(self, work: Work, step: Int32, me: Consumer, loads: Loads):
        """A step whose keys this group does not see: let the tiles and the turn pass."""
        self.load_next_step(work, loads, me, step)
        position = work.position + step
        barriers.wait_full(loads.k.full, position, self.stages)
        barriers.release(loads.k.empty, position, self.stages)
        if const_expr(self.spec.pingpong):
            barriers.take_turn(me.group)
            barriers.give_turn(me.group, self.groups)
        barriers.wait_full(loads.v_ready.full, position, self.stages)
        barriers.release(loads.v_ready.empty, position, self.stages)

    @cute.jit
    def step(
        self,
        work: Work,
        step: Int32,
        count: Int32,
        me: Consumer,
        loads: Loads,
        operands: Operands,
        state: softmax.State,
        masked: Boolean | bool,
        first: cutlass.Constexpr = False,
    ):
        """Scores of this step's key tile, and the PV product of the step before, which the group's first lacks.

        ``count`` is the number of steps that the group has done in this tile of work.
        """
        if const_expr(self.spec.parts > 1):
            self.step_in_parts(work, step, me, loads, operands, state, masked, first)
        else:
            self.step_whole(work, step, count, me, loads, operands, state, masked, first)

    @cute.jit
    def step_whole(
        self,
        work: Work,
        step: Int32,
        count: Int32,
        me: Consumer,
        loads: Loads,
        operands: Operands,
        state: softmax.State,
        masked: Boolean | bool,
        first: cutlass.Constexpr,
    ):
        """`step` with PV products of all columns at once."""
        self.load_next_step(work, loads, me, step)
        position = work.position + step
        factors = self.factors_of(work, me, step, operands, first)
        scale_log2 = self.scale_of(state, factors)
        if const_expr(self.spec.key_block):
            # The limits are those of this step's factor. Here nobody waits for them.
            state.set_limits(scale_log2)
        # All that the products need is there before the turn is taken: nothing else holds them up.
        if const_expr(self.spec.fp8 and not first):
            self.wait_for_tiles(loads, operands, position)
        else:
            barriers.wait_full(loads.k.full, position, self.stages)
            if const_expr(self.spec.qv):
                barriers.wait_full(loads.v_ready.full, position, self.stages)
            if const_expr(not first):
                barriers.wait_full(loads.v_ready.full, position - 1, self.stages)
        k_tile = self.tile_at(operands.k, position)
        if const_expr(self.spec.pingpong):
            barriers.take_turn(me.group)
        raw_scores = operands.int_scores if const_expr(self.spec.qk_dtype) else operands.scores
        products.issue(self.qk_mma(), raw_scores, operands.q, k_tile, accumulate=False)
        if const_expr(self.spec.qv):
            v_keys = self.tile_at(operands.v_keys, position)
            products.issue(self.qk_mma(), operands.scores, operands.qv, v_keys, accumulate=True)
        # The next group's scores may line up behind this one's: its PV product then fills the gap between the two.
        # Those of FP8 come and go so fast that all groups would then do softmax at once.
        if const_expr(self.spec.pingpong and not self.spec.fp8):
            barriers.give_turn(me.group, self.groups)
        if const_expr(not first):
            self.issue_pv(operands, position - 1, count)

        # With overlap only the scores are waited for: PV runs on under the softmax.
        warpgroup.wait_group(1 if const_expr(self.spec.overlap and not first) else 0)
        if const_expr(self.spec.pingpong and self.spec.fp8):
            barriers.give_turn(me.group, self.groups)
        barriers.release(loads.k.empty, position, self.stages)
        if const_expr(self.spec.qk_dtype):
            products.to_float(operands.int_scores, operands.scores)
        moved = self.softmax_step(work, me, operands.scores, state, step, masked, factors, scale_log2, first)

        if const_expr(self.spec.fp8):
            self.look_ahead(loads, operands, position)
            products.round_to_fp8(operands.scores, operands.next_p)
        # At the first step the output is still zero: the references may move without a rescale.
        if const_expr(not first):
            if const_expr(self.spec.overlap and self.spec.fp8):
                ptx.keep_words_before_here(products.any_of(operands.next_p))
            elif const_expr(self.spec.overlap):
                ptx.keep_before_here(state.total[0] + state.total[1])
            warpgroup.wait_group(0)
            self.finish_pv(operands, state, loads, position - 1, count)
            if moved:
                if const_expr(self.spec.fp8):
                    self.follow_references(operands, state)
                else:
                    softmax.scale_rows(layout.rows_and_columns(operands.output), state.factor)
        if const_expr(self.spec.fp8):
            self.keep_p(work, operands, factors)
        else:
            products.round_to(self.dtype, operands.scores, operands.p)

    @cute.jit
    def issue_pv(self, operands: Operands, position: Int32, count: Int32):
        """Issue PV product number ``count``, from 1 on, of a tile of work, with the v tile at ``position``."""
        if const_expr(self.spec.fp8):
            self.issue_fp8_pv(operands, position, count)
        else:
            v_tile = self.tile_at(operands.v, position)
            products.issue(self.pv_mma(), operands.output, operands.p, v_tile, accumulate=True)

    @cute.jit
    def finish_pv(
        self,
        operands: Operands,
        state: softmax.State,
        loads: Loads,
        position: Int32,
        count: Int32,
        last: cutlass.Constexpr = False,
    ):
        """After the wait for the product."""
        if const_expr(self.spec.fp8):
            self.finish_fp8_pv(operands, state, loads, position, count, last)
        else:
            barriers.release(loads.v_ready.empty, position, self.stages)

    def tile_at(self, operand: cute.Tensor, position: Int32) -> cute.Tensor:
        """The tile of a B operand in the stage of ``position``."""
        return operand[None, None, None, barriers.stage_of(position, self.stages)]


def compile_forward(spec: ForwardSpec, options: str) -> Any:
    """Compile the spec's host entry; needs no GPU."""
    addresses = [Int64(0)] * 7
    strides = [Int64(0)] * 12
    extras = tuple(kind(1) for _, types in extra_types(spec) for kind in types)
    return cute.compile(
        ForwardKernel(spec),
        *addresses,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False),
        *[Int32(1)] * 7,
        *strides,
        Float32(1.0),
        *[Int32(1)] * 4,
        extras or None,
        options=options,
    )
