"""q, k or v to 8 bits in one pass: rotary embedding, random signs, Hadamard transform, amax, scale, rounding.

`fa3.quantization` is the definition. It is bound by memory: 2 bytes are read and 1 written for each element, and all
in between stays in float32 registers. A thread block has one block of rows of one head, or with a rotary embedding of
several heads, one after the other: cos and sin of a thread's pairs, which are those of every head, stay in registers
with the signs in them, and the elements of the next head are on their way while those of one are computed. Where that
would be too many threads for two thread blocks to share a multiprocessor, so that one computes while the other waits,
a cluster of thread blocks has the rows of a block (`fa3.kernels.parts.shared_amax`).

One scale for a whole head takes two passes, since its amax must be known before the first element is rounded: the
first only finds it, the second computes all again, which is cheaper than to store it.

Reference: Shah et al. 2024, https://arxiv.org/abs/2407.08608, section 3.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa3.e4m3 import INTEGER_STEPS, LARGEST, LARGEST_AMAX, SMALLEST_AMAX, round_up_bits
from fa3.spec import INT8, SHARED_MEMORY_PER_BLOCK, QuantizeSpec

from .forward import DTYPES
from .parts import angles as kept_angles
from .parts import ptx, rotation
from .parts.rows import VECTOR
from .parts.shared_amax import SharedAmax


@cute.jit
def round_up_amax(amax: Float32) -> Float32:
    """The smallest power of two times 448 that is at least ``amax``, as `fa3.quantization.round_up_amax`."""
    bounded = -cute.arch.fmax(-amax, Float32(-LARGEST_AMAX))
    return round_up_bits(bounded.bitcast(Int32)).bitcast(Float32)


#: Further than any row is; a sum with a row is an Int32 still.
FAR = 2**30


def _blocks_per_sm(warps: int, registers: int) -> int:
    """Thread blocks of so many warps that a multiprocessor has registers for: each of its quarters has 2^14."""
    blocks = 1
    while -(-(blocks + 1) * warps // 4) * 32 * registers <= 2**14:
        blocks += 1
    return blocks


class Call(NamedTuple):
    """What the arguments of a launch are, as `QuantizeKernel.__call__` has them."""

    x: Int64
    out: Int64
    scale: Int64
    amax: Int64
    cos: Int64
    sin: Int64
    seqlen: Int32
    heads: Int32
    first_position: Int32
    x_strides: tuple
    out_strides: tuple
    amax_strides: tuple
    scale_factor: Float32


class Block(NamedTuple):
    """Which rows of which head a thread block has in hand, and the addresses of what belongs to that head.

    It is the ``part``-th of those that have the rows of a block.
    ``x``, ``out`` and ``amax`` are those of all its rows, ``scale`` that of this block's scale.
    """

    part: Int32 | int
    first_row: Int32
    x: Int64
    out: Int64
    amax: Int64
    scale: Int64

    def next(self, steps: Block) -> Block:
        """That of the next head: so many bytes further."""
        return Block(*(mine + step for mine, step in zip(self, steps, strict=True)))


class QuantizeKernel:
    """Host launch and device code of one ``QuantizeSpec``."""

    def __init__(self, spec: QuantizeSpec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.int8 = spec.out == INT8
        self.values = spec.units * spec.held
        #: Rows of a thread block.
        self.rows = spec.rows // spec.split
        self.shared_amax = SharedAmax(spec)
        #: So many thread blocks share a multiprocessor: one computes while another waits for its values, or for its
        #: other threads. A thread holds its values and 16 registers more, and of fp16 a few on top; with an embedding
        #: as many angles too, and the elements of the next head.
        registers = self.values + 16 + (8 if spec.dtype == "fp16" and spec.rotate else 0)
        if spec.rope:
            registers = 128 if self.values > 16 else 80
            self.angles = kept_angles.Angles(spec, self.dtype)
        self.blocks_per_sm = _blocks_per_sm(spec.threads // 32, registers)
        #: How much of the memory that L1 and shared memory are made of they need for it, in percent, with what CUDA
        #: keeps of each block's; the rest is for L1.
        shared = self.blocks_per_sm * (spec.shared_bytes + 1024)
        self.carveout = min(100, -(-100 * shared // SHARED_MEMORY_PER_BLOCK))
        #: Pieces of a unit: runs of columns, or with ``transpose`` 8 columns of each of 4 keys.
        self.pieces = spec.held // spec.piece
        #: Pieces that are embedded together.
        self.together = 2 if spec.rope and not spec.interleaved else 1
        #: How the lanes of a warp share 4-key words and pieces of V^T: 32 bytes of a row, or more, are next to each
        #: other when they are read, and 32 bytes of a column of keys, or more, when they are written.
        self.pieces_of_warp = 2 if spec.head_dim % 32 else 4
        self.words_of_warp = 32 // self.pieces_of_warp
        if spec.rows // 4 % self.words_of_warp:
            #: Of 96 rows all 24 words go together, to one and a half warps.
            self.words_of_warp = spec.rows // 4
        #: Stages of the transform beyond those inside a piece.
        self.stages = rotation.stages_of(spec.held, spec.piece, spec.exchanging)

    @cute.jit
    def __call__(
        self,
        x: Int64,
        out: Int64,
        scale: Int64,
        amax: Int64,
        cos: Int64,
        sin: Int64,
        stream: cuda.CUstream,
        batch: Int32,
        seqlen: Int32,
        heads: Int32,
        first_position: Int32,
        heads_per_block: Int32,
        x_strides: tuple,
        out_strides: tuple,
        amax_strides: tuple,
        signs: tuple,
        scale_factor: Float32,
    ):
        """Launch a thread block for each block of rows of ``heads_per_block`` heads, 1 unless the spec has a ``rope``.

        The first six arguments are device addresses, 0 where the spec has no use for them:
            x: (batch, seqlen, heads, head_dim), at a multiple of 16 bytes; ``x_strides`` (batch, row, head) in
                elements, multiples of 8.
            out: e4m3, ``out_strides`` (batch, row, head), or with ``transpose`` (batch, column, head), multiples of 16.
            scale: float32, contiguous: (batch, heads, blocks of rows) with ``scales="block"``, (batch, heads) with
                ``"given"``.
            amax: float32, ``amax_strides`` (batch, head); both 0: one for all. Before the pass that finds it, 0.
            cos, sin: (positions, head_dim / 2), contiguous, at multiples of 16 bytes. Row i has position
                ``first_position + i``.

        ``signs`` are 8 words as `rotation.signs_of_piece` has them; a scale is ``scale_factor`` times its amax.
        """
        row_blocks = (seqlen + self.spec.rows - 1) // self.spec.rows
        head_groups = (heads + heads_per_block - 1) // heads_per_block
        call = Call(
            x,
            out,
            scale,
            amax,
            cos,
            sin,
            seqlen,
            heads,
            first_position,
            x_strides,
            out_strides,
            amax_strides,
            scale_factor,
        )
        self.kernel(call, signs, heads_per_block).launch(
            # Heads of the same rows run next to each other: they are neighbours in memory.
            grid=[head_groups, row_blocks * self.spec.split, batch],
            block=[self.spec.threads, 1, 1],
            cluster=[1, self.spec.cluster, 1] if self.spec.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=self.carveout,
        )

    @cute.kernel
    def kernel(self, call: Call, signs: tuple, heads_per_block: Int32):
        """One block of rows, of one or several heads."""
        thread, _, _ = cute.arch.thread_idx()
        group, number, batch_index = cute.arch.block_idx()

        shared = self.shared_amax.storage(thread)
        raw = cute.make_rmem_tensor((VECTOR, self.values // VECTOR), self.dtype)
        # Loads write no rows that there are not.
        raw.fill(0.0)
        flips = self.flips_of(signs, thread)
        if const_expr(self.spec.rope):
            first_head = group * heads_per_block
            heads = cutlass.min(call.heads - first_head, heads_per_block)
            block = self.first_block(call, batch_index, first_head, number)
            steps = self.steps(call)
            self.load(call, block, thread, call.seqlen, raw)
            angles = self.load_angles(call, block, thread, flips)
            flips = self.angles.flips_of_second(flips)
            self.shared_amax.wait_for_start()
            for head in cutlass.range(heads, unroll=1):
                values = self.first_values(raw, angles, flips)
                following = block.next(steps)
                # Of the head after the last nothing is read.
                self.load(call, following, thread, call.seqlen if head + 1 < heads else 0, raw)
                self.quantize(call, block, thread, values, shared, head)
                block = following
        else:
            block = self.first_block(call, batch_index, group, number)
            self.load(call, block, thread, call.seqlen, raw)
            self.shared_amax.wait_for_start()
            self.quantize(call, block, thread, self.first_values(raw, None, flips), shared, Int32(0))

    @cute.jit
    def quantize(
        self,
        call: Call,
        block: Block,
        thread: Int32,
        values: cute.Tensor,
        shared: tuple,
        turn: Int32,
    ):
        """One block of rows of one head; ``turn`` counts heads from 0."""
        if const_expr(self.spec.rotate):
            rotation.hadamard(values, thread, self.stages)
        # With a given amax too: infinities become NaN.
        amax = self.largest_of_thread(values)
        if const_expr(self.spec.scales == "given"):
            amax = self.float32(block.amax)[0]
        else:
            amax = self.shared_amax.find(amax, thread, block.part, shared, turn)
        if const_expr(self.spec.scales == "amax"):
            if thread == 0:
                # Bits of floats that are not negative are in their order.
                of_head = cute.recast_tensor(self.float32(block.amax), Int32)
                cute.arch.atomic_max(of_head.iterator, amax.bitcast(Int32), sem="relaxed", scope="gpu")
        else:
            self.round_and_store(call, block, thread, values, amax)

    # Values ---------------------------------------------------------------------------------------------------------

    def flips_of(self, signs: tuple, thread: Int32) -> list:
        """The signs of each piece of the thread's rows; without ``rotate`` none."""
        if not self.spec.rotate:
            return [None] * self.pieces
        across = self.spec.across
        return [rotation.signs_of_piece(signs, i, thread % across, across, self.spec.piece) for i in range(self.pieces)]

    @cute.jit
    def load_angles(self, call: Call, block: Block, thread: Int32, flips: list) -> cute.Tensor:
        """What the thread keeps for the embeddings of all heads."""
        row = block.first_row + self.row_of(thread, 0)
        return self.angles.load((call.cos, call.sin), call.first_position, row, call.seqlen, thread, flips)

    @cute.jit
    def first_values(self, raw: cute.Tensor, angles: cute.Tensor | None, flips: list) -> cute.Tensor:
        """The thread's values in float32, embedded, with their signs, and transformed inside each piece.

        Piece by piece, or with an embedding that pairs halves of a row two by two.

        Args:
            flips: of each piece, what `flips_of` has, with an embedding what `Angles.flips_of_second` leaves of it.
        """
        spec = self.spec
        values = cute.make_rmem_tensor(self.values, Float32)
        for unit in cutlass.range_constexpr(spec.units):
            for i in cutlass.range_constexpr(self.pieces // self.together):
                first = unit * self.pieces + i
                pieces = [first + n * self.pieces // 2 for n in range(self.together)]
                for piece in pieces:
                    self.unpack(raw, values, piece, flips[piece % self.pieces])
                if const_expr(spec.rope):
                    self.angles.embed(values, angles, i)
                for piece in pieces:
                    if const_expr(spec.rotate):
                        self.begin_transform(values, piece)
        return values

    @cute.jit
    def unpack(self, raw: cute.Tensor, values: cute.Tensor, piece: cutlass.Constexpr, flips: Int32 | None):
        """The elements of a piece in float32, with these signs."""
        pairs = cute.make_tensor(cute.recast_ptr(raw.iterator, dtype=Int32), cute.make_layout(self.values // 2))
        first = piece * self.spec.piece // 2
        for i in cutlass.range_constexpr(self.spec.piece // 2):
            pair = pairs[first + i]
            if const_expr(flips is not None):
                pair = pair ^ rotation.mask_of_pair(flips, i)
            for half in cutlass.range_constexpr(2):
                values[2 * (first + i) + half] = ptx.unpack(pair, half, self.dtype)

    @cute.jit
    def begin_transform(self, values: cute.Tensor, piece: cutlass.Constexpr):
        """The stages of the transform inside a piece."""
        size = self.spec.piece
        of_piece = cute.make_tensor(values.iterator + piece * size, cute.make_layout(size))
        for bit in cutlass.range_constexpr(size.bit_length() - 1):
            rotation.butterflies(of_piece, 1 << bit)

    @cute.jit
    def largest_of_thread(self, values: cute.Tensor) -> Float32:
        """The amax of the thread's values; for int8, which has no NaN, that is NaN with any that is not finite."""
        if const_expr(self.int8):
            amax = rotation.largest_or_nan(values)
        else:
            amax = rotation.largest_finite(values)
        return amax

    @cute.jit
    def round_and_store(self, call: Call, block: Block, thread: Int32, values: cute.Tensor, amax: Float32):
        """Write the scale, and the values by it."""
        amax = cute.arch.fmax(amax, Float32(SMALLEST_AMAX), nan=self.int8)
        if const_expr(self.spec.power_of_two):
            amax = round_up_amax(amax)
        self.store_scale(call, block, thread, amax)
        inverse = rotation.inverse_of(amax, cute.arch.rcp_approx, LARGEST[self.spec.out])
        for i in cutlass.range(self.values, unroll_full=True):
            if const_expr(self.int8):
                # The product and its rounding to an integer are one instruction; a conversion would be a slow one.
                values[i] = cute.math.fma(values[i], inverse, Float32(INTEGER_STEPS))
            else:
                values[i] = values[i] * inverse
        if const_expr(self.spec.transpose):
            self.store_transposed(call, block, thread, values)
        else:
            self.store(call, block, thread, values)

    # Places ---------------------------------------------------------------------------------------------------------

    def row_of(self, thread: Int32, unit: int) -> Int32:
        """The row of a unit in its block, of those that are rows."""
        return thread // self.spec.across + unit * (self.rows // self.spec.units) + self.nowhere(thread)

    def slots_of(self, thread: Int32, unit: int) -> tuple[Int32, Int32]:
        """The 4 slots, as a word of V^T, and the piece of 8 columns of a unit, with ``transpose``."""
        number = thread + unit * self.spec.working_threads
        tiles = self.spec.head_dim // (VECTOR * self.pieces_of_warp)
        lanes = self.words_of_warp * self.pieces_of_warp
        tile, lane = number // lanes, number % lanes
        word = tile // tiles * self.words_of_warp + lane // self.pieces_of_warp + self.nowhere(thread) // 4
        return word, tile % tiles * self.pieces_of_warp + lane % self.pieces_of_warp

    def nowhere(self, thread: Int32) -> Int32 | int:
        """What to add to the row of a thread: for one that has no unit, far more rows than there are."""
        if const_expr(self.spec.threads == self.spec.working_threads):
            return 0
        return thread // self.spec.working_threads * FAR

    def float32(self, address: Int64) -> cute.Tensor:
        """One float32 in global memory."""
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
        return cute.make_tensor(pointer, cute.make_layout(1))

    def first_block(self, call: Call, batch_index: Int32, head: Int32, number: Int32) -> Block:
        """The rows of a head that the thread block of a number has."""
        split = self.spec.split
        steps = self.steps(call)
        x_stride, out_stride, amax_stride = call.x_strides[0], call.out_strides[0], call.amax_strides[0]
        return Block(
            number % split if split > 1 else 0,
            number * self.rows,
            call.x + self.dtype.width // 8 * x_stride * batch_index + steps.x * head,
            call.out + out_stride * batch_index + steps.out * head,
            call.amax + 4 * amax_stride * batch_index + steps.amax * head,
            call.scale
            + steps.scale * (Int64(batch_index) * call.heads + head)
            + 4 * (number // split if self.spec.scales == "block" else 0),
        )

    def steps(self, call: Call) -> Block:
        """Bytes from one head to the next."""
        scales = (call.seqlen + self.spec.rows - 1) // self.spec.rows if self.spec.scales == "block" else 1
        return Block(
            Int32(0),
            Int32(0),
            self.dtype.width // 8 * call.x_strides[2],
            call.out_strides[2],
            4 * call.amax_strides[1],
            Int64(4 * scales),
        )

    # Loads ----------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, call: Call, block: Block, thread: Int32, rows: Int32, target: cute.Tensor):
        """Bring the thread's elements to registers, 8 at a time, of the first ``rows`` rows of the head."""
        # All loads are under way before the first value is used.
        for i in cutlass.range_constexpr(self.values // VECTOR):
            row, place = self.place_of(call, block, thread, i)
            if row < rows:
                pointer = cute.make_ptr(self.dtype, block.x, cute.AddressSpace.gmem, assumed_align=16)
                source = cute.make_tensor(pointer + cute.assume(place, divby=VECTOR), cute.make_layout(VECTOR))
                cute.autovec_copy(source, target[None, i])

    def place_of(self, call: Call, block: Block, thread: Int32, index: int) -> tuple[Int32, Int64]:
        """The row of the thread's 8 elements of a number, and where in the head they begin."""
        spec = self.spec
        row_stride = call.x_strides[1]
        unit, index = divmod(index, spec.held // VECTOR)
        if spec.transpose:
            word, piece = self.slots_of(thread, unit)
            row = block.first_row + rotation.key_of_slots(word, index)
            return row, Int64(row) * row_stride + VECTOR * piece
        row = block.first_row + self.row_of(thread, unit)
        piece, column = divmod(VECTOR * index, spec.piece)
        column += spec.piece * spec.across * piece
        return row, Int64(row) * row_stride + spec.piece * (thread % spec.across) + column

    # Scales ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def store_scale(self, call: Call, block: Block, thread: Int32, amax: Float32):
        """Write the scale: of a head one block does it."""
        # Not zero in thread blocks that leave it to the first.
        others = block.part if const_expr(self.spec.scales == "block") else block.first_row
        if thread + others == 0:
            target = self.float32(block.scale)
            target[0] = amax * call.scale_factor

    # Stores ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def store(self, call: Call, block: Block, thread: Int32, values: cute.Tensor):
        """Round the thread's values and write them as rows."""
        spec, pack = self.spec, ptx.pack_low_bytes if self.int8 else ptx.pack_four
        row_stride = call.out_strides[1]
        for unit in cutlass.range_constexpr(spec.units):
            words = cute.make_rmem_tensor(spec.held // 4, Int32)
            for i in cutlass.range_constexpr(spec.held // 4):
                words[i] = pack(*(values[unit * spec.held + 4 * i + n] for n in range(4)))
            row = block.first_row + self.row_of(thread, unit)
            if row < call.seqlen:
                address = block.out + Int64(row) * row_stride + spec.piece * (thread % spec.across)
                for i in cutlass.range_constexpr(self.pieces):
                    self.store_words(
                        address + spec.piece * spec.across * i, words, spec.piece // 4 * i, spec.piece // 4
                    )

    @cute.jit
    def store_transposed(self, call: Call, block: Block, thread: Int32, values: cute.Tensor):
        """Round the thread's values and write them as V^T: 4 keys of a column are a word.

        Groups of 16 keys are written whole, with zeros for keys behind the last.
        """
        spec = self.spec
        column_stride = call.out_strides[1]
        for unit in cutlass.range_constexpr(spec.units):
            word, piece = self.slots_of(thread, unit)
            if block.first_row + 16 * (word // 4) < call.seqlen:
                address = block.out + block.first_row + Int64(VECTOR * piece) * column_stride + 4 * word
                for column in cutlass.range_constexpr(VECTOR):
                    words = cute.make_rmem_tensor(1, Int32)
                    words[0] = ptx.pack_four(*(values[unit * spec.held + VECTOR * n + column] for n in range(4)))
                    self.store_words(address + column * column_stride, words, 0, 1)

    @cute.jit
    def store_words(self, address: Int64, words: cute.Tensor, first: cutlass.Constexpr, count: cutlass.Constexpr):
        """Write ``count`` words at a multiple of their size."""
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4 * count)
        target = cute.make_tensor(pointer, cute.make_layout(count))
        cute.autovec_copy(cute.make_tensor(words.iterator + first, cute.make_layout(count)), target)


def compile_quantize(spec: QuantizeSpec, options: str) -> Any:
    """Compile the spec's host entry; needs no GPU."""
    return cute.compile(
        QuantizeKernel(spec),
        *[Int64(0)] * 6,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False),
        *[Int32(1)] * 5,
        *[(Int64(0),) * 3] * 2,
        (Int64(0),) * 2,
        (Int32(0),) * 8,
        Float32(1.0),
        options=options,
    )
