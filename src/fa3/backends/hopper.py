"""The hopper backend: fa3's own kernels on GPUs of compute capability 9.0.

The only place that launches. Everything that depends on shapes, strides, dtypes and options alone is worked
out once and kept; a repeated call looks up one key, allocates its outputs and launches. It never synchronizes
and takes no device memory beyond the outputs, 64 bytes for the scheduler of each stream, and the documented
copies: an input whose address is not a multiple of 16 bytes, or one of whose batch, row and head strides is
not, is copied, since TMA cannot read it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa3 import plan as planning
from fa3.compiler.store import default_store
from fa3.plan import DeviceFacts
from fa3.problem import Problem, check_forward
from fa3.spec import TMA_ALIGNMENT, ForwardSpec

#: TMA strides are below 2**40 bytes, sizes at most 2**32; the kernel counts rows in int32.
MAX_STRIDE_BYTES = 2**40
MAX_SEQLEN = 2**31 - 256
MAX_TILES = 2**31 - 2**16

#: Device memory of the scheduler: one counter, in a line of its own.
COUNTER_BYTES = 64

#: CUDA's handle of the per-thread default stream.
PER_THREAD_STREAM = 2

#: Launches remembered before the memory is cleared; a server with ever new lengths must not grow forever.
MAX_REMEMBERED = 8192


@dataclass(slots=True)
class _Launch:
    """All of a call that does not change while shapes, strides, dtype, device and options stay the same."""

    function: Callable[..., Any] | None
    arguments: tuple[Any, ...]
    out_shape: tuple[int, int, int, int]
    lse_shape: tuple[int, int, int]
    copy: tuple[bool, bool, bool]
    device: int


_launches: dict[Any, _Launch] = {}
_streams: dict[tuple[int, int], tuple[ctypes.c_void_p, Tensor, int]] = {}
_facts: dict[int, DeviceFacts] = {}

# A CPU build of torch has neither; nobody calls them there.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a GPU, asked once."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index not in _facts:
        properties = torch.cuda.get_device_properties(index)
        _facts[index] = DeviceFacts(
            name=properties.name,
            sm_count=properties.multi_processor_count,
            l2_bytes=properties.L2_cache_size,
        )
    return _facts[index]


def forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention on a Hopper GPU; shapes as `fa3.flash_attn_func`.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in q's dtype, contiguous, and LSE (batch, heads_q, seqlen_q)
        in float32, or ``None`` unless ``return_lse``.

    Raises:
        ValueError, TypeError: the arguments do not fit, see `fa3.problem.check_forward`.
        NotImplementedError: no kernel exists for this problem yet.
        CompileError, StoreError: the kernel is not in the store and cannot be compiled here.
    """
    key = _key(q, k, v, softmax_scale, causal)
    launch = _launches.get(key)
    if launch is None:
        launch = _remember(key, _prepare(q, k, v, softmax_scale, causal, None))
    return _run(launch, q, k, v, return_lse)


