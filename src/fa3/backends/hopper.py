"""The hopper backend: fa3's own kernels on GPUs of compute capability 9.0.

The only place that launches. Everything that depends on shapes, strides, dtypes and options alone is worked
out once and kept; a repeated call looks up one key, allocates its outputs and launches. It never synchronizes
and takes no device memory beyond the outputs, 64 bytes for the scheduler of each stream, and the documented
copies: an input whose address is not a multiple of 16 bytes, or one of whose batch, row and head strides is
not, is copied, since TMA cannot read it; so is a sink that is neither float32 nor bf16, or not contiguous; and a
wide v of e4m3 in rows that many queries see is transposed before (`fa3.plan.transposes_before`). Scales of e4m3 are
read where they lie.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa3 import plan as planning
from fa3.backward_spec import BackwardSpec
from fa3.compiler.store import default_store
from fa3.e4m3 import slots_of
from fa3.key_lists import KeyLists
from fa3.mods import MaskMod, ScoreMod
from fa3.options import OUT_DTYPES, Fp8, Options, fp8_of
from fa3.plan import MAX_COLUMNS, DeviceFacts
from fa3.problem import Problem, check_forward
from fa3.spec import TMA_ALIGNMENT, ForwardSpec

#: TMA strides are below 2**40 bytes, sizes at most 2**32; the kernel counts rows in int32.
MAX_STRIDE_BYTES = 2**40
MAX_SEQLEN = 2**31 - 256
MAX_TILES = 2**31 - 2**16

#: Device memory of the scheduler: one counter, in a line of its own.
COUNTER_BYTES = 64

#: Launches remembered before the memory is cleared; a server with ever new lengths must not grow forever.
MAX_REMEMBERED = 8192


@dataclass(slots=True)
class _Launch:
    """All of a call that does not change while shapes, strides, dtype, device and options stay the same."""

    function: Callable[..., Any] | None
    #: Arguments after the addresses, and where in v and out they begin, in bytes: one launch for each part of wide
    #: columns.
    parts: tuple[tuple[int, tuple[Any, ...]], ...]
    out_shape: tuple[int, int, int, int]
    lse_shape: tuple[int, int, int]
    copy: tuple[bool, bool, bool]
    device: int
    #: Extra arguments that are no address or shape of an option's tensors: window bounds and cap.
    numbers: tuple[Any, ...] = ()
    #: Of out, beside e4m3; ``None``: that of q.
    out_dtype: torch.dtype | None = None
    v_transposed: bool = False
    #: Of e4m3, the extra arguments that come last, with 0 in the place of addresses.
    scales: tuple[int, ...] = ()
    #: Of e4m3 with v in rows, the kernel of a pass that transposes it: the call goes on as one with V^T.
    transpose: Callable[..., Any] | None = None


_launches: dict[Any, _Launch] = {}
#: Of the default stream of each device.
_counters: dict[int, tuple[Tensor, ctypes.c_void_p]] = {}
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    return_lse: bool,
    options: Options | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention on a Hopper GPU; shapes as `fa3.flash_attn_func`.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in q's dtype, or beside e4m3 in that of ``options.fp8``, contiguous,
        and LSE (batch, heads_q, seqlen_q) in float32, or ``None`` unless ``return_lse``.

    Raises:
        ValueError, TypeError: the arguments do not fit, see `fa3.problem.check_forward`.
        NotImplementedError: no kernel exists for this problem yet.
        CompileError, StoreError: the kernel is not in the store and cannot be compiled here.
    """
    key = _key(q, k, v, softmax_scale, causal)
    if options is not None:
        key = (*key, *_options_key(options))
    launch = _launches.get(key)
    if launch is None:
        launch = _remember(key, _prepare(q, k, v, softmax_scale, causal, None, options))
    if launch.transpose is not None:
        fp8 = (fp8_of(q.dtype, options) or Fp8())._replace(v_transposed=True)
        options = (options or Options())._replace(fp8=fp8)
        return forward(q, k, _transposed(launch.transpose, v), softmax_scale, causal, return_lse, options)
    return _run(launch, q, k, v, return_lse, options)


def _transposed(function: Callable[..., Any], v: Tensor) -> Tensor:
    """V^T of a v in rows, as `fa3.quantization.transposed`."""
    if _must_copy(v) or v.data_ptr() % TMA_ALIGNMENT:
        v = v.clone(memory_format=torch.contiguous_format)
    batch, seqlen, heads, head_dim = v.shape
    out = v.new_empty((batch, heads, head_dim, slots_of(seqlen)))
    with torch.cuda.device(v.device):
        stream = ctypes.c_void_p(_current_stream(v.get_device()))
        function(v.data_ptr(), out.data_ptr(), stream, batch, seqlen, heads, head_dim, _strides(v))
    return out


