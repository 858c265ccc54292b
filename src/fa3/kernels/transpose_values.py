"""V of e4m3 from rows to V^T, in the order of keys that the tensor core wants: a pass of its own before attention.

The attention kernel can transpose tiles itself, but does it again for every tile of queries, and shares the bandwidth
of shared memory with products that need it all where rows are wide. Moving each element once more costs less there.

A warp has 128 keys of 32 columns: a thread reads 32 bytes of the four keys of a word (`fa3.e4m3.key_of_slot`), sorts
them into words by byte permutes, and the warp writes 128 bytes of one column after the other.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa3.e4m3 import SLOTS, key_of_slot, slots_of
from fa3.spec import TransposeSpec

#: Keys of a warp; columns of a thread, that it reads 16 at a time.
KEYS, COLUMNS, VECTOR = 128, 32, 16


class TransposeKernel:
    """Host launch and device code of one ``TransposeSpec``."""

    def __init__(self, spec: TransposeSpec):
        self.spec = spec
        self.columns = COLUMNS * spec.warps

    @cute.jit
    def __call__(
        self,
        v: Int64,
        out: Int64,
        stream: cuda.CUstream,
        batch: Int32,
        seqlen: Int32,
        heads: Int32,
        head_dim: Int32,
        strides: tuple,
    ):
        """Launch a block for 128 keys and 32 columns for each of its warps.

        ``v`` and ``out`` are device addresses, multiples of 16 bytes. v is (batch, seqlen, heads, head_dim), head_dim a
        multiple of 16; ``strides`` are (batch, row, head) in bytes, multiples of 16. out is (batch, heads, head_dim,
        `fa3.e4m3.slots_of(seqlen)`), contiguous; slots of keys that do not exist get 0.
        """
        parts = (head_dim + self.columns - 1) // self.columns
        grid = [(seqlen + KEYS - 1) // KEYS, heads * parts, batch]
        self.kernel(v, out, seqlen, heads, head_dim, parts, strides).launch(
            grid=grid, block=[32 * self.spec.warps, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        v: Int64,
        out: Int64,
        seqlen: Int32,
        heads: Int32,
        head_dim: Int32,
        parts: Int32,
        strides: tuple,
    ):
        """128 keys of some columns of one head."""
        thread, _, _ = cute.arch.thread_idx()
        tile, head_part, batch_index = cute.arch.block_idx()
        head, part = head_part // parts, head_part % parts
        column = part * self.columns + COLUMNS * (thread // 32)
        word = tile * (KEYS // 4) + thread % 32
        batch_stride, row_stride, head_stride = strides
        source = v + Int64(batch_index) * batch_stride + Int64(head) * head_stride + column

        # Words of 4 columns of a key: all loads are under way before the first is used.
        of_keys = [cute.make_rmem_tensor(COLUMNS // 4, Int32) for _ in range(4)]
        for index in cutlass.range_constexpr(4):
            of_keys[index].fill(0)
            key = key_of_slot(word, index)
            for first in cutlass.range_constexpr(0, COLUMNS, VECTOR):
                if key < seqlen and column + first < head_dim:
                    target = cute.make_tensor(of_keys[index].iterator + first // 4, cute.make_layout(VECTOR // 4))
                    cute.autovec_copy(self.words(source + Int64(key) * row_stride + first, VECTOR // 4), target)

        slots = slots_of(seqlen)
        row = (Int64(batch_index) * heads + head) * head_dim + column
        target = out + row * slots + 4 * word
        for i in cutlass.range_constexpr(COLUMNS // 4):
            one, two, three, four = (of_key[i] for of_key in of_keys)
            # Of two columns, the bytes of keys one and two, and of three and four.
            for half in cutlass.range_constexpr(2):
                pairs = 0x7362 if half else 0x5140
                left, right = cute.arch.prmt(one, two, pairs), cute.arch.prmt(three, four, pairs)
                for odd in cutlass.range_constexpr(2):
                    c = 4 * i + 2 * half + odd
                    if SLOTS * (word // 4) < seqlen and column + c < head_dim:
                        place = self.words(target + Int64(c) * slots, 1)
                        place[0] = Int32(cute.arch.prmt(left, right, 0x7632 if odd else 0x5410))

    def words(self, address: Int64, count: int) -> cute.Tensor:
        """So many words in global memory."""
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4 * count)
        return cute.make_tensor(pointer, cute.make_layout(count))


def compile_transpose(spec: TransposeSpec, options: str) -> Any:
    """Compile the spec's host entry; needs no GPU."""
    return cute.compile(
        TransposeKernel(spec),
        *[Int64(0)] * 2,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False),
        *[Int32(1)] * 4,
        (Int64(0),) * 3,
        options=options,
    )