def forward_with_spec(
    spec: ForwardSpec, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """As `forward`, by the kernel of a given spec: for tests, sweeps and ablations.

    Raises:
        ValueError: the spec is for another dtype or head dim.
    """
    key = (spec, *_key(q, k, v, softmax_scale, spec.causal))
    launch = _launches.get(key)
    if launch is None:
        launch = _remember(key, _prepare(q, k, v, softmax_scale, spec.causal, spec))
    return _run(launch, q, k, v, return_lse)


def _key(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool) -> tuple[Any, ...]:
    """All that a launch depends on, addresses aside."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), softmax_scale, causal,
    )  # fmt: skip


def _remember(key: Any, launch: _Launch) -> _Launch:
    if len(_launches) >= MAX_REMEMBERED:
        _launches.clear()
    _launches[key] = launch
    return launch


def _run(launch: _Launch, q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    out = q.new_empty(launch.out_shape)
    lse = q.new_empty(launch.lse_shape, dtype=torch.float32) if return_lse else None
    function = launch.function
    if function is None:
        # No key at all, or nothing to compute: a softmax over the empty set gives 0 and -inf.
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return out, lse

    copy_q, copy_k, copy_v = launch.copy
    q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if copy_q or q_address % TMA_ALIGNMENT:
        q = q.clone(memory_format=torch.contiguous_format)
        q_address, copy_q = q.data_ptr(), True
    if copy_k or k_address % TMA_ALIGNMENT:
        k = k.clone(memory_format=torch.contiguous_format)
        k_address, copy_k = k.data_ptr(), True
    if copy_v or v_address % TMA_ALIGNMENT:
        v = v.clone(memory_format=torch.contiguous_format)
        v_address, copy_v = v.data_ptr(), True
    arguments = launch.arguments
    if (copy_q, copy_k, copy_v) != launch.copy:
        # The same shapes and strides at an unaligned address: the copies have strides of their own.
        sizes, strides, rest = arguments[:7], list(arguments[7:19]), arguments[19:]
        for place, tensor, copied in ((0, q, copy_q), (3, k, copy_k), (6, v, copy_v)):
            if copied:
                strides[place : place + 3] = _strides(tensor)
        arguments = (*sizes, *strides, *rest)

    addresses = (q_address, k_address, v_address, out.data_ptr(), 0 if lse is None else lse.data_ptr())
    if _current_device() == launch.device:
        _enqueue(function, addresses, launch.device, arguments)
    else:
        with torch.cuda.device(launch.device):
            _enqueue(function, addresses, launch.device, arguments)
    return out, lse


def _enqueue(function: Callable[..., Any], addresses: tuple[int, ...], device: int, arguments: tuple[Any, ...]) -> None:
    """Launch on the framework's current stream of the current device.

    The scheduler's counter is 0 between launches. Launches on one stream follow each other and share one. Those
    in a captured graph get their own, zeroed by the graph, since a graph may be replayed on any stream; and those
    on the per-thread default stream do, since its handle means another stream in each thread. A handle of a stream
    made outside PyTorch must not be destroyed, and its number come back for a new one, while a call still runs.
    """
    raw = _current_stream(device)
    if raw == PER_THREAD_STREAM or _capturing():
        counter = torch.zeros(COUNTER_BYTES // 4, dtype=torch.int32, device=device)
        function(*addresses, counter.data_ptr(), ctypes.c_void_p(raw), *arguments)
        return
    known = _streams.get((device, raw))
    if known is None:
        counter = torch.zeros(COUNTER_BYTES // 4, dtype=torch.int32, device=device)
        if len(_streams) >= MAX_REMEMBERED:
            _streams.clear()
        known = _streams[device, raw] = (ctypes.c_void_p(raw), counter, counter.data_ptr())
    function(*addresses, known[2], known[0], *arguments)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, spec: ForwardSpec | None
) -> _Launch:
    """Check a call whose key is new, plan it, and load its kernel."""
    problem = check_forward(q, k, v, softmax_scale, causal)
    _check_limits(problem)
    out_shape = (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v)
    lse_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    device = q.get_device()

    missing = planning.why_not(problem)
    if missing is not None:
        raise NotImplementedError(
            f"the hopper backend has no kernel for this call yet: {missing}; "
            "set FA3_BACKEND=tiled to compute it in PyTorch, which is much slower"
        )
    facts = device_facts(q.device)
    if spec is None:
        planned = planning.plan(problem, facts)
        spec, order = planned.spec, planned.order
    elif (spec.dtype, spec.head_dim, spec.head_dim_v) != (problem.dtype, problem.head_dim, problem.head_dim_v):
        raise ValueError(f"spec {spec.name} cannot compute a problem with {problem}")
    else:
        order = planning.order_of(problem, spec, facts)
    if problem.empty or problem.seqlen_k == 0:
        return _Launch(None, (), out_shape, lse_shape, (False, False, False), device)

    if order.tiles > MAX_TILES:
        raise ValueError(
            f"batch={problem.batch}, heads={problem.heads_q}, seqlen_q={problem.seqlen_q}: "
            f"{order.tiles} tiles, at most {MAX_TILES}; split the batch"
        )
    copies = (_must_copy(q), _must_copy(k), _must_copy(v))
    strides = [
        stride
        for tensor, copied in zip((q, k, v), copies, strict=True)
        for stride in (_contiguous_strides(tensor.shape) if copied else _strides(tensor))
    ]
    arguments = (
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.heads_q,
        problem.heads_kv,
        problem.head_dim,
        problem.head_dim_v,
        *strides,
        *_contiguous_strides(out_shape),
        problem.softmax_scale,
        order.section,
        order.levels,
        order.blocks,
    )
    return _Launch(default_store().load(spec), arguments, out_shape, lse_shape, copies, device)


def _check_limits(problem: Problem) -> None:
    for name in ("seqlen_q", "seqlen_k"):
        value = getattr(problem, name)
        if value > MAX_SEQLEN:
            raise ValueError(f"{name}={value}: the hopper backend takes at most {MAX_SEQLEN}")


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides in elements. A dim of size 1 is never stepped along: its stride may be anything."""
    batch, row, head, _ = tensor.stride()
    size = tensor.shape
    unused = TMA_ALIGNMENT // tensor.element_size()
    return (
        batch if size[0] > 1 else unused,
        row if size[1] > 1 else unused,
        head if size[2] > 1 else unused,
    )


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    _, rows, heads, columns = shape
    return rows * heads * columns, heads * columns, columns


def _must_copy(tensor: Tensor) -> bool:
    """TMA cannot read this tensor where it lies, at whatever address."""
    element = tensor.element_size()
    return any(stride * element % TMA_ALIGNMENT or stride * element >= MAX_STRIDE_BYTES for stride in _strides(tensor))
