"""Gradients on GPUs of compute capability 9.0: prepare, main pass, finish; see `fa3.kernels.backward`.

In the widest tile class there is, instead of sums and finish, `fa3.kernels.backward_dq`.

Takes device memory for the gradients, and until its kernels are done: float32 sums of dQ (4 bytes an element of a
tile class, rows rounded up to a step), and 8 bytes for each query row of a head; where there are few tiles of keys
and several query heads to a K/V head, also a dK and dV for each of some parts of them, in the gradients' dtype.
Copied are inputs that TMA cannot read, as in the forward, q and dout where there are rows that see no key, or may be,
and q and k with qv. Values of more than 256 columns are computed in parts, each with sums of dQ and a dK of its own.
With a block mask there are its lists by keys too, see `fa3.key_lists`. It never synchronizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fa3.backends import hopper
from fa3.backward_plan import backward_order, group_parts, plan_backward, query_order_of
from fa3.backward_plan import why_no_backward as why_no_backward
from fa3.backward_spec import BackwardSpec, FinishSpec, PrepareSpec, QueryGradientSpec
from fa3.compiler.store import default_store
from fa3.key_lists import key_lists
from fa3.mods import derivative_of
from fa3.options import Options
from fa3.plan import MAX_COLUMNS
from fa3.problem import Problem, check_forward
from fa3.spec import TMA_ALIGNMENT


@dataclass(slots=True)
class _Plain:
    """Arguments of a call that needs nothing beside its kernels, after the addresses: no copies, parts or sums.

    Where dQ is made by queries, ``finish`` are the arguments of what makes it, and there are no sums of it.
    """

    prepare: tuple[Any, ...]
    main: tuple[Any, ...]
    finish: tuple[Any, ...]
    #: float32 of the sums of dQ, rows that have statistics, and turns (`fa3.kernels.parts.backward_work.Rows`).
    sums: int
    rows: int
    turns: int


@dataclass(slots=True)
class _Kernels:
    """All of a call that does not change while shapes, dtype, device and options stay the same."""

    problem: Problem
    prepare: Callable[..., Any]
    main: Callable[..., Any]
    finish: Callable[..., Any]
    spec: BackwardSpec
    parts: int
    #: section, levels, thread blocks.
    order: tuple[int, int, int]
    #: The same of what makes dQ by queries, where ``finish`` does; else ``None``.
    query_order: tuple[int, int, int] | None
    m_blocks: int
    #: The first rows of q, which see no key by causal mask, window and chunk.
    hidden_rows: int
    numbers: tuple[Any, ...]
    plain: _Plain | None = None


_known: dict[Any, _Kernels] = {}


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    options: Options | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    specs: tuple[PrepareSpec, BackwardSpec, FinishSpec | QueryGradientSpec] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the forward; arguments and results as `fa3.backends.tiled.backward`.

    Args:
        specs: kernels to use instead of the planned ones, for tests and sweeps.

    Raises:
        NotImplementedError: no kernels exist for this problem, see `why_no_backward`.
        CompileError, StoreError: a kernel is not in the store and cannot be compiled here.
    """
    deterministic = torch.are_deterministic_algorithms_enabled() or bool(options is not None and options.deterministic)
    key: tuple[Any, ...] = (
        *hopper._key(q, k, v, softmax_scale, causal), dout.stride(), out.stride(), deterministic, specs,
    )  # fmt: skip
    if options is not None:
        key = (*key, hopper._options_key(options))
    kernels = _known.get(key)
    if kernels is None:
        if len(_known) >= hopper.MAX_REMEMBERED:
            _known.clear()
        kernels = _known[key] = _find_kernels(q, k, v, softmax_scale, causal, options, deterministic, specs)
        kernels.plain = _plain_arguments(kernels, q, k, v, dout, out)
    if kernels.plain is not None and into is None and _are_ready(q, k, v, dout, out, lse, dlse):
        return (*_run_plain(kernels, kernels.plain, dout, dlse, q, k, v, out, lse, options), None, None)
    options = options or Options()
    dq, dk, dv = (
        into if into is not None else (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    )
    qv, sink = options.qv, options.sink
    dqv, dsink = None, None
    problem = kernels.problem
    if _has_nothing_to_do(problem):
        for gradient in (dq, dk, dv):
            gradient.zero_()
        if qv is not None:
            dqv = torch.zeros_like(qv, memory_format=torch.contiguous_format)
        if sink is not None:
            # Rows that see the sink alone: its probability is 1, their output 0, and their LSE the sink.
            dsink = torch.zeros_like(sink) if dlse is None else dlse.sum(dim=(0, 2)).to(sink.dtype)
            dsink = dsink.masked_fill(sink == -torch.inf, 0.0)
        return dq, dk, dv, dsink, dqv
    with torch.cuda.device(q.device):
        hidden = _hidden_rows(kernels, lse, sink)
        shown_dlse = dlse
        if hidden is not None:
            # Rows that see no key give nothing, whatever they hold: their P is 0, but 0 times NaN would be NaN.
            rows = hidden.mT[..., None]
            q, dout = q.masked_fill(rows, 0.0), dout.masked_fill(rows, 0.0)
            qv = None if qv is None else qv.masked_fill(rows, 0.0)
            shown_dlse = None if dlse is None else dlse.masked_fill(hidden, 0.0)
        if qv is None:
            delta = _launch(kernels, dout, shown_dlse, q, k, v, out, lse, options, (dq, dk, dv))
        else:
            head_dim = problem.head_dim
            joined_q, joined_k = torch.cat([q, qv], dim=-1), torch.cat([k, v], dim=-1)
            joined_dq, joined_dk = torch.empty_like(joined_q), torch.empty_like(joined_k)
            delta = _launch(
                kernels, dout, shown_dlse, joined_q, joined_k, v, out, lse, options, (joined_dq, joined_dk, dv)
            )
            dq.copy_(joined_dq[..., :head_dim])
            dqv = joined_dq[..., head_dim:].contiguous()
            dk.copy_(joined_dk[..., :head_dim])
            dv.add_(joined_dk[..., head_dim:])
        if sink is not None:
            delta = delta[..., : problem.seqlen_q]
            if hidden is not None and dlse is not None:
                delta = delta - dlse.masked_fill(~hidden, 0.0)
            dsink = _sink_gradient(sink, lse, delta)
    return dq, dk, dv, dsink, dqv


def _plain_arguments(kernels: _Kernels, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor) -> _Plain | None:
    """All that does not change from call to call, if the call is a plain one."""
    problem, spec = kernels.problem, kernels.spec
    if (
        _has_nothing_to_do(problem)
        or problem.qv
        or problem.sink
        or problem.mask_mod
        or kernels.hidden_rows
        or kernels.parts > 1
        or problem.head_dim_v > MAX_COLUMNS
        or any(_readable(x) is not x for x in (q, k, v, dout, out))
    ):
        return None
    batch, heads = problem.batch, problem.heads_q
    sizes = (batch, problem.seqlen_q)
    strides = tuple(hopper._strides(x) for x in (q, k, v, dout))
    dq_strides, dk_strides, dv_strides = (hopper._contiguous_strides(x.shape) for x in (q, k, v))
    rows = batch * heads * kernels.m_blocks * spec.tile_m
    finish: tuple[Any, ...] = (*sizes, heads, problem.head_dim, dq_strides, problem.softmax_scale)
    if kernels.query_order is not None:
        finish = _query_arguments(
            kernels, (*sizes, problem.seqlen_k), problem.head_dim, problem.head_dim_v, (*strides, dq_strides)
        )
    return _Plain(
        prepare=(*sizes, heads, problem.head_dim_v, hopper._strides(out), strides[3]),
        main=(
            *sizes, problem.seqlen_k, heads, problem.heads_kv, problem.head_dim, problem.head_dim_v, *strides,
            dk_strides, dv_strides, problem.softmax_scale, 1, *kernels.order,
        ),
        finish=finish,
        sums=rows * spec.head_dim if kernels.query_order is None else 0,
        rows=rows,
        turns=_turns(kernels),
    )  # fmt: skip


def _turns(kernels: _Kernels) -> int:
    """How many turns the kernels take: one for each tile of dQ, if any."""
    return kernels.problem.batch * kernels.problem.heads_q * kernels.m_blocks if kernels.query_order is None else 0


def _query_arguments(
    kernels: _Kernels, lengths: tuple[int, int, int], head_dim: int, head_dim_v: int, strides: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Arguments of what makes dQ by queries, after the addresses and without the last; strides of q, k, v, dout, dq."""
    problem = kernels.problem
    assert kernels.query_order is not None
    rows_per_head = kernels.m_blocks * kernels.spec.tile_m
    return (
        *lengths, problem.heads_q, problem.heads_kv, head_dim, head_dim_v, *strides, problem.softmax_scale,
        rows_per_head, *kernels.query_order,
    )  # fmt: skip


def _are_ready(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> bool:
    """Whether the kernels can read all of it where it lies, given strides that allow it."""
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr() | out.data_ptr()
    return (
        addresses % TMA_ALIGNMENT == 0
        and lse.is_contiguous()
        and (dlse is None or (dlse.dtype is torch.float32 and dlse.is_contiguous()))
    )


def _run_plain(
    kernels: _Kernels,
    plain: _Plain,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the three kernels of a plain call: what `_launch` does, in a quarter of its time on the host."""
    device = q.get_device()
    if hopper._current_device() != device:
        with torch.cuda.device(device):
            return _run_plain(kernels, plain, dout, dlse, q, k, v, out, lse, options)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    memory = lse.new_empty(plain.sums + 2 * plain.rows + plain.turns)
    lse_log2 = memory.data_ptr() + 4 * plain.sums
    sums = memory.data_ptr() if plain.sums else 0
    delta = lse_log2 + 4 * plain.rows
    turns = delta + 4 * plain.rows if plain.turns else 0
    counter, stream = hopper.counter_and_stream(device)
    q_address, dout_address = q.data_ptr(), dout.data_ptr()
    extras = hopper.extra_numbers(kernels.numbers, None, options) if options is not None else kernels.numbers or None
    kernels.prepare(
        out.data_ptr(), dout_address, lse.data_ptr(), 0 if dlse is None else dlse.data_ptr(), lse_log2, delta, turns,
        stream, *plain.prepare,
    )  # fmt: skip
    kernels.main(
        q_address, k.data_ptr(), v.data_ptr(), dout_address, dk.data_ptr(), dv.data_ptr(), lse_log2, delta, sums,
        turns, counter.data_ptr(), stream, *plain.main, extras,
    )  # fmt: skip
    if kernels.query_order is None:
        kernels.finish(sums, turns, dq.data_ptr(), stream, *plain.finish)
    else:
        kernels.finish(
            q_address, k.data_ptr(), v.data_ptr(), dout_address, dq.data_ptr(), lse_log2, delta, counter.data_ptr(),
            stream, *plain.finish, extras,
        )  # fmt: skip
    return dq, dk, dv


def _hidden_rows(kernels: _Kernels, lse: Tensor, sink: Tensor | None) -> Tensor | None:
    """Which rows see no key, (batch or 1, heads_q or 1, seqlen_q), or ``None`` if there cannot be any."""
    if kernels.problem.mask_mod:
        # Only the LSE knows. One that is the sink's is that of a row without keys, or of one whose keys weigh nothing.
        alone = -torch.inf if sink is None else sink.float()[None, :, None]
        return (lse == -torch.inf) | (lse == alone)
    if not kernels.hidden_rows:
        return None
    return (torch.arange(lse.shape[-1], device=lse.device) < kernels.hidden_rows)[None, None]


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """``-sum(exp(sink - LSE) * delta)``: a sink has a probability and no value."""
    logit = sink.float()[None, :, None]
    probability = torch.exp(logit - lse)
    # Where both are +inf nothing but the sink is left; where both are -inf there is none.
    probability = torch.where(lse == logit, 1.0, probability).masked_fill(logit == -torch.inf, 0.0)
    return -(probability * delta).sum(dim=(0, 2)).to(sink.dtype)


def _has_nothing_to_do(problem: Problem) -> bool:
    return problem.empty or problem.seqlen_k == 0


def _find_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    options: Options | None,
    deterministic: bool,
    specs: tuple[PrepareSpec, BackwardSpec, FinishSpec | QueryGradientSpec] | None,
) -> _Kernels:
    problem = check_forward(q, k, v, softmax_scale, causal, True, options)
    hopper._check_limits(problem)
    missing = why_no_backward(problem)
    if missing is not None:
        raise NotImplementedError(f"the hopper backend has no gradient for this call: {missing}")
    derivative = derivative_of(problem.score_mod) if problem.score_mod else ""
    planned = plan_backward(problem, hopper.device_facts(q.device), derivative, deterministic)
    if specs is not None:
        facts = hopper.device_facts(q.device)
        parts = group_parts(problem, specs[1], facts)
        order = backward_order(problem, specs[1], facts, parts)
        planned = replace(
            planned, prepare=specs[0], main=specs[1], finish=specs[2], parts=parts, order=order,
            query_order=query_order_of(problem, specs[2], facts),
        )  # fmt: skip
    order, query_order = planned.order, planned.query_order
    if order.tiles > hopper.MAX_TILES:
        raise ValueError(
            f"batch={problem.batch}, heads={problem.heads_kv}, seqlen_k={problem.seqlen_k}: "
            f"{order.tiles} tiles, at most {hopper.MAX_TILES}; split the batch"
        )
    if query_order is not None and query_order.tiles > hopper.MAX_TILES:
        raise ValueError(
            f"batch={problem.batch}, heads={problem.heads_q}, seqlen_q={problem.seqlen_q}: "
            f"{query_order.tiles} tiles, at most {hopper.MAX_TILES}; split the batch"
        )
    load = _no_kernel if _has_nothing_to_do(problem) else default_store().load
    return _Kernels(
        problem,
        load(planned.prepare),
        load(planned.main),
        load(planned.finish),
        planned.main,
        planned.parts,
        (order.section, order.levels, order.blocks),
        None if query_order is None else (query_order.section, query_order.levels, query_order.blocks),
        math.ceil(problem.seqlen_q / planned.main.tile_m),
        problem.first_row_with_keys,
        hopper.fixed_numbers(problem, planned.main),
    )


def _no_kernel(spec: PrepareSpec | BackwardSpec | FinishSpec | QueryGradientSpec) -> Callable[..., Any]:
    """Stands for the store in a call that launches nothing, and need not compile for that."""
    return lambda *_: None


def _launch(
    kernels: _Kernels,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Run the three kernels, for each part of wide values; returns delta, (batch, heads_q, rows of whole tiles)."""
    problem, spec = kernels.problem, kernels.spec
    dq, dk, dv = gradients
    q, k, v, dout, out = (_readable(x) for x in (q, k, v, dout, out))
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.float().contiguous()
    rows = kernels.m_blocks * spec.tile_m
    statistics = torch.empty(2, problem.batch, problem.heads_q, rows, dtype=torch.float32, device=q.device)
    target_dq, target_dk, target_dv = (_writable(x) for x in gradients)
    if kernels.parts > 1:
        target_dk, target_dv = (_of_parts(x, kernels.parts) for x in (dk, dv))
    all_sums = all_turns = torch.empty(0)
    delta = statistics[1]
    extras = main_extras = hopper.extra_numbers(kernels.numbers, None, options)
    if options.block_mask is not None:
        by_keys = key_lists(options.block_mask, spec.tile_m, spec.tile_n)
        main_extras = hopper.extra_numbers(kernels.numbers, None, options, by_keys)
        if spec.deterministic:
            main_extras = (*(main_extras or ()), by_keys.turns.data_ptr())
    for first in range(0, problem.head_dim_v, MAX_COLUMNS):
        part = slice(first, min(first + MAX_COLUMNS, problem.head_dim_v))
        v_part, dout_part, out_part, dv_part = (x[..., part] for x in (v, dout, out, target_dv))
        dk_part = target_dk if first == 0 else torch.empty_like(target_dk)
        elements = problem.batch * problem.heads_q * rows * spec.head_dim if kernels.query_order is None else 0
        # Without elements their addresses are 0: none.
        sums = torch.empty(elements, dtype=torch.float32, device=q.device)
        turns = torch.empty(_turns(kernels), dtype=torch.int32, device=q.device)
        sizes = (problem.batch, problem.seqlen_q)
        counter, stream = hopper.counter_and_stream(q.get_device())
        # Of the LSE's gradient, and of delta, each part takes its own share.
        part_dlse = dlse if first == 0 else None
        kernels.prepare(
            out_part.data_ptr(), dout_part.data_ptr(), lse.data_ptr(), 0 if part_dlse is None else part_dlse.data_ptr(),
            statistics[0].data_ptr(), statistics[1].data_ptr(), turns.data_ptr(), stream,
            *sizes, problem.heads_q, out_part.shape[-1], hopper._strides(out_part), hopper._strides(dout_part),
        )  # fmt: skip
        kernels.main(
            q.data_ptr(), k.data_ptr(), v_part.data_ptr(), dout_part.data_ptr(), dk_part.data_ptr(), dv_part.data_ptr(),
            statistics[0].data_ptr(), statistics[1].data_ptr(), sums.data_ptr(), turns.data_ptr(),
            counter.data_ptr(), stream,
            *sizes, problem.seqlen_k, problem.heads_q, problem.heads_kv, q.shape[-1], v_part.shape[-1],
            *(hopper._strides(x) for x in (q, k, v_part, dout_part, dk_part, dv_part)),
            problem.softmax_scale, kernels.parts, *kernels.order, main_extras,
        )  # fmt: skip
        if first == 0:
            all_sums, all_turns = sums, turns
        else:
            # Of tiles that have had no turn neither holds anything, and none of it is read.
            all_sums += sums
            delta = delta + statistics[1]
            target_dk.copy_(target_dk.float() + dk_part.float())
        if part.stop < problem.head_dim_v:
            statistics = torch.empty_like(statistics)
    if kernels.query_order is None:
        kernels.finish(
            all_sums.data_ptr(), all_turns.data_ptr(), target_dq.data_ptr(), stream, *sizes, problem.heads_q,
            q.shape[-1], hopper._strides(target_dq), problem.softmax_scale,
        )  # fmt: skip
    else:
        assert problem.head_dim_v <= MAX_COLUMNS  # wider values have few columns of q, and sums of dQ
        strides = tuple(hopper._strides(x) for x in (q, k, v, dout, target_dq))
        kernels.finish(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(), target_dq.data_ptr(),
            statistics[0].data_ptr(), statistics[1].data_ptr(), counter.data_ptr(), stream,
            *_query_arguments(kernels, (*sizes, problem.seqlen_k), q.shape[-1], v.shape[-1], strides), extras,
        )  # fmt: skip
    for gradient, target in zip((dq, dk, dv), (target_dq, target_dk, target_dv), strict=True):
        if target.shape != gradient.shape:
            gradient.copy_(target.unflatten(2, (problem.heads_kv, kernels.parts)).sum(dim=3))
        elif target is not gradient:
            gradient.copy_(target)
    return delta


def _readable(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where TMA cannot read it."""
    if tensor.stride(-1) != 1 or hopper._must_copy(tensor) or tensor.data_ptr() % TMA_ALIGNMENT:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _of_parts(tensor: Tensor, parts: int) -> Tensor:
    """Memory for a dK or dV of each part of the query heads of a K/V head."""
    batch, rows, heads, columns = tensor.shape
    return tensor.new_empty(batch, rows, heads * parts, columns)


def _writable(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous one of its shape where TMA cannot write it."""
    if tensor.stride(-1) != 1 or hopper._must_copy(tensor) or tensor.data_ptr() % TMA_ALIGNMENT:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return tensor
