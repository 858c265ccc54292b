"""The speed of FP8: attention beside the official kernel, the quantize pass beside a copy, and both with RoPE in front.

Attention: q, k and v are normally distributed and rounded to e4m3, all scales are 1, and everybody gets the same
numbers, ``fa3-bf16`` too. Quantization: bytes that are read and written once, over time, beside what a copy of as many
bytes on the device reaches in the same run. End to end: bf16 q, k and v, rotary embedding, attention; in PyTorch and
bf16, or by `fa3.flash_attn_fp8_func`, which rotates, quantizes and attends.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

import fa3
from fa3.cli import gradients
from fa3.cli.measure import Cell, Entrant, Row, enter, inputs, make_cell, measure_cell, warm_up
from fa3.cli.peers import Call, Impl, Prepare, official_function
from fa3.cli.timing import Sample, Sensors, burst, burst_calls, median, rounds
from fa3.e4m3 import INT8_MAX
from fa3.fp8_ops import quantize_tensor
from fa3.quantization import E4M3, QuantizedQKV, default_block, transposed

TOKENS, HIDDEN = 16384, 2048
HEAD_DIMS = (64, 128, 256)
SEQLENS = (1024, 2048, 4096, 8192, 16384)
#: Head dims that have shipped kernels for v in rows with a scale a head alone, and the length they are measured at.
OTHER_HEAD_DIMS, OTHER_SEQLEN = (96, 192), 4096
#: The length that attention is run at in steady state too, and that of the quantize pass.
STEADY_SEQLEN, QUANTIZE_SEQLEN = 16384, 4096

ROUNDS = 11
#: Seconds in front of a cell, and of the first one of a run.
WARM_UP_SECONDS, FIRST_WARM_UP_SECONDS = 0.2, 1.0
#: Sets of tensors that quantization goes round, 64 MiB each: the L2 cache never holds the next one.
SETS = 4

#: Largest norm of the difference from the first implementation's output, over the norm of that. Rounding of
#: probabilities to e4m3 alone makes 0.03, of q, k and v 0.05; what attends to other keys is off by 1.
AGREEMENT = 0.15

#: Base of the angles of the rotary embedding.
ROPE_BASE = 10000.0

#: Names of attention: what rows of that part hold, in the order of the tables.
ATTENTION = ("official", "fa3-rows", "fa3-transposed", "fa3-blocks", "fa3-int8", "fa3-two-level", "fa3-bf16")
#: Names of rows of the quantize pass: what is done to which tensor.
PASSES = ("q-blocks", "q-blocks-rope", "k-blocks-rope", "q-int8-rope", "v-rows", "v-transposed", "q-head", "copy")
#: Names of rows from bf16 q, k and v to out.
END_TO_END = ("bf16", "fp8", "fp8-one-level", "fp8-int8")

PARTS = ("attention", "quantize", "end-to-end")


@dataclass(frozen=True)
class Job:
    """One thing that is measured, and until which the time limit waits: a cell, in one of the `PARTS`."""

    part: str
    cell: Cell

    def __str__(self) -> str:
        return f"{self.part} {self.cell}"


def jobs(quick: bool = False) -> list[Job]:
    """All of a run; ``quick`` ones suit the tiled backend on a CPU, and are there to see that everything works."""
    if quick:
        cells = [make_cell(64, causal, 128, 256, 128) for causal in (False, True)]
        return [*(Job("attention", cell) for cell in cells), Job("quantize", cells[0]), Job("end-to-end", cells[1])]
    grid = [
        make_cell(head_dim, causal, seqlen, TOKENS, HIDDEN)
        for head_dim, causal, seqlen in itertools.product(HEAD_DIMS, (False, True), SEQLENS)
    ]
    others = [
        make_cell(head_dim, causal, OTHER_SEQLEN, TOKENS, HIDDEN)
        for head_dim, causal in itertools.product(OTHER_HEAD_DIMS, (False, True))
    ]
    passes = [make_cell(head_dim, False, QUANTIZE_SEQLEN, TOKENS, HIDDEN) for head_dim in HEAD_DIMS]
    return [
        *(Job("attention", cell) for cell in (*grid, *others)),
        *(Job("quantize", cell) for cell in passes),
        *(Job("end-to-end", cell) for cell in grid),
    ]


# Attention ----------------------------------------------------------------------------------------------------------


def e4m3_inputs(cell: Cell, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Sets of q, k, v that hold numbers of e4m3, in bf16, twice as large as the L2 cache where they are in e4m3."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return [
        tuple(torch.randn(shape, generator=generator, device=device).to(E4M3).bfloat16() for _ in range(3))
        for _ in range(max(1, min(8, math.ceil(2 * l2_bytes / (3 * math.prod(shape))))))
    ]


def _official(function: Callable[..., object]) -> Prepare:
    """Prepare of the official ``flash_attn_func``, with one scale a head, which is 1."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        q, k, v = (x.to(E4M3) for x in (q, k, v))
        ones = torch.ones(k.shape[0], k.shape[2], device=k.device)
        scales = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
        return lambda: function(q, k, v, causal=causal, **scales)

    return prepare


