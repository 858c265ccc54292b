"""PTX that the DSL has no word for."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


def keep_before_here(nonnegative: Float32):
    """Keep all that ``nonnegative`` was computed from above this point of the program.

    ptxas moves arithmetic freely across the wait for a WGMMA group, and likes to wait first: then the
    softmax no longer runs under the product, and nothing says so. It does not move memory operations
    across the wait, so a predicated store that depends on the value pins it. The value must never be
    negative (a row sum is not; NaN passes), so that the store is never executed.
    """
    cute.arch.inline_ptx(
        "{\n.reg .pred is_negative;\n"
        "setp.lt.f32 is_negative, {$r0}, 0f00000000;\n"
        ".reg .b32 nowhere;\n"
        "mov.b32 nowhere, 0;\n"
        "@is_negative st.volatile.shared.f32 [nowhere], {$r0};\n}",
        read_only_args=[nonnegative],
    )


def keep_words_before_here(words: Int32):
    """The same for words of e4m3 that are not negative: the sign bit of ``words`` is never set."""
    cute.arch.inline_ptx(
        "{\n.reg .pred is_negative;\n"
        "setp.lt.s32 is_negative, {$r0}, 0;\n"
        ".reg .b32 nowhere;\n"
        "mov.b32 nowhere, 0;\n"
        "@is_negative st.volatile.shared.b32 [nowhere], {$r0};\n}",
        read_only_args=[words],
    )


def pack_pair(low: Float32, high: Float32, dtype: type[cutlass.Numeric]) -> Int32:
    """Round two float32 to fp16 or bf16, to nearest even, ``low`` in the lower half of the result.

    Written as PTX because the optimizer moves a conversion behind the join of a loop, and the loop then
    carries twice as many registers.
    """
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Int32], read_only_args=[low, high]
    )


def pack_four(first: Float32, second: Float32, third: Float32, fourth: Float32) -> Int32:
    """Round four float32 to e4m3, to nearest even, saturating at 448; ``first`` in the lowest byte.

    NaN stays NaN. Infinities saturate too: one that shall be NaN must be so before.
    """
    return cute.arch.inline_ptx(
        "{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};\n"
        "mov.b32 {$w0}, {low, high};\n}",
        write_only_types=[Int32],
        read_only_args=[first, second, third, fourth],
    )


def pack_low_bytes(first: Float32, second: Float32, third: Float32, fourth: Float32) -> Int32:
    """The lowest byte of the bits of each of four float32; ``first`` in the lowest byte."""
    first, second, third, fourth = (x.bitcast(Int32) for x in (first, second, third, fourth))
    low, high = Int32(cute.arch.prmt(first, second, 0x0040)), Int32(cute.arch.prmt(third, fourth, 0x0040))
    return Int32(cute.arch.prmt(low, high, 0x5410))


def load_matrices_transposed(address: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Four 8x8 matrices of 16-bit elements from shared memory, each transposed: one word of each.

    Lane l gives the address of row ``l % 8`` of matrix ``l // 8``, and gets of each matrix the elements of column
    ``l // 4`` in rows ``2 * (l % 4)`` and that plus 1. Called by one whole warp.
    """
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def store_pair(address: Int32, first: Int32, second: Int32):
    """Two words to shared memory; the address is a multiple of 8 bytes."""
    cute.arch.inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def store_matrices(address: Int32, first: Int32, second: Int32, third: Int32, fourth: Int32):
    """Four 8x8 matrices of 16-bit elements to shared memory.

    Lane l gives the address of row ``l % 8`` of matrix ``l // 8``, and of each matrix row ``l // 4``, columns
    ``2 * (l % 4)`` and that plus 1. Called by one whole warp.
    """
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, first, second, third, fourth],
    )


def unpack(pair: Int32, half: int, dtype: type[cutlass.Numeric]) -> Float32:
    """Widen the lower (0) or upper (1) half of a pair of fp16 or bf16 to float32."""
    if dtype is cutlass.BFloat16:
        # The bits of a bf16 are the upper half of those of a float32.
        code = "shl.b32 {$w0}, {$r0}, 16;" if half == 0 else "and.b32 {$w0}, {$r0}, 0xffff0000;"
        bits = cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=[pair])
        return bits.bitcast(Float32)
    code = (
        f"{{\n.reg .b16 low, high;\nmov.b32 {{low, high}}, {{$r0}};\ncvt.f32.f16 {{$w0}}, {('low', 'high')[half]};\n}}"
    )
    return cute.arch.inline_ptx(code, write_only_types=[Float32], read_only_args=[pair])


@cute.jit
def has_completed(barrier: cute.Pointer, parity: Int32) -> Int32:
    """1 if the phase of this parity of an mbarrier is over, else 0; waits for nothing."""
    return cute.arch.inline_ptx(
        "{\n.reg .pred over;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 over, [{$r0}], {$r1};\n"
        "selp.s32 {$w0}, 1, 0, over;\n}",
        write_only_types=[Int32],
        read_only_args=[Int32(barrier.toint()), parity],
    )


@cute.jit
def load_acquire(address: Int64) -> Int32:
    """Read an int32 of global memory; what another block wrote before its release of this value is then visible."""
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


@cute.jit
def claim(address: Int64) -> Int32:
    """Make an int32 of global memory 1 if it is 0; returns what it was."""
    return cute.arch.inline_ptx(
        "atom.acquire.gpu.global.cas.b32 {$w0}, [{$r0}], 0, 1;", write_only_types=[Int32], read_only_args=[address]
    )


@cute.jit
def store_release(address: Int64, value: Int32):
    """Write an int32 of global memory, after all that this thread has seen done."""
    cute.arch.inline_ptx("st.release.gpu.global.s32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def store_bulk(target: Int64, source: Int32, size: cutlass.Constexpr):
    """Start copying ``size`` bytes of shared memory to global memory; both addresses aligned to 16 bytes.

    Called by one thread, which commits and waits for the group of copies that this becomes part of.
    """
    cute.arch.inline_ptx(
        f"cp.async.bulk.global.shared::cta.bulk_group [{{$r0}}], [{{$r1}}], {size};", read_only_args=[target, source]
    )


@cute.jit
def add_bulk(target: Int64, source: Int32, size: cutlass.Constexpr):
    """Start adding ``size`` bytes of float32 in shared memory to global memory, as `store_bulk` stores."""
    cute.arch.inline_ptx(
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{{$r0}}], [{{$r1}}], {size};",
        read_only_args=[target, source],
    )
