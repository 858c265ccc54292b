"""Device code of the toy kernel: the DSL wants real source files without postponed annotations."""

import cutlass
import cutlass.cute as cute


@cute.kernel
def scale_kernel(
    src: cute.Pointer, dst: cute.Pointer, n: cutlass.Int32, factor: cutlass.Float32, threads: cutlass.Constexpr
):
    index = cute.arch.block_idx()[0] * threads + cute.arch.thread_idx()[0]
    if index < n:
        source = cute.make_tensor(src, cute.make_layout(n))
        target = cute.make_tensor(dst, cute.make_layout(n))
        target[index] = source[index] * factor


@cute.jit
def scale(
    src: cutlass.Int64,
    dst: cutlass.Int64,
    n: cutlass.Int32,
    factor: cutlass.Float32,
    threads: cutlass.Constexpr,
    stream,
):
    source = cute.make_ptr(cutlass.Float32, src, cute.AddressSpace.gmem, assumed_align=4)
    target = cute.make_ptr(cutlass.Float32, dst, cute.AddressSpace.gmem, assumed_align=4)
    scale_kernel(source, target, n, factor, threads).launch(
        grid=((n + threads - 1) // threads, 1, 1), block=(threads, 1, 1), stream=stream
    )
