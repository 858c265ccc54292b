"""The plan of quantization: from the shape of q, k or v and what to do with it to its kernels and their launch.

Pure Python and pure arithmetic, as `fa3.plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fa3.plan import MAX_GRID, DeviceFacts
from fa3.quantization import default_block
from fa3.spec import FP8, HALF_OF_THREADS, INT8, QuantizeSpec

#: Rows of a thread block where all rows of a head share a scale.
ROWS = 128

#: Most thread blocks for the rows of a head, and batch entries, of a launch.
MAX_ROW_BLOCKS = MAX_BATCH = MAX_GRID

#: Heads whose rows one thread block embeds, with cos and sin that it reads once; and of 96 rows, which make small
#: thread blocks. Fewer where multiprocessors would have less than `FULL` of the threads that they have registers for,
#: those of two of the largest thread blocks.
ROPE_HEADS, ROPE_HEADS_OF_96, FULL = 16, 4, 0.9

#: Head dims that ship.
HEAD_DIMS = (64, 96, 128, 192, 256)


@dataclass(frozen=True)
class QuantizePlan:
    """What `plan_quantize` decided.

    Attributes:
        spec: the kernel that writes values and scales.
        amax: the kernel before it that finds the amax of each head; ``None`` where each block has its own scale.
        heads_per_block: heads whose rows one thread block quantizes, one after the other.
    """

    spec: QuantizeSpec
    amax: QuantizeSpec | None
    heads_per_block: int


def plan_quantize(
    *,
    dtype: str,
    batch: int,
    seqlen: int,
    heads: int,
    head_dim: int,
    rows: int | str,
    rotate: bool,
    rope: str,
    interleaved: bool,
    transpose: bool,
    facts: DeviceFacts,
    power_of_two: bool = False,
    out: str = FP8,
) -> QuantizePlan:
    """Choose kernels for one tensor.

    Args:
        dtype, head_dim, rotate, rope, interleaved, transpose, power_of_two, out: as of `fa3.spec.QuantizeSpec`.
        batch, seqlen, heads: of the tensor, none 0.
        rows: rows that share a scale, 64, 96 or 128, or ``"head"`` or ``"tensor"``.
        facts: of the device.

    Raises:
        ValueError: no kernel does this, or not for so many rows.
    """
    own_scales = isinstance(rows, int)
    spec = QuantizeSpec(
        dtype=dtype,
        head_dim=head_dim,
        rows=rows if isinstance(rows, int) else ROWS,
        rotate=rotate,
        rope=rope,
        interleaved=interleaved and bool(rope),
        transpose=transpose,
        scales="block" if own_scales else "given",
        power_of_two=power_of_two,
        out=out,
    )
    spec.validate()
    amax = None if own_scales else replace(spec, scales="amax", transpose=False, power_of_two=False)
    row_blocks = -(-seqlen // spec.rows)
    most = MAX_ROW_BLOCKS // max(spec.split, amax.split if amax else 1)
    if row_blocks > most:
        raise ValueError(f"seqlen={seqlen}: at most {most * spec.rows} rows are quantized at once")
    if batch > MAX_BATCH:
        raise ValueError(f"batch={batch}: at most {MAX_BATCH}; split it")
    heads_per_block = 1
    if rope:
        most = min(ROPE_HEADS_OF_96 if spec.rows == 96 else ROPE_HEADS, heads)
        threads = row_blocks * spec.split * batch * spec.threads
        while most > 1 and threads * -(-heads // most) < FULL * 2 * HALF_OF_THREADS * facts.sm_count:
            most -= 1
        # As even as so many thread blocks can have them.
        heads_per_block = -(-heads // -(-heads // most))
    return QuantizePlan(spec, amax, heads_per_block)


def quantize_specs() -> Iterator[QuantizeSpec]:
    """The kernels that ship; others are compiled when first asked for.

    Of bf16: a scale for each block of `default_block` of q and k, rotated, without and with a rotary embedding of
    halves; of v in rows and transposed a scale for each head; at the usual head dims q and k in int8 as well, and of v
    a scale for each block, and of q and k for each head, without an embedding.
    """
    for head_dim in HEAD_DIMS:
        blocks = default_block(head_dim), default_block(head_dim, two_level=True)
        for rows in sorted({rows for block in blocks for rows in block}):
            rotated = QuantizeSpec("bf16", head_dim, rows, rotate=True)
            for out in (FP8, INT8) if head_dim in (64, 128, 256) else (FP8,):
                yield replace(rotated, out=out)
                yield replace(rotated, out=out, rope="fp32")
        of_v = QuantizeSpec("bf16", head_dim, scales="given")
        yield from (replace(of_v, scales="amax"), of_v, replace(of_v, transpose=True))
    for head_dim in (64, 128, 256):
        for scales in ("amax", "given"):
            yield QuantizeSpec("bf16", head_dim, rotate=True, scales=scales)
        for transpose in (False, True):
            rows = default_block(head_dim)[1]
            yield QuantizeSpec("bf16", head_dim, rows, transpose=transpose, power_of_two=True)
    yield QuantizeSpec("bf16", 128, rotate=True, rope="same")
    for rows in sorted({*default_block(128)}):
        yield QuantizeSpec("fp16", 128, rows, rotate=True)
    of_v = QuantizeSpec("fp16", 128, scales="given")
    yield from (replace(of_v, scales="amax"), of_v, replace(of_v, transpose=True))