def of_ones(q: Tensor, k: Tensor, v: Tensor, v_layout: str, blocks: bool) -> QuantizedQKV:
    """q, k and v that hold numbers of e4m3, (batch, seqlen, heads, head_dim), with scales that all are 1."""
    block = default_block(q.shape[3]) if blocks else "head"

    def ones(x: Tensor, of_keys: int) -> Tensor:
        rows = () if isinstance(block, str) else (-(-x.shape[1] // block[of_keys]),)
        return torch.ones(x.shape[0], x.shape[2], *rows, device=x.device)

    k_scale = ones(k, 1)
    # As with default blocks: v has one for all of a head.
    v_scale = torch.ones(*k_scale.shape[:2], 1, device=v.device).expand_as(k_scale) if blocks else ones(v, 1)
    v8 = v.to(E4M3)
    return QuantizedQKV(
        q.to(E4M3), k.to(E4M3), transposed(v8) if v_layout == "transposed" else v8, ones(q, 0), k_scale, v_scale,
        v_scale.amax(dim=-1) if blocks else None, block, v_layout,
    )  # fmt: skip


def with_int8(x: QuantizedQKV) -> QuantizedQKV:
    """q and k, whose scales are 1, in int8: the nearest of 127 steps up to the largest of each tensor."""
    q_step, k_step = (tensor.float().abs().amax() / INT8_MAX for tensor in (x.q, x.k))
    q, k = ((tensor.float() / step).round().to(torch.int8) for tensor, step in ((x.q, q_step), (x.k, k_step)))
    return replace(x, q=q, k=k, q_scale=x.q_scale * q_step, k_scale=x.k_scale * k_step)


def _quantized(v_layout: str, blocks: bool, two_level: bool | None, int8: bool = False) -> Prepare:
    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        x = of_ones(q, k, v, v_layout, blocks)
        x = with_int8(x) if int8 else x
        return lambda: fa3.flash_attn_quantized_func(x, causal=causal, two_level=two_level)

    return prepare


def _bf16(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    return lambda: fa3.flash_attn_func(q, k, v, causal=causal)


def attention_impls(head_dim: int, official: Impl | None) -> list[Impl]:
    """Those of `ATTENTION` that there are at a head dim, ``official`` as it was found; of fa3, shipped kernels."""
    prepared: dict[str, Prepare] = {
        "fa3-rows": _quantized("row", False, False),
        "fa3-transposed": _quantized("transposed", False, False),
        "fa3-blocks": _quantized("transposed", True, False),
        "fa3-int8": _quantized("transposed", True, False, int8=True),
        "fa3-two-level": _quantized("transposed", False, True),
        "fa3-bf16": _bf16,
    }
    if head_dim in OTHER_HEAD_DIMS:
        prepared = {name: prepared[name] for name in ("fa3-rows", "fa3-bf16")}
    impls = [Impl(name, fa3.__version__, prepare) for name, prepare in prepared.items()]
    function = None if official is None else official_function()
    if official is None or function is None:
        return impls
    return [Impl("official", official.version, _official(function), official.context), *impls]


def _differs(impl: Impl, answer: Any, expected: Any, first: Impl) -> str | None:
    """How an output differs from that of the first one, if by more than rounding to e4m3 explains."""
    out, right = gradients.output_of(answer).float(), gradients.output_of(expected).float()
    error = ((out - right).norm() / right.norm()).item()
    # A comparison that NaN fails.
    return None if error <= AGREEMENT else f"{error:.3f} of the norm"


# End to end ---------------------------------------------------------------------------------------------------------


def rope_tables(positions: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of a rotary embedding, (positions, head_dim / 2), float32."""
    frequencies = ROPE_BASE ** (-2.0 * torch.arange(head_dim // 2, dtype=torch.float64, device=device) / head_dim)
    angles = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate_tokens(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of halves, in float32, back in the dtype of q: what the bf16 side does in front of attention.

    Args:
        q, k: (tokens, heads, head_dim), of all sequences one after the other.
        cos, sin: (tokens, head_dim / 2), as if they were one: then one compiled function serves all lengths.
        positions: (tokens,), of each token in its own.
    """
    cos, sin = cos[positions][:, None], sin[positions][:, None]

    def rotated(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    return rotated(q), rotated(k)


@dataclass
class Rotation:
    """`rotate_tokens`, compiled where that can be done; `name` says whether it was, once it was called."""

    device: torch.device
    notes: list[str]
    name: str = ""
    function: Callable[..., tuple[Tensor, Tensor]] = field(default=rotate_tokens)

    def choose(self, *tensors: Tensor) -> None:
        """Compile and call it once; where that fails, note why, and take PyTorch's operators one by one."""
        if self.name:
            return
        self.name = "PyTorch, one operator at a time"
        if self.device.type != "cuda":
            return  # compiling takes longer than the run
        try:
            compiled = torch.compile(rotate_tokens, dynamic=False)
            compiled(*tensors)
        except Exception as error:  # no C compiler, no Triton: it fails in many ways
            first_line = (str(error).strip().splitlines() or [""])[0]
            self.notes.append(f"rotary embedding not compiled: {type(error).__name__}: {first_line}")
            return
        self.function, self.name = compiled, "torch.compile"


def end_to_end_impls(rotation: Rotation) -> list[Impl]:
    """Those of `END_TO_END`."""

    def bf16(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        batch, seqlen, heads, head_dim = q.shape
        positions = torch.arange(seqlen, device=q.device).repeat(batch)
        angles = *rope_tables(batch * seqlen, head_dim, q.device), positions
        rows = q.view(-1, heads, head_dim), k.view(-1, heads, head_dim)
        rotation.choose(*rows, *angles)

        def call() -> object:
            q_rotated, k_rotated = rotation.function(*rows, *angles)
            return fa3.flash_attn_func(q_rotated.view(q.shape), k_rotated.view(k.shape), v, causal=causal)

        return call

    def fp8(two_level: bool | None, qk_dtype: Literal["e4m3", "int8"] = "e4m3") -> Prepare:
        def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
            rope = rope_tables(q.shape[1], q.shape[3], q.device)
            return lambda: fa3.flash_attn_fp8_func(
                q, k, v, causal=causal, rope=rope, two_level=two_level, qk_dtype=qk_dtype
            )

        return prepare

    calls = {"bf16": bf16, "fp8": fp8(None), "fp8-one-level": fp8(False), "fp8-int8": fp8(None, "int8")}
    return [Impl(name, fa3.__version__, call) for name, call in calls.items()]


# The quantize pass --------------------------------------------------------------------------------------------------


def _keeping(function: Callable[[], Any]) -> Call:
    """A call that keeps its last result until the next is there, so that results of a round lie in other memory."""
    kept: list[Any] = []

    def call() -> object:
        kept[:] = [function()]
        return kept[0]

    return call


def quantize_passes(cell: Cell, device: torch.device) -> dict[str, tuple[list[Call], int]]:
    """Name of a pass -> its calls, one for each set of tensors, and the bytes that each must read and write."""
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(SETS)]
    rope = rope_tables(cell.seqlen, cell.head_dim, device)
    of_q, of_k = default_block(cell.head_dim)
    plain: dict[str, Any] = {
        "seed": 0, "rope": None, "interleaved": False, "first_position": 0, "rotate": False, "transpose": False,
        "power_of_two": False, "out": "e4m3",
    }  # fmt: skip
    options: dict[str, dict[str, Any]] = {
        "q-blocks": {"rows": of_q, "rotate": True},
        "q-blocks-rope": {"rows": of_q, "rotate": True, "rope": rope},
        "k-blocks-rope": {"rows": of_k, "rotate": True, "rope": rope},
        "q-int8-rope": {"rows": of_q, "rotate": True, "rope": rope, "out": "int8"},
        "v-rows": {"rows": of_k, "power_of_two": True},
        "v-transposed": {"rows": of_k, "power_of_two": True, "transpose": True},
        "q-head": {"rows": "head", "rotate": True},
    }
    passes = {}
    for name, given in options.items():
        calls = [_keeping(lambda x=x, given=given: quantize_tensor(x, **{**plain, **given})) for x in tensors]  # type: ignore[misc]
        values, scale = quantize_tensor(tensors[0], **{**plain, **given})
        tables = rope if given.get("rope") else ()
        passes[name] = calls, sum(x.nbytes for x in (tensors[0], values, scale, *tables))
    # It reads one half and writes the other.
    half = passes["q-blocks"][1] // 2
    sources = [torch.zeros(half, device=device, dtype=torch.uint8) for _ in range(SETS)]
    passes["copy"] = [_keeping(source.clone) for source in sources], 2 * half
    return passes


def measure_quantize(
    cell: Cell, device: torch.device, sensors: Sensors, burst_rounds: int, seconds: float
) -> list[Row]:
    """A row for each of `PASSES`, interleaved in bursts; ``of_copy`` is its share of the bytes a second of the copy."""
    passes = quantize_passes(cell, device)
    entrants = [Entrant(Impl(name, fa3.__version__, _bf16), calls, 0.0) for name, (calls, _) in passes.items()]
    warm_up(entrants, device, seconds)
    counts = [burst_calls(burst(device, entrant.calls, 3).ms) for entrant in entrants]
    samples: list[list[Sample]] = [[] for _ in entrants]
    for index in rounds(burst_rounds, len(entrants)):
        samples[index].append(burst(device, entrants[index].calls, counts[index], sensors))
    medians = {name: median(taken) for name, taken in zip(passes, samples, strict=True)}
    speed = {name: passes[name][1] / sample.ms / 1e6 for name, sample in medians.items()}
    return [
        {
            "part": "quantize",
            "impl": name,
            "dtype": "bf16",
            "d": cell.head_dim,
            "b": cell.batch,
            "s": cell.seqlen,
            "h": cell.heads,
            "ms": round(sample.ms, 5),
            "bytes": passes[name][1],
            "gb_per_s": round(speed[name], 3),
            "of_copy": round(speed[name] / speed["copy"], 3),
            "clock_mhz": sample.clock_mhz,
            "regime": "burst",
        }
        for name, sample in medians.items()
    ]


# The run ------------------------------------------------------------------------------------------------------------


def measure(
    device: torch.device,
    wanted: Iterable[Job],
    impls: Sequence[Impl],
    sensors: Sensors,
    result: Row,
    quick: bool = False,
) -> Iterator[list[Row]]:
    """Rows of each job in turn.

    ``impls``: where the official kernel is there, one of them is ``official``. ``result["notes"]`` gets what could not
    be computed and what differs, ``result["rope"]`` what the bf16 side rotates by.
    """
    notes, first = result["notes"], True
    rotation = Rotation(device, notes)
    official = next((impl for impl in impls if impl.name == "official"), None)
    burst_rounds = 2 if quick else ROUNDS
    for job in wanted:
        cell = job.cell
        seconds = 0.0 if quick else FIRST_WARM_UP_SECONDS if first else WARM_UP_SECONDS
        first = False
        if job.part == "quantize":
            yield measure_quantize(cell, device, sensors, burst_rounds, seconds)
            continue
        if job.part == "attention":
            found, tensors = attention_impls(cell.head_dim, official), e4m3_inputs(cell, device)
        else:
            found, tensors = end_to_end_impls(rotation), inputs(cell, torch.bfloat16, device)
        entrants = enter([(impl, None) for impl in found], cell, tensors, device, notes, _differs)
        if not entrants:
            continue
        warm_up(entrants, device, seconds)
        steady_rounds = int(job.part == "attention" and cell.seqlen == STEADY_SEQLEN and not quick)
        rows = measure_cell(
            entrants, cell, "e4m3", device, sensors, burst_rounds=burst_rounds, steady_rounds=steady_rounds
        )
        if rotation.name:
            result["rope"] = rotation.name
        yield [{"part": job.part, **row} for row in _with_speed(rows)]


def _with_speed(rows: list[Row]) -> list[Row]:
    """Rows of a cell with the dtype that each computes in, and their speed as a multiple of that of the reference.

    That is the official kernel, end to end bf16; ``None`` where it was not measured.
    """
    times = {(row["impl"], row["regime"]): row["ms"] for row in rows}
    named = []
    for row in rows:
        ends = row["impl"] in END_TO_END
        reference = times.get(("bf16" if ends else "official", row["regime"]))
        speed = None if reference is None else round(reference / row["ms"], 4)
        dtype = "bf16" if row["impl"].endswith("bf16") else "e4m3"
        named.append({**row, "dtype": dtype, "to_bf16" if ends else "to_official": speed})
    return named


def describe(rows: list[Row]) -> str:
    """One line: what was measured, and of each row its time and what it comes to."""
    first = rows[0]
    if first["part"] == "quantize":
        texts = [f"{row['impl']} {row['ms'] * 1e3:.1f} us {row['of_copy']:.2f}" for row in rows]
        return f"quantize {first['d']}-{first['s']}, share of a copy's bytes a second: {'  '.join(texts)}"
    texts = []
    for row in rows:
        ratio = row.get("to_official", row.get("to_bf16"))
        lead = "" if ratio is None else f" x{ratio:.3f}"
        watts = "" if row["watts"] is None else f" {row['watts']:.0f} W"
        clock = "" if row["clock_mhz"] is None else f" {row['clock_mhz']:.0f} MHz"
        steady = " steady" if row["regime"] == "steady" else ""
        texts.append(f"{row['impl']}{steady} {row['ms']:.3f} ms {row['tflops']:.4g} TFLOPS{clock}{watts}{lead}")
    return f"{first['part']} {first['d']}-{'causal' if first['causal'] else 'full'}-{first['s']}: {'  '.join(texts)}"


def summary(rows: list[Row]) -> str:
    """Geometric means of all bursts of attention and end to end: speed as a multiple of the reference's."""
    texts = []
    ratios = [(name, "to_official") for name in ATTENTION[1:]] + [(name, "to_bf16") for name in END_TO_END[1:]]
    for name, ratio in ratios:
        found = [row[ratio] for row in rows if row["impl"] == name and row["regime"] == "burst" and row.get(ratio)]
        if found:
            mean = statistics.geometric_mean(found)
            texts.append(f"{name} x{mean:.3f} {'official' if ratio == 'to_official' else 'bf16'} ({len(found)} cells)")
    return "geometric means: " + ", ".join(texts)
