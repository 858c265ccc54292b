"""What a forward kernel does differently with FP8: scales, row sums by the tensor core, partial outputs.

The other halves of the work on FP8 are the softmax (`scaled_softmax`), the scales themselves (`scales`) and the
transposition of v (`transpose`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa3.spec import WGMMA_ROWS, ForwardSpec

from . import barriers, layout, products, scales, softmax
from .work import Consumer, Loads, Operands, RowScales, Shared, Work


class Fp8:
    """The part of a forward kernel that FP8 takes beyond what all dtypes do."""

    spec: ForwardSpec
    dtype: type[cutlass.Numeric]
    mask: str
    tile_n: int
    stages: int

    def sums_mma(self) -> cute.TiledMma:
        """Row sums of P, eight times: its product with ones."""
        return products.make_mma(self.dtype, products.SUM_COLUMNS, warpgroup.OperandSource.RMEM, OperandMajorMode.K)

    def with_fp8_operands(self, operands: Operands, shared: Shared) -> Operands:
        """The operands and what FP8 needs beside them."""
        mma = self.sums_mma()
        partial, int_scores = operands.output, None
        if self.spec.qk_dtype:
            int_scores = cute.recast_tensor(operands.scores, Int32)
        if self.spec.promote and self.spec.parts == 1:
            partial = cute.make_rmem_tensor(operands.output.layout, Float32)
        return operands._replace(
            int_scores=int_scores,
            partial=partial,
            next_p=layout.make_probability_operand(self.tile_n, self.dtype),
            ones=mma.make_fragment_B(mma.get_slice(0).partition_B(shared.ones)),
            sums=cute.make_rmem_tensor(mma.partition_shape_C((WGMMA_ROWS, products.SUM_COLUMNS)), Float32),
            share_inverse=cute.make_rmem_tensor(1, Float32),
            arrived=cute.make_rmem_tensor(2, Int32),
            next_scales=cute.make_rmem_tensor(2, Float32),
        )

    # ---- products

    @cute.jit
    def issue_fp8_pv(self, operands: Operands, position: Int32, count: Int32):
        """Issue PV product number ``count``, from 1 on, of a tile of work, and the row sums of P."""
        # Whether it adds to what those before it made.
        goes_on = (count - 1) % self.spec.promote != 0 if const_expr(self.spec.promote) else True
        products.issue_with_row_sums(
            self.pv_mma(), operands.partial, operands.p, self.tile_at(operands.v, position), goes_on,
            self.sums_mma(), operands.sums, operands.ones,
        )  # fmt: skip

    @cute.jit
    def finish_fp8_pv(
        self, operands: Operands, state: softmax.State, loads: Loads, position: Int32, count: Int32, last: bool
    ):
        """After the wait for `issue_fp8_pv`: the sums in float32, and v is released."""
        barriers.release(loads.v_ready.empty, position, self.stages)
        self.add_row_sums(operands, state)
        if const_expr(self.spec.promote):
            if const_expr(last):
                products.add_up(operands.output, operands.partial)
            elif count % self.spec.promote == 0:
                products.add_up(operands.output, operands.partial)

    @cute.jit
    def add_row_sums(self, operands: Operands, state: softmax.State):
        """Add the row sums of a tile, once its PV product is done."""
        state.add_sums(operands.sums, operands.share_inverse[0] if const_expr(self.spec.value_blocks) else None)

    @cute.jit
    def follow_references(self, operands: Operands, state: softmax.State):
        """Bring all sums to references that have moved."""
        softmax.scale_rows(layout.rows_and_columns(operands.output), state.factor)
        if const_expr(self.spec.promote and self.spec.parts == 1):
            softmax.scale_rows(layout.rows_and_columns(operands.partial), state.factor)
        state.scale_total()

    @cute.jit
    def keep_p(self, work: Work, operands: Operands, factors: scales.Factors):
        """Let the rounded probabilities be the operand of the next PV product."""
        # Bytes of a sink are even.
        products.copy_words(operands.next_p, operands.p, work.extras.sink_bytes & 1)
        if const_expr(self.spec.value_blocks):
            operands.share_inverse[0] = factors.share_inverse

    @cute.jit
    def look_ahead(self, loads: Loads, operands: Operands, position: Int32):
        """Ask whether the tiles of the next step are there: asked early, it does not wait for the answer."""
        operands.arrived[0] = barriers.has_arrived(loads.k.full, position + 1, self.stages)
        operands.arrived[1] = barriers.has_arrived(loads.v_ready.full, position, self.stages)

    @cute.jit
    def wait_for_tiles(self, loads: Loads, operands: Operands, position: Int32):
        """Wait for K of a step and V of the one before, if the look ahead has not seen them."""
        if operands.arrived[0] == 0:
            barriers.wait_full(loads.k.full, position, self.stages)
        if operands.arrived[1] == 0:
            barriers.wait_full(loads.v_ready.full, position - 1, self.stages)

    # ---- scales

    @cute.jit
    def with_scales(self, work: Work, me: Consumer) -> Consumer:
        """The consumer with the scales of its rows of a tile of work: nothing is done yet with what is read."""
        of = scales.Scales.of_numbers(work.extras.scales)
        head_kv = work.head // work.sizes.heads_per_kv
        row = work.first_row + WGMMA_ROWS * me.group
        block = cutlass.max(cutlass.min(row, work.sizes.rows - 1), 0) // of.query_block
        queries = scales.read(of.q, work.batch_index, work.head // of.query_heads, block)
        keys, k_address, v_address = Float32(1.0), Int64(0), Int64(0)
        if const_expr(self.spec.key_block):
            k_address = scales.address_of_head(of.k, work.batch_index, head_kv)
        else:
            keys = scales.read(of.k, work.batch_index, head_kv, Int32(0))
        if const_expr(self.spec.value_blocks):
            v_address = scales.address_of_head(of.v, work.batch_index, head_kv)
            output = scales.read(of.largest, work.batch_index, head_kv, Int32(0))
        else:
            output = scales.read(of.v, work.batch_index, head_kv, Int32(0))
        return me._replace(scales=RowScales(queries, keys, output, k_address, v_address))

    @cute.jit
    def factors_of(
        self, work: Work, me: Consumer, step: Int32, operands: Operands, first: cutlass.Constexpr
    ) -> scales.Factors | None:
        """What scales make of the scores of a step; of 16-bit tensors nothing."""
        factors = None
        if const_expr(self.spec.key_block):
            if const_expr(first):
                self.read_scales(work, me, step, operands)
            k_scale, v_scale = operands.next_scales[0], operands.next_scales[1]
            share_log2, share_inverse = None, None
            if const_expr(self.spec.value_blocks):
                share_log2, share_inverse = scales.share_of(v_scale, me.scales.output)
            factors = scales.Factors(me.scales.queries * k_scale, share_log2, share_inverse)
            self.read_scales(work, me, cutlass.min(step + 1, work.key_tiles - 1), operands)
        elif const_expr(self.spec.fp8):
            factors = scales.Factors(me.scales.queries * me.scales.keys, None, None)
        return factors

    def scale_of(self, state: softmax.State, factors: scales.Factors | None) -> Float32:
        """Factor of the scores that come to the softmax, in log2 units."""
        if not self.spec.fp8 or self.spec.softcap or self.score_mod is not None:
            return state.scale_log2
        largest = scales.LARGEST_SCALE_OF_INT8 if self.spec.qk_dtype else scales.LARGEST_SCALE
        return scales.bounded(state.scale_log2 * factors.scores, scales.LEAST_SCALE, largest)

    @cute.jit
    def read_scales(self, work: Work, me: Consumer, step: Int32, operands: Operands):
        """Read the scales of a step's block of keys, of v where it has blocks."""
        of = scales.Scales.of_numbers(work.extras.scales)
        block = self.key_tile_of(work, step) // (self.spec.key_block // self.tile_n)
        operands.next_scales[0] = scales.read_block(me.scales.k_address, of.k, block)
        if const_expr(self.spec.value_blocks):
            operands.next_scales[1] = scales.read_block(me.scales.v_address, of.v, block)
