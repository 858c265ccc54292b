"""dQ by queries: its spec, plan and promises, what it is launched with, and its arithmetic on the host."""

from __future__ import annotations

import inspect as python
import itertools
import math
import re
from dataclasses import fields, replace

import pytest
import torch

from backward_recorder import ARGUMENTS, backward, contiguous, fill, install, results_of
from fa3.backward_plan import backward_tiles as tiles_of
from fa3.backward_plan import make_backward_specs, plan_backward
from fa3.backward_spec import BACKWARD_CLASSES, BackwardSpec, FinishSpec, PrepareSpec, QueryGradientSpec
from fa3.compiler.inspect import Report, check
from fa3.kernel_spec import spec_from_dict
from fa3.plan import H200, order_of
from fa3.presets import shipped_specs
from fa3.problem import Problem
from fa3.spec import ELEMENT_BYTES, SHARED_MEMORY_PER_BLOCK
from recorder import memory, tensors

KINDS = [PrepareSpec, BackwardSpec, QueryGradientSpec]
SPEC = QueryGradientSpec("bf16", 256, 256, "causal")
MASKS = ("full", "causal", "window")


@pytest.fixture
def kernels(monkeypatch):
    return install(monkeypatch)


# Spec ---------------------------------------------------------------------------------------------------------------


def test_two_warpgroups_and_a_producer_fill_shared_memory():
    SPEC.validate()
    assert (SPEC.consumer_warpgroups, SPEC.threads) == (2, 384)
    # q and dout of 128 rows, two tiles of k and one of v.
    assert SPEC.shared_bytes == 2 * (128 * 512 + 64 * (2 * 256 + 256)) + 1024 <= SHARED_MEMORY_PER_BLOCK
    assert replace(SPEC, stages=3).shared_bytes > SHARED_MEMORY_PER_BLOCK


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("dtype", ["fp32", ""]),
        ("head_dim", [0, 96, 512]),
        ("mask", ["", "none"]),
        ("tile_m", [0, 32, 192]),
        ("tile_n", [0, 16, 96, 128]),
        ("stages", [0, 1, 5]),
        ("stages_v", [0, 5]),
    ],
)
def test_a_field_out_of_range_is_refused_with_its_name_and_value(field, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field}={re.escape(repr(value))}[:,] "):
            replace(SPEC, **{field: value}).validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": "blocks", "mask_mod": "m:f", "tile_m": 64}, "tile_m=64: with block masks tiles are 128 queries"),
        ({"score_mod": "m:f"}, "score_mod='m:f', derivative='': both or neither"),
        ({"stages": 3}, f"needs {2 * (128 * 512 + 64 * 4 * 256) + 1024} bytes of shared memory: at most 232448"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(SPEC, **changes).validate()


def test_the_name_tells_it_apart_by_every_field_and_its_dict_comes_back():
    spec = replace(SPEC, score_mod="one:score", derivative="one:derivative", mask_mod="one:mask")
    others = {
        "dtype": "fp16", "head_dim": 64, "head_dim_v": 64, "mask": "window", "tile_m": 64, "tile_n": 32, "stages": 3,
        "stages_v": 2, "softcap": True, "score_mod": "other:score", "derivative": "other:derivative",
        "mask_mod": "other:mask", "score_aux": "f1", "mask_aux": "f1",
    }  # fmt: skip
    assert set(others) == {field.name for field in fields(spec)}
    names = {spec.name, *(replace(spec, **{field: value}).name for field, value in others.items())}
    assert len(names) == 1 + len(others)
    assert SPEC.name == "backward_dq_bf16_d256_causal_128x64x2x1"
    assert spec_from_dict(spec.as_dict()) == spec


# Plan ---------------------------------------------------------------------------------------------------------------


def problem_of(head_dim: int = 256, **changes: object) -> Problem:
    sizes = {"batch": 2, "seqlen_q": 1000, "seqlen_k": 1000, "heads_q": 8, "heads_kv": 2}
    given = {**sizes, "head_dim": head_dim, "head_dim_v": head_dim, "dtype": "bf16", "softmax_scale": 1.0, **changes}
    return Problem(**given)


@pytest.mark.parametrize("modified", [False, True], ids=["plain", "modified"])
@pytest.mark.parametrize("kind", BACKWARD_CLASSES, ids=str)
def test_where_dq_does_not_fit_the_main_pass_leaves_dq_to_a_kernel_of_its_own(kind, modified):
    for dtype, mask in itertools.product(ELEMENT_BYTES, MASKS):
        tiles = tiles_of(kind, modified)
        specs = make_backward_specs(dtype, kind, mask, tiles, deterministic=True, softcap=modified)
        _, main, last = specs
        for spec in specs:
            spec.validate()
        assert main.deterministic == (main.dq_stages > 0) == isinstance(last, FinishSpec) == (kind != (256, 256))
        if isinstance(last, QueryGradientSpec):
            assert (last.dtype, last.head_dim, last.head_dim_v, last.mask) == (dtype, *kind, mask)
            assert last.softcap == modified


def test_it_is_planned_for_wide_heads_alone_in_a_fixed_order_or_not():
    for head_dim, deterministic in itertools.product((64, 128, 192, 256), (False, True)):
        planned = plan_backward(problem_of(head_dim), H200, deterministic=deterministic)
        # 192 columns of both have no class of their own.
        by_queries = head_dim > 128
        assert isinstance(planned.finish, QueryGradientSpec) == by_queries
        assert (planned.query_order is not None) == by_queries
        assert any("own queries" in reason for reason in planned.reasons) == by_queries


def test_its_tiles_come_in_the_order_of_the_forward():
    problem = problem_of(causal=True)
    planned = plan_backward(problem, H200)
    assert planned.query_order == order_of(problem, planned.finish, H200)
    assert planned.query_order.tiles == 8 * 8 * 2
    assert planned.query_order.reason in planned.reasons


def test_it_gets_the_modifications_of_the_main_pass_and_smaller_tiles_with_them():
    changes = {"score_mod": "one:score", "score_aux": ("f1",), "mask_mod": "one:mask", "mask_aux": ("i1",)}
    planned = plan_backward(problem_of(**changes, softcap=9.0), H200, "one:derivative")
    for field in ("softcap", "score_mod", "derivative", "mask_mod", "score_aux", "mask_aux"):
        assert getattr(planned.finish, field) == getattr(planned.main, field), field
    assert planned.finish.tile_n < plan_backward(problem_of(), H200).finish.tile_n


def test_everybody_has_it_in_every_dtype_under_every_mask():
    shipped = {(s.dtype, s.mask) for s in shipped_specs("backward") if isinstance(s, QueryGradientSpec)}
    assert shipped == set(itertools.product(ELEMENT_BYTES, MASKS))


# Promises -----------------------------------------------------------------------------------------------------------

KEPT = Report(168, 0, 0, 0, 0, 72, 32, 4, 64, 6, [24, 240], [32], [32])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"spills": 3}, "3 spill"),
        ({"hgmma": 0, "waits": 0}, "no HGMMA"),
        ({"utmaldg": 0}, "no UTMALDG"),
        ({"utmastg": 0}, "no UTMASTG"),
        ({"waits": 72}, "serialized"),
        ({"setmaxreg": [240]}, "USETMAXREG"),
        ({"overlap": [15]}, "expected 16 on"),
        ({"vector_reductions": 1}, "order that is not fixed"),
    ],
)
def test_each_broken_promise_is_named(change, sentence):
    assert check(SPEC, KEPT) == []
    (broken,) = check(SPEC, replace(KEPT, **change))
    assert sentence in broken


