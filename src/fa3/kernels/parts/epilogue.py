"""The epilogue: what becomes of a tile's output and sums when its last key is done."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from fa3.spec import WGMMA_ROWS, ForwardSpec

from . import barriers, layout, products, rows, softmax, transpose
from .work import Consumer, Load, Shared, Store, Work


class Epilogue:
    """The finishing half of a consumer."""

    spec: ForwardSpec
    out_dtype: type[cutlass.Numeric]
    head_dim_v: int

    def rows_of(self, work: Work, me: Consumer) -> tuple[Int32, Int32]:
        """The two rows whose scores this thread holds."""
        first = work.first_row + WGMMA_ROWS * me.group + layout.first_row(me.warp, me.lane)
        return first, first + 8

    @cute.jit
    def finish_rows(self, work: Work, me: Consumer, lse: Int64, state: softmax.State):
        """Complete the sums of the rows, with the sink if there is one, and write their LSE if it is wanted."""
        sizes, packed = work.sizes, self.spec.pack_gqa
        thread_rows = self.rows_of(work, me)
        state.sum_up()
        if work.extras.sink != 0:
            for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
                state.add_sink(r, rows.sink_log2(work, thread_rows[r], packed))
        if lse != 0:
            if me.lane % 4 == 0:
                pointer = cute.make_ptr(Float32, lse, cute.AddressSpace.gmem, assumed_align=4)
                seqlen_q = sizes.mask.seqlen_q
                first = Int64(work.batch_index) * sizes.heads * sizes.group
                for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
                    row = thread_rows[r]
                    if row >= 0 and row < sizes.rows:
                        head = rows.head_of(row, work.head, sizes.group, packed)
                        place = (first + head) * seqlen_q + rows.query_of(row, sizes.group, packed)
                        cute.make_tensor(pointer + place, cute.make_layout(1))[0] = state.log_sum_exp(r)

    @cute.jit
    def store(
        self,
        work: Work,
        me: Consumer,
        load_q: Load,
        shared: Shared,
        store_out: Store,
        output: cute.Tensor,
    ):
        """Send the out tile through shared memory, in one part or two."""
        columns = self.spec.out_columns
        out_tile = shared.out[None, None, me.group]
        rounded = cute.make_rmem_tensor(output.layout, self.out_dtype)
        products.round_to(self.out_dtype, output, rounded)
        mma = products.make_mma(self.out_dtype, columns, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.out_dtype), mma)
        copy_slice = copy.get_slice(32 * me.warp + me.lane)
        part_layout = cute.make_layout(mma.partition_shape_C((WGMMA_ROWS, columns)))
        for part in cutlass.range_constexpr(self.head_dim_v // columns):
            # TMA must have read the part before.
            if me.warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            barriers.sync_group(me.group)
            values = cute.make_tensor(rounded.iterator + part * cute.size(part_layout), part_layout)
            if const_expr(self.spec.transpose_stages):
                # The shift gives 0. The compiler does not know, and so works out places here; before the loop over
                # keys they would take registers from it.
                lane = me.lane ^ (work.batch_index >> 31)
                row = layout.first_row(me.warp, lane)
                transpose.store_sorted(Int32(out_tile.iterator.toint()), values, row, lane, columns)
            else:
                cute.copy(copy, copy_slice.retile(values), copy_slice.partition_D(out_tile))
            # Ordinary writes must be visible to TMA before the thread that issues the store goes on.
            cute.arch.fence_proxy("async.shared", space="cta")
            barriers.sync_group(me.group)
            if const_expr(self.spec.pack_gqa):
                rows.store_packed(self.out_dtype, self.head_dim_v, store_out.packed, work, me, out_tile)
                # Read by all before anybody writes the next tile into this memory.
                barriers.sync_group(me.group)
            elif me.warp == 0:
                # Rows before row 0 go where TMA writes nothing, behind the last one: a store whose tile lies wholly
                # before a tensor is an illegal instruction.
                tile = work.first_row // WGMMA_ROWS + me.group
                if tile < 0:
                    tile = (work.sizes.rows + WGMMA_ROWS - 1) // WGMMA_ROWS
                target = store_out.target[None, tile, part, work.head, work.batch_index]
                cute.copy(store_out.tma, store_out.source[None, me.group], target)
                cute.arch.cp_async_bulk_commit_group()
        if const_expr(not self.spec.out_has_own_tile and not self.spec.pack_gqa):
            if me.warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                barriers.release(load_q.empty + me.group, work.done, 1)