def forward_with_spec(
    spec: ForwardSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    options: Options | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `forward`, by the kernel of a given spec: for tests, sweeps and ablations.

    Raises:
        ValueError: the spec is for another dtype, head dim, mask or options.
    """
    key = (spec, *_key(q, k, v, softmax_scale, spec.causal))
    if options is not None:
        key = (*key, *_options_key(options))
    launch = _launches.get(key)
    if launch is None:
        launch = _remember(key, _prepare(q, k, v, softmax_scale, spec.causal, spec, options))
    return _run(launch, q, k, v, return_lse, options)


def _key(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool) -> tuple[Any, ...]:
    """All that a launch depends on, addresses aside."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), softmax_scale, causal,
    )  # fmt: skip


def _file_stamps(mod: ScoreMod | MaskMod) -> tuple[int | None, ...]:
    """Those of a modification and of its derivative."""
    return tuple(_file_stamp(cute) for cute in (mod.cute, getattr(mod, "derivative", "")))


def _file_stamp(cute: str) -> int | None:
    """When the file of a caller's own modification was last written: a reload may have brought another kernel."""
    if not cute or cute.startswith("fa3."):
        return None
    path = _file_of(cute.partition(":")[0])
    return None if path is None else os.stat(path).st_mtime_ns


@functools.cache
def _file_of(module: str) -> str | None:
    """File of a module that can be found here; the store complains about one that cannot."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return found.origin if found is not None and found.origin is not None and os.path.isfile(found.origin) else None


def _options_key(options: Options) -> tuple[Any, ...]:
    """The same of the options."""
    block_mask = options.block_mask
    mods = (options.score_mod, options.mask_mod, None if block_mask is None else block_mask.mask_mod)
    tensors = [options.sink, options.qv]
    for mod in mods:
        tensors.extend(() if mod is None else mod.aux)
    if block_mask is not None:
        tensors += [block_mask.counts, block_mask.indices]
    return (
        *options[:4], options.pack_gqa, options.sm_margin,
        *[mod and (mod.cute, len(mod.aux), *_file_stamps(mod)) for mod in mods],
        block_mask and (block_mask.seqlen_q, block_mask.seqlen_k),
        *[x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors],
        *(() if options.fp8 is None else _fp8_key(options.fp8)),
    )  # fmt: skip


def _fp8_key(fp8: Fp8) -> tuple[Any, ...]:
    """The same of what goes with e4m3."""
    return (
        *[x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in fp8.tensors],
        fp8.q_block, fp8.k_block, fp8.v_transposed, fp8.out_dtype, fp8.two_level,
    )  # fmt: skip


def _remember(key: Any, launch: _Launch) -> _Launch:
    if len(_launches) >= MAX_REMEMBERED:
        _launches.clear()
    _launches[key] = launch
    return launch


def _run(
    launch: _Launch, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: Options | None
) -> tuple[Tensor, Tensor | None]:
    if launch.out_dtype is None:
        out = q.new_empty(launch.out_shape)
    else:
        out = q.new_empty(launch.out_shape, dtype=launch.out_dtype)
    lse = q.new_empty(launch.lse_shape, dtype=torch.float32) if return_lse else None
    function = launch.function
    if function is None:
        # No key at all, or nothing to compute: a softmax over the empty set gives 0 and -inf, or the sink.
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
            if options is not None and options.sink is not None:
                lse.copy_(options.sink[None, :, None])
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
    parts = launch.parts
    if (copy_q, copy_k, copy_v) != launch.copy:
        # The same shapes and strides at an unaligned address: the copies have strides of their own.
        strides = [_strides(x) if copied else None for x, copied in ((q, copy_q), (k, copy_k), (v, copy_v))]
        if launch.v_transposed and strides[2] is not None:
            strides[2] = _columns_first(strides[2])
        parts = tuple((offset, _with_strides(arguments, strides)) for offset, arguments in parts)

    sink, extras = None, launch.numbers or None
    if options is not None:
        sink, qv = _readable_sink(options.sink), options.qv
        if qv is not None and (_must_copy(qv) or qv.data_ptr() % TMA_ALIGNMENT):
            qv = qv.clone(memory_format=torch.contiguous_format)
        extras = extra_numbers(launch.numbers, qv, options)
    if launch.scales:
        fp8 = None if options is None else options.fp8
        extras = (*(extras or ()), *_with_addresses(launch.scales, fp8))

    out_address, lse_address = out.data_ptr(), 0 if lse is None else lse.data_ptr()
    sink_address = 0 if sink is None else sink.data_ptr()
    for offset, arguments in parts:
        addresses = (q_address, k_address, v_address + offset, out_address + offset, lse_address, sink_address)
        if _current_device() == launch.device:
            _enqueue(function, addresses, launch.device, arguments, extras)
        else:
            with torch.cuda.device(launch.device):
                _enqueue(function, addresses, launch.device, arguments, extras)
    return out, lse


def _with_strides(arguments: tuple[Any, ...], strides: list[tuple[int, int, int] | None]) -> tuple[Any, ...]:
    """The arguments with other strides of q, k and v, where there are others."""
    changed = list(arguments)
    for place, triple in zip((7, 10, 13), strides, strict=True):
        if triple is not None:
            changed[place : place + 3] = triple
    return tuple(changed)


def _with_addresses(scales: tuple[int, ...], fp8: Fp8 | None) -> tuple[int, ...]:
    """The numbers of `_scale_numbers` with the addresses of a call's scales."""
    if fp8 is None:
        return scales
    numbers = [*scales]
    for i, scale in enumerate(fp8.tensors):
        if scale is not None:
            numbers[4 * i] = scale.data_ptr()
    return tuple(numbers)