# Launch -------------------------------------------------------------------------------------------------------------


def wide(**changes):
    return tensors(head_dim=256, **changes)


def test_the_recorder_takes_the_arguments_of_the_kernel():
    pytest.importorskip("cutlass")
    from fa3.kernels.backward_dq import QueryGradientKernel

    assert tuple(python.signature(QueryGradientKernel.__call__).parameters)[1:] == ARGUMENTS[QueryGradientSpec]


@pytest.mark.parametrize("strided", [False, True], ids=["plain", "into"])
def test_it_runs_last_and_gets_what_the_main_pass_read_and_dq(kernels, strided):
    q, k, v = wide(heads_q=4, heads_kv=2)
    given = results_of(q, v)
    into = None
    if strided:
        into = (torch.zeros(2, 100, 3, 4, 256, dtype=q.dtype)[:, :, 1], torch.empty_like(k), torch.empty_like(v))
    dq, *_ = backward(q, k, v, given=given, into=into)
    assert [type(call["spec"]) for call in kernels.calls] == KINDS
    prepare, main, last = (kernels.one(kind) for kind in KINDS)
    assert main["spec"].dq_stages == 0
    assert main["dq"] == prepare["turns"] == main["turns"] == 0, "nothing is summed in memory"
    assert last["lse"] == main["lse"] == prepare["lse_log2"]
    assert last["delta"] == main["delta"] == prepare["delta"]
    for name in ("q", "k", "v", "dout"):
        assert last[name] == main[name], name
        assert last[f"{name}_strides"] == main[f"{name}_strides"], name
    assert (last["dq"], last["dq_strides"]) == (dq.data_ptr(), contiguous(dq))
    names = ("counter", "stream", "batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")
    assert all(last[name] == main[name] for name in (*names, "softmax_scale", "extra_numbers"))
    # 100 rows in steps of 64 of the main pass.
    assert last["rows_per_head"] == 128
    order = plan_backward(kernels_problem(q, k), H200).query_order
    assert (last["section"], last["levels"], last["blocks"]) == (order.section, order.levels, order.blocks)


