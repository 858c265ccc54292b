"""FP8 with float32 sums where the output has too many columns for a second one: PV in parts of its columns.

A part is multiplied, waited for, and added to the output in float32, while the next part is multiplied. That comes
before the scores of the next step, not under their softmax: the parts in flight then have the registers of scores,
piece by piece, and as soon as a piece is free its scores are on their way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa3.spec import WGMMA_ROWS, ForwardSpec

from . import barriers, products, softmax
from .work import Consumer, Loads, Operands, Shared, Work

#: Parts of a PV product that are in flight together.
IN_FLIGHT = 2


class Fp8Parts:
    """The steps of a consumer whose PV products come in parts."""

    spec: ForwardSpec
    dtype: type[cutlass.Numeric]
    qk_dtype: type[cutlass.Numeric]
    tile_n: int
    stages: int
    groups: int

    def part_mma(self) -> cute.TiledMma:
        """PV of a part of the columns."""
        return products.make_mma(self.dtype, self.spec.part_columns, warpgroup.OperandSource.RMEM, OperandMajorMode.K)

    def piece_mma(self) -> cute.TiledMma:
        """S = Q K^T of a piece of the key tile, as many keys as parts have columns."""
        keys = self.tile_n // (self.spec.score_pieces or 1)
        return products.make_mma(self.qk_dtype, keys, warpgroup.OperandSource.SMEM, OperandMajorMode.K)

    def with_parts(self, operands: Operands, shared: Shared) -> Operands:
        """The operands in parts and pieces."""
        pieces, columns = self.spec.score_pieces or 1, self.spec.part_columns
        accumulator = self.part_mma().partition_shape_C((WGMMA_ROWS, columns))
        partial = [cute.make_rmem_tensor(accumulator, Float32) for _ in range(IN_FLIGHT)]
        for i in range(self.spec.score_pieces):
            partial[i] = _piece(operands.scores, i, pieces, accumulator)
        scores = operands.scores
        if self.spec.qk_dtype:
            scores = operands.int_scores
        shape = self.piece_mma().partition_shape_C((WGMMA_ROWS, self.tile_n // pieces))
        keys, head_dim = self.tile_n // pieces, self.spec.head_dim
        return operands._replace(
            partial=tuple(partial),
            v_parts=tuple(_fragments(self.part_mma(), shared.v, (columns, self.tile_n), self.spec.parts)),
            k_pieces=tuple(_fragments(self.piece_mma(), shared.k, (keys, head_dim), pieces)),
            score_pieces=tuple(_piece(scores, i, pieces, shape) for i in range(pieces)),
        )

    @cute.jit
    def step_in_parts(
        self,
        work: Work,
        step: Int32,
        me: Consumer,
        loads: Loads,
        operands: Operands,
        state: softmax.State,
        masked: Boolean | bool,
        first: cutlass.Constexpr,
    ):
        """The PV product of the step before, which the group's first lacks, and scores of this step's key tile."""
        self.load_next_step(work, loads, me, step)
        position = work.position + step
        factors = self.factors_of(work, me, step, operands, first)
        scale_log2 = self.scale_of(state, factors)
        if const_expr(self.spec.key_block):
            state.set_limits(scale_log2)
        if const_expr(first):
            barriers.wait_full(loads.k.full, position, self.stages)
        else:
            self.wait_for_tiles(loads, operands, position)
        if const_expr(self.spec.pingpong):
            barriers.take_turn(me.group)
        if const_expr(first):
            for i in cutlass.range_constexpr(len(operands.score_pieces)):
                self.issue_scores(operands, position, i)
        else:
            self.multiply_in_parts(operands, state, loads, position - 1, scores=True)
        warpgroup.wait_group(0)
        if const_expr(self.spec.pingpong):
            barriers.give_turn(me.group, self.groups)
        barriers.release(loads.k.empty, position, self.stages)
        if const_expr(self.spec.qk_dtype):
            products.to_float(operands.int_scores, operands.scores)
        moved = self.softmax_step(work, me, operands.scores, state, step, masked, factors, scale_log2, first)
        self.look_ahead(loads, operands, position)
        if const_expr(not first):
            if moved:
                self.follow_references(operands, state)
        products.round_to_fp8(operands.scores, operands.p)
        if const_expr(self.spec.value_blocks):
            operands.share_inverse[0] = factors.share_inverse

    @cute.jit
    def issue_scores(self, operands: Operands, position: Int32, piece: cutlass.Constexpr):
        """Issue a piece of the scores of the key tile at ``position``."""
        k_piece = self.tile_at(operands.k_pieces[piece], position)
        products.issue(self.piece_mma(), operands.score_pieces[piece], operands.q, k_piece, accumulate=False)

    @cute.jit
    def multiply_in_parts(
        self,
        operands: Operands,
        state: softmax.State,
        loads: Loads,
        position: Int32,
        scores: cutlass.Constexpr = False,
    ):
        """Add the PV product of the v tile at ``position`` to the output; with ``scores`` issue those of the next tile.

        Each product but the first is issued when the part is added that had its registers.
        """
        parts, columns = self.spec.parts, cute.size(operands.partial[0])
        # Pieces of scores whose registers parts have; all of them are issued with the last parts.
        pieces = self.spec.score_pieces if scores else 0
        self.issue_part(operands, position, 0)
        self.issue_part(operands, position, 1)
        for part in cutlass.range_constexpr(parts):
            # One group is behind this one: the next part, or behind the last the scores.
            behind = 1 if part + 1 < parts else int((part - 1) % IN_FLIGHT < pieces)
            warpgroup.wait_group(behind)
            if const_expr(part + 1 == parts):
                barriers.release(loads.v_ready.empty, position, self.stages)
            target = cute.make_tensor(operands.output.iterator + part * columns, cute.make_layout(columns))
            products.add_up(target, operands.partial[part % IN_FLIGHT])
            if const_expr(part + IN_FLIGHT < parts):
                self.issue_part(operands, position, part + IN_FLIGHT)
            elif const_expr(part % IN_FLIGHT < pieces):
                self.issue_scores(operands, position + 1, part % IN_FLIGHT)
        if const_expr(scores and self.spec.score_pieces == 0):
            self.issue_scores(operands, position + 1, 0)
        self.add_row_sums(operands, state)

    @cute.jit
    def issue_part(self, operands: Operands, position: Int32, part: cutlass.Constexpr):
        """Issue a part of PV, with the first the row sums of P."""
        v_part, partial = self.tile_at(operands.v_parts[part], position), operands.partial[part % IN_FLIGHT]
        if const_expr(part == 0):
            products.issue_with_row_sums(
                self.part_mma(), partial, operands.p, v_part, False, self.sums_mma(), operands.sums, operands.ones
            )
        else:
            products.issue(self.part_mma(), partial, operands.p, v_part, accumulate=False)


def _piece(accumulator: cute.Tensor, i: int, pieces: int, shape: Any) -> cute.Tensor:
    """The i-th of so many pieces of the columns of an accumulator."""
    return cute.make_tensor(accumulator.iterator + i * (cute.size(accumulator) // pieces), cute.make_layout(shape))


def _fragments(mma: cute.TiledMma, tile: cute.Tensor, size: tuple, count: int) -> Iterator[cute.Tensor]:
    """B operands of a product in ``count`` parts, of ``size`` (rows, columns) of the tile each."""
    for i in range(count):
        yield mma.make_fragment_B(mma.get_slice(0).partition_B(cute.local_tile(tile, size, (i, 0, None))))
