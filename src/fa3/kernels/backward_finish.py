"""The pass after the backward's main one: dQ in order, scaled and rounded, from its float32 sums."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from fa3.backward_spec import BACKWARD_GROUPS, FinishSpec
from fa3.spec import WARPGROUP_THREADS, WGMMA_ROWS

from .forward import DTYPES
from .parts import barriers, copies, products


class FinishKernel:
    """Host launch and device code of one ``FinishSpec``."""

    def __init__(self, spec: FinishSpec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.columns = spec.dq_columns

    @cute.jit
    def __call__(
        self,
        sums: Int64,
        turns: Int64,
        dq: Int64,
        stream: cuda.CUstream,
        batch: Int32,
        seqlen_q: Int32,
        heads: Int32,
        head_dim: Int32,
        dq_strides: tuple,
        softmax_scale: Float32,
    ):
        """Launch a block for each query tile.

        ``sums``, ``turns`` and ``dq`` are device addresses, the first two as `fa3.kernels.parts.backward_work.Rows` has
        them. A tile whose turn is 0 nobody has added to.
        Strides are (batch, row, head) in elements, multiples of 8, the address of dq of 16 bytes.
        """
        batch_stride, row_stride, head_stride = dq_strides
        view = copies.global_tensor(
            self.dtype, dq, (seqlen_q, head_dim, heads, batch), (row_stride, head_stride, batch_stride)
        )
        tma, tensor = copies.make_tma(cpasync.CopyBulkTensorTileS2GOp(), view, self.shared_layout())
        m_blocks = (seqlen_q + self.spec.tile_m - 1) // self.spec.tile_m
        self.kernel(tma, tensor, sums, turns, heads, m_blocks, softmax_scale).launch(
            grid=[m_blocks * heads * batch, 1, 1], block=[self.spec.threads, 1, 1], stream=stream
        )

    def shared_layout(self) -> cute.ComposedLayout:
        """Layout of the parts of a dQ tile."""
        return copies.shared_layout(self.dtype, (WGMMA_ROWS, self.columns, BACKWARD_GROUPS), OperandMajorMode.K)

    @cute.kernel
    def kernel(
        self,
        tma: cute.CopyAtom,
        tensor: cute.Tensor,
        sums: Int64,
        turns: Int64,
        heads: Int32,
        m_blocks: Int32,
        softmax_scale: Float32,
    ):
        """One query tile of one head; each warpgroup has its part, as in the main pass."""
        thread, _, _ = cute.arch.thread_idx()
        # The last ones first: the main pass has just written them, and L2 still has some.
        tile = cute.arch.grid_dim()[0] - 1 - cute.arch.block_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        warp_in_group = cute.arch.make_warp_uniform(thread // 32) % 4
        thread = thread % WARPGROUP_THREADS
        layout = self.shared_layout()

        @cute.struct
        class SharedStorage:
            tile: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(SharedStorage)
        parts = storage.tile.get_tensor(layout.outer, swizzle=layout.inner)

        mma = products.make_mma(self.dtype, self.columns, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
        values = cute.make_rmem_tensor(mma.partition_shape_C((WGMMA_ROWS, self.columns)), Float32)
        chunks = cute.size(values) // 4
        first = 4 * (Int64(BACKWARD_GROUPS * tile + group) * (chunks * WARPGROUP_THREADS) + thread)
        pointer = cute.make_ptr(Float32, sums, cute.AddressSpace.gmem, assumed_align=16)
        pointer = pointer + cute.assume(first, divby=4)
        for i in cutlass.range_constexpr(chunks):
            source = cute.make_tensor(pointer + 4 * WARPGROUP_THREADS * i, cute.make_layout(4))
            cute.autovec_copy(source, cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4)))
        turn = cute.make_ptr(Int32, turns, cute.AddressSpace.gmem, assumed_align=4) + tile
        added = cute.make_tensor(turn, cute.make_layout(1))[0]
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] * softmax_scale if added != 0 else Float32(0.0)
        rounded = cute.make_rmem_tensor(values.layout, self.dtype)
        products.round_to(self.dtype, values, rounded)
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma)
        copy_slice = copy.get_slice(thread)
        cute.copy(copy, copy_slice.retile(rounded), copy_slice.partition_D(parts[None, None, group]))
        # Ordinary writes must be visible to TMA before the thread that issues the store goes on.
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.sync_group(group)
        tiles = cute.local_tile(tensor, (WGMMA_ROWS, self.columns), (None, None, None, None))
        source, target = copies.partition(tma, parts, tiles)
        if warp_in_group == 0:
            m_block, head_index = tile % m_blocks, tile // m_blocks
            row_tile, part = m_block, group
            if const_expr(self.spec.dq_splits_rows):
                row_tile, part = BACKWARD_GROUPS * m_block + group, Int32(0)
            cute.copy(tma, source[None, group], target[None, row_tile, part, head_index % heads, head_index // heads])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def compile_finish(spec: FinishSpec, options: str) -> Any:
    """Compile the spec's host entry; needs no GPU."""
    return cute.compile(
        FinishKernel(spec),
        *[Int64(0)] * 3,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False),
        *[Int32(1)] * 4,
        (Int64(0),) * 3,
        Float32(1.0),
        options=options,
    )
