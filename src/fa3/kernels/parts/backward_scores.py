"""What lies in the registers of a thread of the backward, and the probabilities of a query tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from fa3.backward_spec import BackwardSpec
from fa3.spec import WGMMA_ROWS

from . import gradients, layout
from .backward_work import KeyWork
from .work import Consumer


class KeyScores:
    """Keys, queries and scores of a consumer."""

    spec: BackwardSpec
    dtype: type[cutlass.Numeric]
    tile_m: int
    tile_n: int
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None

    def first_query_of(self, m_block: Int32, me: Consumer) -> Int32:
        """The query of the thread's first column."""
        first = m_block * self.tile_m + layout.first_column(me.lane)
        return first if self.spec.split_keys else first + me.group * self.spec.score_rows

    def keys_of(self, work: KeyWork, me: Consumer) -> tuple[Int32, Int32]:
        """The keys of the thread's two rows."""
        first = self.first_key_of(work, me) + layout.first_row(me.warp, me.lane)
        return first, first + 8

    def first_key_of(self, work: KeyWork, me: Consumer) -> Int32:
        """The first key of the warpgroup."""
        first = work.n_block * self.tile_n
        return first + WGMMA_ROWS * me.group if self.spec.split_keys else first

    def rows_of(self, statistics: cute.Tensor, me: Consumer) -> cute.Tensor:
        """The statistics of the warpgroup's queries."""
        if self.spec.split_keys:
            return statistics
        return cute.local_tile(statistics, (self.spec.score_rows,), (me.group,))

    @cute.jit
    def probabilities(
        self,
        work: KeyWork,
        m_block: Int32,
        head: Int32,
        keys: tuple[Int32, Int32],
        queries: Int32,
        me: Consumer,
        lse: cute.Tensor,
        raw_scores: cute.Tensor,
        p: cute.Tensor,
        scale_log2: Float32,
        listed_cut: Boolean,
    ):
        """P, rounded into ``p``. Of the scores is left what their derivatives are taken at, if any changed them.

        ``listed_cut``: whether a block mask cuts the tile; without one it has no say.
        """
        spec, extras = self.spec, work.extras
        values = cute.make_tensor(raw_scores.iterator, cute.make_layout(cute.size(raw_scores)))
        if const_expr(spec.modified):
            raw = values
            values = cute.make_rmem_tensor(cute.make_layout(cute.size(raw)), Float32)
            gradients.modified(
                self.score_mod, raw, (extras.tanh_factor, extras.mod_factor), spec.softcap, work.batch_index, head,
                keys, queries, extras.score_aux, values,
            )  # fmt: skip
        if const_expr(spec.mask == "blocks"):
            # A block of keys that ends behind the last one is cut.
            if listed_cut:
                gradients.hide(self.mask_mod, values, work.batch_index, head, keys, queries, extras.mask_aux)
                work.sizes.mask.hide_queries(layout.rows_and_columns(values), keys, queries, spec.mask)
        else:
            if const_expr(self.mask_mod is not None):
                gradients.hide(self.mask_mod, values, work.batch_index, head, keys, queries, extras.mask_aux)
            if self.is_cut(work, m_block, me):
                work.sizes.mask.hide_queries(layout.rows_and_columns(values), keys, queries, spec.mask)
        gradients.exponentiate(values, scale_log2, lse, p, self.dtype)

    @cute.jit
    def is_cut(self, work: KeyWork, m_block: Int32, me: Consumer) -> Boolean:
        """Whether the masks, or the end of the keys, leave out some of the warpgroup's scores of a query tile."""
        mask, kind = work.sizes.mask, self.spec.mask
        first_key = self.first_key_of(work, me)
        cut = first_key + WGMMA_ROWS > mask.seqlen_k
        begin, end = mask.whole_query_tiles(first_key, first_key + WGMMA_ROWS - 1, self.tile_m, kind)
        return cut or m_block < begin or m_block >= end
