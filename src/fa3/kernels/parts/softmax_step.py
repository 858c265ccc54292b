"""What becomes of the scores of a key tile: they are capped, modified and masked, and turned into probabilities."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from fa3.spec import ForwardSpec

from . import layout, rows, scaled_softmax, scales, scores, softmax
from .work import Consumer, Work


class SoftmaxStep:
    """The softmax of a consumer, between its two products."""

    spec: ForwardSpec
    mask: str
    tile_n: int
    score_mod: Any
    mask_mod: Any

    @cute.jit
    def softmax_step(
        self,
        work: Work,
        me: Consumer,
        raw_scores: cute.Tensor,
        state: softmax.State,
        step: Int32,
        masked: Boolean | bool,
        factors: scales.Factors | None,
        scale_log2: Float32,
        first: cutlass.Constexpr,
    ) -> Boolean:
        """Turn scores into probabilities and bring the softmax state up to date.

        Returns whether the output must be rescaled by the state's factors; the same in all lanes of a warp.
        """
        view = layout.rows_and_columns(raw_scores)
        extras = work.extras
        if const_expr(self.spec.fp8):
            # The scales join the first factor that there is.
            if const_expr(self.spec.softcap):
                extras = extras._replace(tanh_factor=extras.tanh_factor * scales.bounded_factor(factors.scores))
            elif const_expr(self.score_mod is not None):
                extras = extras._replace(mod_factor=extras.mod_factor * scales.bounded_factor(factors.scores))
        if const_expr(self.spec.softcap):
            scores.cap(view, extras.tanh_factor)
        if const_expr(self.score_mod is not None):
            queries, heads, first_key = self.place_of_scores(work, me, step)
            scores.modify(
                self.score_mod, view, extras.mod_factor, work.batch_index, heads, queries, first_key, extras.score_aux
            )
        if const_expr(isinstance(masked, bool)):
            if const_expr(masked):
                self.hide(work, me, view, step)
        elif masked:
            self.hide(work, me, view, step)
        if const_expr(self.spec.fp8):
            largest = softmax.row_max_bits(cute.recast_tensor(view, Int32))
            moved = state.exceeded(largest)
            if moved:
                threshold = scaled_softmax.FIRST_THRESHOLD if first else self.spec.rescale_threshold
                state.move_to(view, largest, scale_log2, threshold)
            state.exponentiate_with(view, scale_log2, factors)
        else:
            moved = state.must_move(view)
            if moved:
                state.move(view, self.spec.rescale_threshold)
            state.exponentiate(view)
        return moved

    @cute.jit
    def place_of_scores(
        self, work: Work, me: Consumer, step: Int32
    ) -> tuple[tuple[Int32, Int32], tuple[Int32, Int32], Int32]:
        """Queries and heads of the thread's two rows, and the key of its first column."""
        upper, lower = self.rows_of(work, me)
        packed, group = self.spec.pack_gqa, work.sizes.group
        queries = rows.query_of(upper, group, packed), rows.query_of(lower, group, packed)
        heads = rows.head_of(upper, work.head, group, packed), rows.head_of(lower, work.head, group, packed)
        return queries, heads, self.key_tile_of(work, step) * self.tile_n + layout.first_column(me.lane)

    @cute.jit
    def hide(self, work: Work, me: Consumer, view: cute.Tensor, step: Int32):
        """Set the scores of keys that a row does not see to -inf."""
        queries, heads, first_key = self.place_of_scores(work, me, step)
        if const_expr(self.mask_mod is not None):
            scores.hide(self.mask_mod, view, work.batch_index, heads, queries, first_key, work.extras.mask_aux)
        work.sizes.mask.hide(view, queries, first_key, self.mask)