def kernels_problem(q: torch.Tensor, k: torch.Tensor) -> Problem:
    return problem_of(batch=2, seqlen_q=q.shape[1], seqlen_k=k.shape[1], heads_q=q.shape[2], heads_kv=k.shape[2])


def test_the_statistics_lie_in_memory_of_their_own(kernels):
    q, k, v = wide(seqlen_q=65)

    def look(call):
        if type(call["spec"]) is QueryGradientSpec:
            count = q.shape[0] * q.shape[2] * call["rows_per_head"]
            assert call["delta"] - call["lse"] == 4 * count
            for name in ("lse", "delta"):
                memory(call[name], count, torch.float32)

    kernels.look = look
    backward(q, k, v)
    assert kernels.one(QueryGradientSpec)["rows_per_head"] == 128


def test_bounds_caps_and_modifications_go_to_both(kernels):
    from fa3 import mods

    q, k, v = wide()
    bias = torch.zeros(q.shape[2], 9)
    backward(q, k, v, window_left=10, softcap=5.0, score_mod=mods.relative_bias(bias))
    main, last = kernels.one(BackwardSpec), kernels.one(QueryGradientSpec)
    assert last["extra_numbers"] == main["extra_numbers"] == (10, 100, 0, 5.0, bias.data_ptr(), *bias.shape)


def test_qv_is_more_columns_of_q_here_too(kernels):
    q, k, v = tensors(head_dim=64, head_dim_v=192, heads_kv=4)
    qv = torch.randn(*q.shape[:3], 192).to(q.dtype)

    def look(call):
        if type(call["spec"]) is QueryGradientSpec:
            fill(call["dq"], q.numel() + qv.numel(), 1.0)

    kernels.look = look
    dq, *_, dqv = backward(q, k, v, qv=qv)
    last = kernels.one(QueryGradientSpec)
    assert (last["head_dim"], last["head_dim_v"]) == (256, 192)
    assert dq.unique().tolist() == dqv.unique().tolist() == [1.0]
    assert dqv.shape == qv.shape


# Arithmetic, compiled for the host ----------------------------------------------------------------------------------


@pytest.mark.parametrize("capped", [False, True], ids=["plain", "capped"])
@pytest.mark.parametrize("derivative", ["", "gradient_wrappers:times_place"], ids=["", "derivative"])
def test_ds_is_p_times_dp_less_the_delta_of_its_row(derivative, capped):
    pytest.importorskip("cutlass")
    import query_wrappers as wrappers
    from bricks_on_host import call, floats

    registers = wrappers.REGISTERS
    thread, register = torch.meshgrid(torch.arange(128), torch.arange(registers), indexing="ij")
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    scores, dp = torch.rand(128, registers), torch.randn(128, registers)
    lse, delta = torch.randn(64), torch.randn(64)
    # Of a row that sees no key; and of a key that is hidden, where no derivative is taken at its score.
    lse[5] = math.inf
    if not (derivative or capped):
        scores[9, 3] = -math.inf
    p, ds = floats(128, registers), floats(128, registers)
    call(
        wrappers.score_gradients, scores, dp, lse, delta, p, ds, 0.3, 0.5, 2, 3, 128, 64, constants=(derivative, capped)
    )
    expected_p = torch.exp2(0.3 * scores.double() - lse.double()[row])
    torch.testing.assert_close(p.double(), expected_p, rtol=1e-5, atol=0)
    expected = expected_p * (dp - delta[row])
    if derivative:
        expected = expected * (0.5 * scores + 128 + row + 100 * (64 + column) + 1000 * 3 + 10_000 * 2)
    if capped:
        expected = expected * (1 - scores.double() ** 2)
    torch.testing.assert_close(ds.double(), expected, rtol=1e-4, atol=1e-6)
    assert (p[row == 5] == 0).all()
