"""The quantize kernel on the host: its own functions thread by thread, and what threads exchange through a table.

Every pointer is the address of a contiguous CPU tensor. Functions of the DSL must stand in a real file.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from brick_wrappers import table
from e4m3_on_host import pack_four
from fa3.kernels.parts import rotation
from fa3.kernels.quantize import Block, Call, QuantizeKernel


@cute.jit
def round_to_e4m3(values_address: Int64, out_address: Int64, count: Int32):
    """values (4 count,) float32 -> out (count,) words."""
    values, out = table(values_address, Float32, (4 * count,)), table(out_address, Int32, (count,))
    for i in cutlass.range(count, unroll=1):
        out[i] = pack_four(*(values[4 * i + n] for n in range(4)))


@cute.jit
def signs_of_columns(words_address: Int64, out_address: Int64, spec: cutlass.Constexpr):
    """words (8,) -> out (2, head_dim): a row of ones with its signs, by `flip` and by `mask_of_pair`."""
    given = table(words_address, Int32, (8,))
    words = tuple(given[i] for i in range(8))
    out = table(out_address, Float32, (2, spec.head_dim))
    for thread in cutlass.range(spec.across, unroll=1):
        for i in cutlass.range_constexpr(spec.held // spec.piece):
            signs = rotation.signs_of_piece(words, i, thread, spec.across, spec.piece)
            first = spec.piece * (i * spec.across + thread)
            for column in cutlass.range_constexpr(spec.piece):
                out[0, first + column] = rotation.flip(Float32(1.0), signs, column)
            for index in cutlass.range_constexpr(spec.piece // 2):
                pair = cute.make_rmem_tensor(2, Int32)
                pair[0] = Int32(0x3F803F80) ^ rotation.mask_of_pair(signs, index)
                both = cute.recast_tensor(pair, cutlass.BFloat16)
                out[1, first + 2 * index] = Float32(both[0])
                out[1, first + 2 * index + 1] = Float32(both[1])


@cute.jit
def inverses(values_address: Int64, out_address: Int64, count: Int32, error: Float32, numerator: cutlass.Constexpr):
    """values (count,) -> out (count,): ``numerator`` over each, from reciprocals that are ``error`` off."""
    values, out = table(values_address, Float32, (count,)), table(out_address, Float32, (count,))
    for i in cutlass.range(count, unroll=1):
        out[i] = rotation.inverse_of(values[i], lambda x: (Float32(1.0) + error) / x, numerator)


@cute.jit
def quantize(
    addresses: Int64,
    sizes_address: Int64,
    words_address: Int64,
    scratch: Int64,
    factor: Float32,
    spec: cutlass.Constexpr,
):
    """All that the kernel does for a tensor, the rows that share a scale one after the other.

    addresses (6) int64: x, out, scale, amax, cos, sin. sizes (13): batch, seqlen, heads, first position, heads per
    block (all), strides of x, out and amax. words (8): signs. scratch: (2, split * threads, values) float32.
    """
    of_tensors = table(addresses, Int64, (6,))
    sizes, given = table(sizes_address, Int32, (13,)), table(words_address, Int32, (8,))
    call = Call(
        *(of_tensors[i] for i in range(6)),
        sizes[1],
        sizes[2],
        sizes[3],
        tuple(Int64(sizes[i]) for i in range(5, 8)),
        tuple(Int64(sizes[i]) for i in range(8, 11)),
        tuple(Int64(sizes[i]) for i in range(11, 13)),
        factor,
    )
    OnHost(spec).all_blocks(call, sizes[0], tuple(given[i] for i in range(8)), scratch)


class OnHost(QuantizeKernel):
    """The kernel with a loop in the place of threads."""

    @cute.jit
    def all_blocks(self, call: Call, batch: Int32, signs: tuple, scratch: Int64):
        row_blocks = (call.seqlen + self.spec.rows - 1) // self.spec.rows
        for index in cutlass.range(batch * row_blocks * call.heads, unroll=1):
            self.one_block(call, index, row_blocks, signs, scratch)

    @cute.jit
    def block_of(self, call: Call, index: Int32, row_blocks: Int32, part: Int32) -> Block:
        rest = index // call.heads
        number = rest % row_blocks * self.spec.split + part
        return self.first_block(call, rest // row_blocks, index % call.heads, number)

    @cute.jit
    def one_block(self, call: Call, index: Int32, row_blocks: Int32, signs: tuple, scratch: Int64):
        """All thread blocks of one block of rows: thread t is number t % threads of the thread block t // threads."""
        threads = self.spec.threads
        shared = table(scratch, Float32, (2, self.spec.split * threads, self.values))
        for number in cutlass.range(self.spec.split * threads, unroll=1):
            block, thread = self.block_of(call, index, row_blocks, number // threads), number % threads
            raw = cute.make_rmem_tensor((8, self.values // 8), self.dtype)
            raw.fill(0.0)
            self.load(call, block, thread, call.seqlen, raw)
            flips, angles = self.flips_of(signs, thread), None
            if const_expr(self.spec.rope):
                angles = self.load_angles(call, block, thread, flips)
                flips = self.angles.flips_of_second(flips)
            self.keep(shared, 0, number, self.first_values(raw, angles, flips))
        if const_expr(self.spec.rotate):
            for stage in cutlass.range_constexpr(len(self.stages)):
                for number in cutlass.range(self.spec.split * threads, unroll=1):
                    self.keep(shared, (stage + 1) % 2, number, self.after_stage(shared, stage, number))
        last = len(self.stages) % 2 if self.spec.rotate else 0
        amax = Float32(0.0)
        for number in cutlass.range(self.spec.split * threads, unroll=1):
            values = self.kept(shared, last, number)
            amax = cute.arch.fmax(amax, self.largest_of_thread(values), nan=True)
            self.keep(shared, last, number, values)
        if const_expr(self.spec.scales == "amax"):
            of_head = self.float32(self.block_of(call, index, row_blocks, 0).amax)
            of_head[0] = cute.arch.fmax(of_head[0], amax, nan=True)
        else:
            if const_expr(self.spec.scales == "given"):
                amax = self.float32(self.block_of(call, index, row_blocks, 0).amax)[0]
            for number in cutlass.range(self.spec.split * threads, unroll=1):
                block = self.block_of(call, index, row_blocks, number // threads)
                self.round_and_store(call, block, number % threads, self.kept(shared, last, number), amax)

    @cute.jit
    def after_stage(self, shared: cute.Tensor, stage: cutlass.Constexpr, thread: Int32) -> cute.Tensor:
        """The thread's values after one stage of the Hadamard transform."""
        kind, stride = self.stages[stage]
        values = self.kept(shared, stage % 2, thread)
        if const_expr(kind == "inside"):
            rotation.butterflies(values, stride)
        else:
            theirs, sign = self.kept(shared, stage % 2, thread ^ stride), rotation.sign_of(thread, stride)
            for i in cutlass.range_constexpr(self.values):
                values[i] = rotation.sum_or_difference(values[i], theirs[i], sign)
        return values

    @cute.jit
    def keep(self, shared: cute.Tensor, buffer: cutlass.Constexpr, thread: Int32, values: cute.Tensor):
        for i in cutlass.range_constexpr(self.values):
            shared[buffer, thread, i] = values[i]

    @cute.jit
    def kept(self, shared: cute.Tensor, buffer: cutlass.Constexpr, thread: Int32) -> cute.Tensor:
        values = cute.make_rmem_tensor(self.values, Float32)
        for i in cutlass.range_constexpr(self.values):
            values[i] = shared[buffer, thread, i]
        return values
