"""Exact attention on a real-sized problem, with what this machine has.

Runs fa3 and plain PyTorch on the same inputs, measures both against the float64 oracle, and shows the memory that
each takes beside the N x N matrix of scores that fa3 never makes. On a Hopper GPU this is the hopper backend, on a
CPU the tiled one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fa3.cli.files import check_output, positive_integer

if TYPE_CHECKING:
    import torch

#: (batch, seqlen, heads, head dim): seconds on two CPU cores, and a GPU's worth of work.
CPU_SHAPE = (1, 4096, 8, 64)
GPU_SHAPE = (1, 16384, 16, 128)

#: Name of the picture.
PICTURE = "fa3-demo.png"

#: Calls timed after the first one; the best of them is shown.
REPEATS = {"cpu": 2, "cuda": 20}


@dataclass(frozen=True)
class Measured:
    """What one implementation did: time in ms, bytes it took at its peak, and its error against the oracle."""

    label: str
    ms: float
    extra_bytes: int
    errors: torch.Tensor
    max_error: float
    rmse: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fa3 demo``."""
    parser.add_argument("--shape", help="B,S,H,D (default: what this machine does in seconds)")
    parser.add_argument("--causal", action="store_true", help="causal mask")
    parser.add_argument("--png", type=Path, metavar="FILE", help=f"where the picture goes (default: {PICTURE})")


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """``B,S,H,D`` as four positive integers below 2**31."""
    numbers = [number for number in map(positive_integer, text.split(",")) if number is not None]
    if len(numbers) != 4 or text.count(",") != 3:
        raise ValueError(
            f"--shape {text!r}: expected four positive integers B,S,H,D below 2**31: batch, seqlen, heads, head dim"
        )
    batch, seqlen, heads, head_dim = numbers
    return batch, seqlen, heads, head_dim


def least_bytes(batch: int, seqlen: int, heads: int, head_dim: int) -> int:
    """Bytes that the demo takes at the least, at the peak of plain PyTorch.

    That holds scores and softmax in float32 at once, beside the inputs in bf16 and the oracle's out in float64.
    """
    return batch * heads * seqlen * (8 * seqlen + (3 * 2 + 8) * head_dim)


def _free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on the device, None where the system does not tell."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention as one writes it in PyTorch: scores and softmax in float32, probabilities in the inputs' dtype."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if causal:
        rows, keys = scores.shape[-2:]
        scores.masked_fill_(scores.new_ones(rows, keys).triu(keys - rows + 1).bool(), float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


class _Peak:
    """Bytes taken at the peak of a block of code, above what was there before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = 0

    def __enter__(self) -> _Peak:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            _reset_peak_resident()
            self._before = _resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _resident("VmHWM")
        self.bytes = max(0, peak - self._before)


def _reset_peak_resident() -> None:
    # Freed memory that the allocator keeps would hide what the call takes; musl and macOS have no malloc_trim.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    # 5 resets the high-water mark of this process; a kernel without it leaves the mark of before.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int:
    """Bytes of a field of /proc/self/status, 0 where there is none (not Linux)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


def measure(
    label: str,
    call: Callable[[], object],
    expected: torch.Tensor,
    device: torch.device,
    repeats: int,
) -> Measured:
    """Run ``call`` once for memory and error, then ``repeats`` times for the time."""
    import torch

    from fa3.cli.timing import synchronize

    with _Peak(device) as peak:
        out = call()
    assert isinstance(out, torch.Tensor)
    errors = (out.double() - expected).abs().flatten()
    del out
    times = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return Measured(
        label=label,
        ms=min(times),
        extra_bytes=peak.bytes,
        errors=errors.float().cpu(),
        max_error=errors.max().item(),
        rmse=errors.square().mean().sqrt().item(),
    )


def run(args: argparse.Namespace) -> int:
    """Run both, print the comparison, draw it. Returns 1 if fa3's error is more than twice plain PyTorch's."""
    import torch

    import fa3
    from fa3 import backends
    from fa3.cli import plots
    from fa3.cli.roofline import attention_flops
    from fa3.problem import check_forward

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, seqlen, heads, head_dim = (
        parse_shape(args.shape) if args.shape else GPU_SHAPE if device.type == "cuda" else CPU_SHAPE
    )
    picture: Path | None = args.png
    if picture is not None:
        plots.require()
    elif plots.available():
        picture = Path(PICTURE)
    if picture is not None:
        check_output("--png", picture)
    needed, free = least_bytes(batch, seqlen, heads, head_dim), _free_bytes(device)
    if free is not None and needed > free:
        raise ValueError(
            f"--shape {batch},{seqlen},{heads},{head_dim}: plain PyTorch, that the demo compares with, needs "
            f"{needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free: take a shorter sequence"
        )
    dtype = torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(batch, seqlen, heads, head_dim, generator=generator, device=device, dtype=dtype) for _ in range(3)
    )
    backend = backends.choose(check_forward(q, k, v, causal=args.causal), device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    mask = "causal" if args.causal else "full"
    shape = f"batch {batch}, {seqlen} tokens, {heads} heads of {head_dim}, bf16, {mask}"
    print(f"fa3 {backend} backend on {where}\n{shape}\n", flush=True)

    repeats = REPEATS[device.type]
    with torch.inference_mode():
        expected, _ = fa3.reference(q, k, v, causal=args.causal)
        ours = measure(
            f"fa3 ({backend})", lambda: fa3.flash_attn_func(q, k, v, causal=args.causal), expected, device, repeats
        )
        plain = measure("plain PyTorch", lambda: plain_attention(q, k, v, args.causal), expected, device, repeats)

    flops = attention_flops(
        batch=batch,
        heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        head_dim_v=head_dim,
        causal=args.causal,
    )
    print(f"{'':22}{'max error':>12}{'RMSE':>12}{'memory':>12}{'time':>12}{'TFLOPS':>9}")
    for measured in (ours, plain):
        print(
            f"{measured.label:22}{measured.max_error:12.2e}{measured.rmse:12.2e}"
            f"{measured.extra_bytes / 1e6:9,.0f} MB{measured.ms:9,.2f} ms{flops / measured.ms / 1e9:9.2f}"
        )
    matrix = batch * heads * seqlen * seqlen * 4
    print(f"\nThe N x N matrix of scores, never made by fa3: {matrix / 1e6:,.0f} MB in float32.")
    print("Errors are against float64 attention by its definition; memory is the peak of one call, output included.")
    if picture is not None:
        plots.save(plots.demo_figure(ours, plain, f"{where}: {shape}"), picture)
        print(f"picture: {picture}")
    else:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
    # One unit in the last place of the largest output, so that two roundings of the same value do not fail it.
    ulp = torch.finfo(dtype).eps * expected.abs().max().item()
    if ours.max_error > 2 * plain.max_error + ulp:
        print("fa3's error is more than twice that of plain PyTorch: something is wrong here", file=sys.stderr)
        return 1
    return 0
