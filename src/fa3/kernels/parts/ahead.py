"""The main loop with scores ahead: those of key tile j+1 are multiplied while the softmax of tile j runs.

The other order, `fa3.kernels.forward.ForwardKernel.step`, waits for a tile's scores before it can do anything with
them. Here a warpgroup holds two tiles of scores. Both products of a step, the scores of the next tile and PV of the
tile before, run under the softmax of this one, whose scores are there when it begins: between two softmaxes lies
nothing but the issue of products. It takes the registers of the second tile, and no turns between warpgroups.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from fa3.spec import ForwardSpec

from . import barriers, layout, products, ptx, softmax
from .work import Consumer, Loads, Operands, Work


class ScoresAhead:
    """The part of a forward kernel that goes over the key tiles of one tile of work in this order."""

    spec: ForwardSpec
    mask: str
    stages: int

    @cute.jit
    def attend_steps_ahead(
        self,
        work: Work,
        me: Consumer,
        group_row: Int32,
        first: Int32,
        end: Int32,
        loads: Loads,
        operands: Operands,
        state: softmax.State,
    ):
        """Steps ``first`` to before ``end``, at least one: all but the PV product of the last."""
        first_whole, end_whole = self.whole_steps(work, group_row)
        position = work.position + first
        barriers.wait_full(loads.k.full, position, self.stages)
        products.issue(
            self.qk_mma(), operands.scores, operands.q, self.tile_at(operands.k, position), accumulate=False
        )
        warpgroup.wait_group(0)
        barriers.release(loads.k.empty, position, self.stages)
        this, other = operands, operands._replace(scores=operands.next_scores, next_scores=operands.scores)
        self.step_ahead(work, first, Int32(0), end, me, loads, this, state, masked=True, first=True)
        # Two steps to a round: each tile of scores has registers of its own.
        rest = end - first - 1
        for i in cutlass.range(0, rest // 2, unroll=1):
            step = first + 1 + 2 * i
            cut = step < first_whole or step >= end_whole
            self.step_ahead(work, step, 2 * i + 1, end, me, loads, other, state, masked=cut)
            step += 1
            cut = step < first_whole or step >= end_whole
            self.step_ahead(work, step, 2 * i + 2, end, me, loads, this, state, masked=cut)
        if rest % 2 == 1:
            step = end - 1
            cut = step < first_whole or step >= end_whole
            self.step_ahead(work, step, rest, end, me, loads, other, state, masked=cut)

    @cute.jit
    def step_ahead(
        self,
        work: Work,
        step: Int32,
        count: Int32,
        end: Int32,
        me: Consumer,
        loads: Loads,
        operands: Operands,
        state: softmax.State,
        masked: Boolean | bool,
        first: cutlass.Constexpr = False,
    ):
        """Softmax of a step whose scores are there; under it the next step's scores, and PV of the step before."""
        position = work.position + step
        factors = self.factors_of(work, me, step)
        more = step + 1 < end
        # The last step multiplies once more what it has: that nobody reads is cheaper than a branch.
        ahead = position + 1 if more else position
        if more:
            barriers.wait_full(loads.k.full, ahead, self.stages)
        if const_expr(not first):
            barriers.wait_full(loads.v_ready.full, position - 1, self.stages)
        products.issue(
            self.qk_mma(), operands.next_scores, operands.q, self.tile_at(operands.k, ahead), accumulate=False
        )
        if const_expr(not first):
            self.issue_pv(operands, self.tile_at(operands.v, position - 1), self.goes_on(count))
        moved = self.softmax_step(work, me, operands.scores, state, step, masked, factors)
        products.round_to_fp8(operands.scores, operands.next_p)
        ptx.keep_words_before_here(products.any_of(operands.next_p))
        warpgroup.wait_group(0)
        if more:
            barriers.release(loads.k.empty, ahead, self.stages)
        if const_expr(not first):
            barriers.release(loads.v_ready.empty, position - 1, self.stages)
            self.add_tile(operands, state, count, moved)
        self.keep_p(work, operands, factors)