def _scale_numbers(fp8: Fp8, heads_q: int) -> tuple[int, ...]:
    """The kernel's extra arguments for scales, as ``fa3.kernels.parts.scales.Scales`` has them, without addresses."""
    numbers = []
    for scale in fp8.tensors:
        batch, head, block = (0, 0, 0) if scale is None else (*scale.stride(), 0)[:3]
        numbers += [0, batch, head, block]
    sharing = 1 if fp8.q_scale is None else heads_q // fp8.q_scale.shape[1]
    return (*numbers, fp8.q_block or 1, sharing)


def _readable_sink(sink: Tensor | None) -> Tensor | None:
    """A sink that the kernel can read: contiguous, float32 or bf16."""
    if sink is None:
        return None
    return (sink if sink.dtype in (torch.float32, torch.bfloat16) else sink.float()).contiguous()


def extra_numbers(
    fixed: tuple[Any, ...], qv: Tensor | None, options: Options, by_keys: KeyLists | None = None
) -> tuple[Any, ...] | None:
    """The kernel's extra arguments, in the order of ``fa3.kernels.parts.extras.extra_types``.

    ``by_keys`` takes the place of a block mask's own lists.
    """
    numbers = [*fixed]
    if qv is not None:
        numbers += [qv.data_ptr(), *_strides(qv)]
    block_mask = options.block_mask
    for mod in (options.score_mod, options.mask_mod if block_mask is None else block_mask.mask_mod):
        for tensor in () if mod is None else mod.aux:
            numbers += [tensor.data_ptr(), *tensor.shape]
    if block_mask is not None:
        lists = block_mask if by_keys is None else by_keys
        batch, heads, rows, columns = lists.indices.shape
        numbers += [
            lists.counts.data_ptr(), lists.indices.data_ptr(),
            heads * rows if batch > 1 else 0, rows if heads > 1 else 0, columns,
        ]  # fmt: skip
    return tuple(numbers) or None


def _enqueue(
    function: Callable[..., Any],
    addresses: tuple[int, ...],
    device: int,
    arguments: tuple[Any, ...],
    extras: tuple[Any, ...] | None,
) -> None:
    """Launch on the framework's current stream of the current device."""
    counter, stream = counter_and_stream(device)
    function(*addresses, counter.data_ptr(), stream, *arguments, extras)


