"""PTX that the DSL has no word for."""

import cutlass.cute as cute
from cutlass import Float32


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
