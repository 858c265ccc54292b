"""The pass before the backward's main one: what it needs of each query row, and turns that are 0.

``delta = rowsum(dO * O) - dLSE``: the derivative of the softmax subtracts from each dP the mean of its row under P,
which is rowsum(dO * O), and the derivative of the LSE with respect to a score is its probability, so that its
gradient joins in. The LSE is written in log2 units. Rows that see no key, and those behind the last that fill up a
tile, get +inf and 0, by which P and dS become 0.

Reference: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691, algorithm 2, line 4.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa3.backward_spec import PrepareSpec

from .forward import DTYPES
from .parts.rows import VECTOR
from .parts.softmax import LOG2_E


class PrepareKernel:
    """Host launch and device code of one ``PrepareSpec``."""

    def __init__(self, spec: PrepareSpec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        # Threads next to each other that share a row: a power of two, so that they reduce by shuffles.
        self.across = 1 << (spec.head_dim_v // VECTOR - 1).bit_length()

    @cute.jit
    def __call__(
        self,
        out: Int64,
        dout: Int64,
        lse: Int64,
        dlse: Int64,
        lse_log2: Int64,
        delta: Int64,
        turns: Int64,
        stream: cuda.CUstream,
        batch: Int32,
        seqlen_q: Int32,
        heads: Int32,
        head_dim_v: Int32,
        out_strides: tuple,
        dout_strides: tuple,
    ):
        """Launch a block for each query tile.

        The first seven arguments are device addresses; ``dlse`` may be 0: none, and ``turns``. Strides are (batch, row,
        head) in elements, multiples of 8, addresses of out and dout of 16 bytes. lse and dlse are (batch, heads,
        seqlen_q) float32, contiguous; lse_log2, delta and turns as `fa3.kernels.parts.backward_work.Rows` has them.
        """
        m_blocks = (seqlen_q + self.spec.tile_m - 1) // self.spec.tile_m
        self.kernel(
            out,
            dout,
            lse,
            dlse,
            lse_log2,
            delta,
            turns,
            seqlen_q,
            heads,
            m_blocks,
            head_dim_v,
            out_strides,
            dout_strides,
        ).launch(grid=[m_blocks * heads * batch, 1, 1], block=[self.spec.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        out: Int64,
        dout: Int64,
        lse: Int64,
        dlse: Int64,
        lse_log2: Int64,
        delta: Int64,
        turns: Int64,
        seqlen_q: Int32,
        heads: Int32,
        m_blocks: Int32,
        head_dim_v: Int32,
        out_strides: tuple,
        dout_strides: tuple,
    ):
        """One query tile of one head."""
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        # The last ones first: what the main pass reads first is then the last that L2 has seen.
        tile = cute.arch.grid_dim()[0] - 1 - cute.arch.block_idx()[0]
        m_block, head_index = tile % m_blocks, tile // m_blocks
        head, batch_index = head_index % heads, head_index // heads
        down = spec.threads // self.across
        for i in cutlass.range_constexpr(spec.tile_m // down):
            row_in_tile = i * down + thread // self.across
            row = m_block * spec.tile_m + row_in_tile
            column = VECTOR * (thread % self.across)
            products = cute.make_rmem_tensor(VECTOR, Float32)
            products.fill(0.0)
            if row < seqlen_q and column < head_dim_v:
                of_out = self.vector(out, out_strides, batch_index, row, head, column)
                of_dout = self.vector(dout, dout_strides, batch_index, row, head, column)
                for j in cutlass.range_constexpr(VECTOR):
                    products[j] = Float32(of_out[j]) * Float32(of_dout[j])
            total = Float32(0.0)
            for j in cutlass.range_constexpr(VECTOR):
                total += products[j]
            for step in cutlass.range_constexpr(self.across.bit_length() - 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
            if thread % self.across == 0:
                reference, correction = Float32.inf, Float32(0.0)
                if row < seqlen_q:
                    place = Int64(head_index) * seqlen_q + row
                    row_lse = self.element(lse, place)[0]
                    if row_lse != -Float32.inf:
                        reference, correction = row_lse * LOG2_E, total
                        if dlse != 0:
                            correction = total - self.element(dlse, place)[0]
                place = Int64(tile) * spec.tile_m + row_in_tile
                lse_target, delta_target = self.element(lse_log2, place), self.element(delta, place)
                lse_target[0] = reference
                delta_target[0] = correction
        if turns != 0 and thread == 0:
            pointer = cute.make_ptr(Int32, turns, cute.AddressSpace.gmem, assumed_align=4)
            cute.make_tensor(pointer + tile, cute.make_layout(1))[0] = Int32(0)

    @cute.jit
    def vector(
        self, address: Int64, strides: tuple, batch_index: Int32, row: Int32, head: Int32, column: Int32
    ) -> cute.Tensor:
        """Eight elements of a row, in registers."""
        batch_stride, row_stride, head_stride = strides
        offset = Int64(batch_index) * batch_stride + Int64(row) * row_stride + Int64(head) * head_stride + column
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        values = cute.make_rmem_tensor(VECTOR, self.dtype)
        source = cute.make_tensor(pointer + cute.assume(offset, divby=VECTOR), cute.make_layout(VECTOR))
        cute.autovec_copy(source, values)
        return values

    def element(self, address: Int64, place: Int64) -> cute.Tensor:
        """One float32 in global memory."""
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
        return cute.make_tensor(pointer + place, cute.make_layout(1))


def compile_prepare(spec: PrepareSpec, options: str) -> Any:
    """Compile the spec's host entry; needs no GPU."""
    return cute.compile(
        PrepareKernel(spec),
        *[Int64(0)] * 7,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False),
        *[Int32(1)] * 4,
        *[(Int64(0),) * 3] * 2,
        options=options,
    )
