"""What leaves the backward kernel at the end of a tile of work: dK and dV."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from fa3.backward_spec import BackwardSpec
from fa3.spec import WGMMA_ROWS

from . import barriers, products
from .backward_work import KeyWork
from .work import Consumer


class KeyEpilogue:
    """The storing half of a consumer."""

    spec: BackwardSpec
    dtype: type[cutlass.Numeric]
    tile_m: int
    tile_n: int
    groups: int
    key_parts: int

    @cute.jit
    def store(
        self,
        work: KeyWork,
        me: Consumer,
        values: cute.Tensor,
        columns: cutlass.Constexpr,
        store: tuple,
    ):
        """Send dK or dV of the warpgroup through shared memory."""
        tile, tma, source, target = store
        rounded = cute.make_rmem_tensor(values.layout, self.dtype)
        products.round_to(self.dtype, values, rounded)
        self.write(rounded, tile[None, None, me.group], me)
        # Ordinary writes must be visible to TMA before the thread that issues the store goes on.
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.sync_group(me.group)
        if me.warp == 0:
            key_tile, part = work.n_block, me.group
            if const_expr(self.spec.split_keys):
                key_tile, part = work.n_block * self.key_parts + me.group, Int32(0)
            cute.copy(tma, source[None, me.group], target[None, key_tile, part, work.head, work.batch_index])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def write(self, rounded: cute.Tensor, tile: cute.Tensor, me: Consumer):
        """Write an accumulator, rounded, to a (64, columns) tile in shared memory."""
        write_tile(self.dtype, rounded, tile, me)


@cute.jit
def write_tile(dtype: cutlass.Constexpr, rounded: cute.Tensor, tile: cute.Tensor, me: Consumer):
    """Write an accumulator of a warpgroup, rounded, to a (64, columns) tile in shared memory."""
    columns = cute.size(tile, mode=[1])
    mma = products.make_mma(dtype, columns, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), mma)
    copy_slice = copy.get_slice(32 * me.warp + me.lane)
    values = cute.make_tensor(rounded.iterator, cute.make_layout(mma.partition_shape_C((WGMMA_ROWS, columns))))
    cute.copy(copy, copy_slice.retile(values), copy_slice.partition_D(tile))