def counter_and_stream(device: int) -> tuple[Tensor, ctypes.c_void_p]:
    """The scheduler's counter, 0 between launches, and the framework's current stream of the current device.

    Launches on the default stream follow each other and share one, which is kept. All others get their own: a graph may
    be replayed on any stream, and torch.compile warms up on one of its own, where memory that is kept would be the
    graph's. The handle of the per-thread default stream means another stream in each thread, and that of a stream made
    outside PyTorch may come back for a new one.
    """
    raw = _current_stream(device)
    if raw or _capturing():
        return torch.zeros(COUNTER_BYTES // 4, dtype=torch.int32, device=device), ctypes.c_void_p(raw)
    known = _counters.get(device)
    if known is None:
        counter = torch.zeros(COUNTER_BYTES // 4, dtype=torch.int32, device=device)
        known = _counters[device] = (counter, ctypes.c_void_p(raw))
    return known


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    spec: ForwardSpec | None,
    options: Options | None,
) -> _Launch:
    """Check a call whose key is new, plan it, and load its kernel."""
    problem = check_forward(q, k, v, softmax_scale, causal, False, options)
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
        if planned.transpose is not None:
            function = default_store().load(planned.transpose)
            return _Launch(None, (), out_shape, lse_shape, (False, False, False), device, transpose=function)
        spec, order = planned.spec, planned.order
    else:
        if not planning.computes(spec, problem):
            raise ValueError(f"spec {spec.name} cannot compute a problem with {problem}")
        order = planning.order_of(problem, spec, facts)
    fp8 = fp8_of(q.dtype, options)
    out_dtype = None if fp8 is None else OUT_DTYPES[fp8.out_dtype]
    if problem.empty or problem.seqlen_k == 0:
        return _Launch(None, (), out_shape, lse_shape, (False, False, False), device, out_dtype=out_dtype)

    if order.tiles > MAX_TILES:
        raise ValueError(
            f"batch={problem.batch}, heads={problem.heads_q}, seqlen_q={problem.seqlen_q}: "
            f"{order.tiles} tiles, at most {MAX_TILES}; split the batch"
        )
    copies = (_must_copy(q), _must_copy(k), _must_copy(v))
    of_q, of_k, of_v = (
        _contiguous_strides(tensor.shape) if copied else _strides(tensor)
        for tensor, copied in zip((q, k, v), copies, strict=True)
    )
    strides = (*of_q, *of_k, *(_columns_first(of_v) if problem.v_transposed else of_v))
    parts = []
    for first in range(0, problem.head_dim_v, MAX_COLUMNS):
        columns = min(MAX_COLUMNS, problem.head_dim_v - first)
        arguments = (
            problem.batch,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.heads_q,
            problem.heads_kv,
            problem.head_dim,
            columns,
            *strides,
            *_contiguous_strides(out_shape),
            problem.softmax_scale,
            order.section,
            order.levels,
            order.blocks,
            2 if options is not None and options.sink is not None and options.sink.dtype is torch.bfloat16 else 4,
        )
        parts.append((first * q.element_size(), arguments))
    numbers = fixed_numbers(problem, spec)
    return _Launch(
        default_store().load(spec),
        tuple(parts),
        out_shape,
        lse_shape,
        copies,
        device,
        numbers,
        out_dtype,
        problem.v_transposed,
        () if fp8 is None else _scale_numbers(fp8, problem.heads_q),
    )


def fixed_numbers(problem: Problem, spec: ForwardSpec | BackwardSpec) -> tuple[Any, ...]:
    """The kernel's extra arguments that are no address or shape of an option's tensors: window bounds and cap."""
    numbers: list[Any] = []
    if spec.mask == "window":
        left, right, chunk = problem.bounds
        numbers += [left if left >= 0 else problem.seqlen_k, right if right >= 0 else problem.seqlen_q, chunk]
    if spec.softcap:
        numbers.append(problem.softcap)
    return tuple(numbers)


def _check_limits(problem: Problem) -> None:
    for name in ("seqlen_q", "seqlen_k"):
        value = getattr(problem, name)
        if value > MAX_SEQLEN:
            raise ValueError(f"{name}={value}: the hopper backend takes at most {MAX_SEQLEN}")
    if problem.mask == "window":
        # The kernel adds lengths, and the end of a chunk may lie as far again behind the last key.
        chunk = problem.bounds[2]
        if problem.seqlen_q + problem.seqlen_k + chunk > MAX_SEQLEN:
            raise ValueError(
                f"seqlen_q={problem.seqlen_q}, seqlen_k={problem.seqlen_k}, attention_chunk={chunk}: with a window or "
                f"chunks the hopper backend takes at most {MAX_SEQLEN} in all"
            )


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


def _columns_first(strides: tuple[int, int, int]) -> tuple[int, int, int]:
    """Strides of V^T, (batch, heads, columns, slots), in the order that the kernel takes: (batch, column, head)."""
    batch, head, column = strides
    return batch, column, head


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    _, rows, heads, columns = shape
    return rows * heads * columns, heads * columns, columns


def _must_copy(tensor: Tensor) -> bool:
    """TMA cannot read this tensor where it lies, at whatever address."""
    element = tensor.element_size()
    return any(stride * element % TMA_ALIGNMENT or stride * element >= MAX_STRIDE_BYTES for stride in _strides(tensor))
