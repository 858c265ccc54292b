"""PTX that the DSL has no word for."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


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


def pack_pair(low: Float32, high: Float32, dtype: type[cutlass.Numeric]) -> Int32:
    """Round two float32 to fp16 or bf16, to nearest even, ``low`` in the lower half of the result.

    Written as PTX because the optimizer moves a conversion behind the join of a loop, and the loop then
    carries twice as many registers.
    """
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Int32], read_only_args=[low, high]
    )
