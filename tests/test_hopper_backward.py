"""What the hopper backend hands to the kernels of gradients, with a recorder in their place: no GPU is needed."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from backward_recorder import ARGUMENTS, backward, contiguous, fill, install, results_of, write
from fa3.backends import hopper, hopper_backward
from fa3.backward_spec import BackwardSpec, FinishSpec, PrepareSpec
from fa3.plan import H200
from recorder import memory, tensors

KINDS = [PrepareSpec, BackwardSpec, FinishSpec]


@pytest.fixture
def kernels(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def fixed_order():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_the_recorder_takes_the_arguments_of_the_kernels():
    pytest.importorskip("cutlass")
    from fa3.kernels.backward import BackwardKernel
    from fa3.kernels.backward_finish import FinishKernel
    from fa3.kernels.backward_prepare import PrepareKernel

    for spec, kernel in zip(KINDS, (PrepareKernel, BackwardKernel, FinishKernel), strict=True):
        assert tuple(inspect.signature(kernel.__call__).parameters)[1:] == ARGUMENTS[spec]


def test_the_kernels_run_one_after_the_other_on_one_stream(kernels):
    backward(*tensors())
    assert [type(call["spec"]) for call in kernels.calls] == KINDS
    assert len({id(call["stream"]) for call in kernels.calls}) == 1


def test_the_kernels_get_sizes_strides_and_addresses_of_what_they_read_and_write(kernels):
    q, k, v = tensors(heads_kv=4)
    given = dout, out, lse = results_of(q, v)
    dlse = torch.randn_like(lse)
    dq, dk, dv, dsink, dqv = backward(q, k, v, dlse=dlse, given=given)
    assert dsink is dqv is None
    prepare, main, finish = (kernels.one(kind) for kind in KINDS)
    for name, tensor in (("out", out), ("dout", dout), ("lse", lse), ("dlse", dlse)):
        assert prepare[name] == tensor.data_ptr(), name
    for name, tensor in (("q", q), ("k", k), ("v", v), ("dout", dout), ("dk", dk), ("dv", dv)):
        assert main[name] == tensor.data_ptr(), name
        assert main[f"{name}_strides"] == contiguous(tensor), name
    assert (prepare["out_strides"], prepare["dout_strides"]) == (contiguous(out), contiguous(dout))
    assert (finish["dq"], finish["dq_strides"]) == (dq.data_ptr(), contiguous(dq))
    assert [main[name] for name in ARGUMENTS[BackwardSpec][12:19]] == [2, 100, 130, 4, 4, 128, 128]
    assert [prepare[name] for name in ("batch", "seqlen_q", "heads", "head_dim_v")] == [2, 100, 4, 128]
    assert [finish[name] for name in ("batch", "seqlen_q", "heads", "head_dim")] == [2, 100, 4, 128]
    for call in (main, finish):
        assert call["softmax_scale"] == pytest.approx(1 / math.sqrt(128))
    assert (main["parts"], main["extra_numbers"]) == (1, None)
    for gradient, tensor in ((dq, q), (dk, k), (dv, v)):
        assert gradient.shape == tensor.shape
        assert gradient.dtype == tensor.dtype


def test_what_one_kernel_writes_the_next_one_reads(kernels):
    backward(*tensors())
    prepare, main, finish = (kernels.one(kind) for kind in KINDS)
    assert main["lse"] == prepare["lse_log2"]
    assert main["delta"] == prepare["delta"]
    assert main["dq"] == finish["sums"]
    assert main["turns"] == prepare["turns"] == finish["turns"]
    assert prepare["lse_log2"] != prepare["lse"], "what autograd saved is not written to"


def test_the_statistics_have_room_for_whole_tiles_of_rows_and_so_have_the_sums(kernels):
    q, k, v = tensors(batch=3, seqlen_q=65, heads_q=6)
    sizes = {}

    def look(call):
        if type(call["spec"]) is PrepareSpec:
            sizes["statistics"] = call["delta"] - call["lse_log2"]
            spec = call["spec"]
            rows = math.ceil(65 / spec.tile_m) * spec.tile_m
            # All of it may be written; a fault would be one of the memory behind.
            memory(call["delta"], 3 * 6 * rows, torch.float32)
            sizes["rows"] = rows
        elif type(call["spec"]) is BackwardSpec:
            memory(call["dq"], 3 * 6 * sizes["rows"] * call["spec"].head_dim, torch.float32)

    kernels.look = look
    backward(q, k, v)
    assert sizes["statistics"] == 4 * 3 * 6 * sizes["rows"]


def test_without_a_gradient_of_the_lse_there_is_no_address_for_it(kernels):
    backward(*tensors())
    assert kernels.one(PrepareSpec)["dlse"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gradient_of_the_lse_is_read_in_float32_and_contiguous(kernels, dtype):
    q, k, v = tensors()
    dlse = torch.randn(2, 100, 4).to(dtype).transpose(1, 2)
    seen = []
    kernels.look = lambda call: "dlse" in call and seen.append(memory(call["dlse"], 800, torch.float32))
    backward(q, k, v, dlse=dlse)
    assert torch.equal(seen[0], dlse.float().flatten())


# Inputs that cannot be read in place ------------------------------------------------------------------------------


def test_the_gradient_of_a_sum_has_strides_of_zero_and_is_copied(kernels):
    q, k, v = tensors()
    _, out, lse = results_of(q, v)
    dout = torch.ones((), dtype=q.dtype).expand(out.shape)
    assert set(dout.stride()) == {0}
    seen = []
    kernels.look = lambda call: "dout" in call and seen.append(memory(call["dout"], dout.numel(), q.dtype))
    backward(q, k, v, given=(dout, out, lse))
    for kind in (PrepareSpec, BackwardSpec):
        assert kernels.one(kind)["dout"] != dout.data_ptr()
        assert kernels.one(kind)["dout_strides"] == contiguous(out)
    assert len(seen) == 2
    assert all((values == 1).all() for values in seen)


def test_heads_of_dout_before_its_rows_are_read_where_they_lie(kernels):
    q, k, v = tensors()
    _, out, lse = results_of(q, v)
    dout = torch.randn(2, 4, 100, 128).to(q.dtype).transpose(1, 2)
    backward(q, k, v, given=(dout, out, lse))
    assert kernels.one(BackwardSpec)["dout"] == dout.data_ptr()
    assert kernels.one(BackwardSpec)["dout_strides"] == (4 * 100 * 128, 128, 100 * 128)


def odd_stride(plain):
    wide = torch.zeros(*plain.shape[:3], plain.shape[3] + 2, dtype=plain.dtype)
    return wide[..., : plain.shape[3]].copy_(plain)


def odd_address(plain):
    return torch.zeros(plain.numel() + 1, dtype=plain.dtype)[1:].view(plain.shape).copy_(plain)


def columns_apart(plain):
    return plain.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, change) for name in ("q", "k", "v", "dout", "out") for change in (odd_stride, odd_address)),
        # q, k and v are refused with such strides.
        *((name, columns_apart) for name in ("dout", "out")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_tma_cannot_read_is_copied(kernels, name, change):
    q, k, v = tensors()
    dout, out, lse = results_of(q, v)
    named = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    plain, named[name] = named[name], change(named[name])
    seen = []
    kernels.look = lambda call: name in call and seen.append(memory(call[name], plain.numel(), plain.dtype))
    backward(named["q"], named["k"], named["v"], given=(named["dout"], named["out"], lse))
    assert all(torch.equal(values, plain.flatten()) for values in seen)
    assert seen


def test_gradients_are_written_into_what_is_given(kernels):
    packed = torch.zeros(2, 100, 3, 4, 128, dtype=torch.bfloat16)
    q, k, v = tensors(seqlen_k=100, heads_kv=4)
    into = packed.unbind(2)
    dq, dk, dv, _, _ = backward(q, k, v, into=into)
    assert all(one is other for one, other in zip((dq, dk, dv), into, strict=True))
    main, finish = kernels.one(BackwardSpec), kernels.one(FinishSpec)
    strides = (100 * 3 * 4 * 128, 3 * 4 * 128, 128)
    assert (finish["dq"], main["dk"], main["dv"]) == tuple(x.data_ptr() for x in into)
    assert finish["dq_strides"] == main["dk_strides"] == main["dv_strides"] == strides


def test_gradients_that_tma_cannot_write_in_place_are_copied_there(kernels):
    q, k, v = tensors(seqlen_k=100, heads_kv=4)
    wide = torch.zeros(3, *q.shape[:3], 130, dtype=q.dtype)
    into = tuple(x[..., :128] for x in wide)

    def look(call):
        if type(call["spec"]) is BackwardSpec:
            fill(call["dk"], q.numel(), 2.0)
            fill(call["dv"], q.numel(), 3.0)
        elif type(call["spec"]) is FinishSpec:
            fill(call["dq"], q.numel(), 1.0)

    kernels.look = look
    backward(q, k, v, into=into)
    assert [x.unique().tolist() for x in into] == [[1.0], [2.0], [3.0]]
    assert not wide[..., 128:].any(), "what lies between is not touched"


@pytest.mark.parametrize("options", [{"causal": True}, {"window_right": 20}, {"attention_chunk": 50}], ids=str)
def test_rows_that_see_no_key_reach_no_kernel_whatever_they_hold(kernels, options):
    q, k, v = tensors(seqlen_q=200)
    dout, out, lse = results_of(q, v)
    hidden = 200 - 130 - options.get("window_right", 0)
    q[:, :hidden] = dout[:, :hidden] = math.nan
    given_q, given_dout = q.clone(), dout.clone()
    seen = []

    def look(call):
        if type(call["spec"]) is BackwardSpec:
            seen.extend(memory(call[name], q.numel(), q.dtype).view(q.shape) for name in ("q", "dout"))

    kernels.look = look
    backward(q, k, v, given=(dout, out, lse), **options)
    for found, tensor, before in zip(seen, (q, dout), (given_q, given_dout), strict=True):
        assert (found[:, :hidden] == 0).all()
        assert torch.equal(found[:, hidden:], tensor[:, hidden:])
        assert torch.equal(tensor.view(torch.int16), before.view(torch.int16)), "what is given is not written to"


# Determinism ------------------------------------------------------------------------------------------------------


def test_the_sums_are_added_in_no_fixed_order_unless_asked(kernels):
    backward(*tensors())
    assert not kernels.one(BackwardSpec)["spec"].deterministic


def test_a_call_may_ask_for_a_fixed_order(kernels):
    backward(*tensors(), deterministic=True)
    assert kernels.one(BackwardSpec)["spec"].deterministic


def test_so_may_all_of_pytorch(kernels, fixed_order):
    backward(*tensors())
    assert kernels.one(BackwardSpec)["spec"].deterministic


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"window_left": 30}], ids=str)
def test_every_tile_of_dq_has_a_turn_that_prepare_writes_and_finish_reads(kernels, options):
    tiles = []

    def look(call):
        if type(call["spec"]) is BackwardSpec:
            tiles.append(2 * 4 * math.ceil(100 / call["spec"].tile_m))
            write(call["turns"], torch.full((tiles[-1],), 7, dtype=torch.int32))
        elif type(call["spec"]) is FinishSpec:
            assert torch.equal(memory(call["turns"], tiles[-1], torch.int32), torch.full((tiles[-1],), 7))

    kernels.look = look
    backward(*tensors(), **options)
    turns = {kernels.one(kind)["turns"] for kind in KINDS}
    assert len(turns) == 1
    assert 0 not in turns


def test_what_is_remembered_of_one_kind_is_not_used_for_the_other(kernels):
    q, k, v = tensors()
    backward(q, k, v)
    backward(q, k, v, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        backward(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    backward(q, k, v)
    assert [call["spec"].deterministic for call in kernels.of(BackwardSpec)] == [False, True, True, False]


def test_each_part_of_wide_values_begins_with_new_turns(kernels):
    def look(call):
        kind = type(call["spec"])
        if kind is PrepareSpec:
            write(call["turns"], torch.zeros(16, dtype=torch.int32))
        elif kind is BackwardSpec:
            assert not memory(call["turns"], 16, torch.int32).any()
            write(call["turns"], torch.full((16,), 7, dtype=torch.int32))
        else:
            assert memory(call["turns"], 16, torch.int32).eq(7).all()

    kernels.look = look
    backward(*tensors(head_dim=64, head_dim_v=512), deterministic=True)
    assert len(kernels.of(BackwardSpec)) == 2


# Memory of calls --------------------------------------------------------------------------------------------------


def test_a_repeated_call_is_not_planned_again(kernels, monkeypatch):
    q, k, v = tensors()
    backward(q, k, v)
    monkeypatch.setattr(hopper_backward, "check_forward", lambda *_: pytest.fail("checked again"))
    backward(q + 1, k, v)
    assert len(kernels.specs) == 3
    assert len(kernels.calls) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True},
        {"softmax_scale": 0.5},
        {"deterministic": True},
        {"window_left": 5},
        {"dtype": torch.float16},
        {"seqlen_q": 300},
        {"heads_kv": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_a_launch_is_part_of_the_key(kernels, change):
    sizes = {name: value for name, value in change.items() if name in ("dtype", "seqlen_q", "heads_kv")}
    options = {name: value for name, value in change.items() if name not in sizes}
    backward(*tensors())
    backward(*tensors(**sizes), **options)
    addresses = {*ARGUMENTS[BackwardSpec][:12]}
    first, second = ({k: v for k, v in call.items() if k not in addresses} for call in kernels.of(BackwardSpec))
    assert first != second


def test_the_memory_of_calls_does_not_grow_forever(kernels, monkeypatch):
    monkeypatch.setattr(hopper, "MAX_REMEMBERED", 4)
    for seqlen in range(1, 12):
        backward(*tensors(seqlen_q=seqlen))
    assert len(hopper_backward._known) <= 4


def test_no_launch_has_more_blocks_than_key_tiles_or_multiprocessors(kernels):
    for batch, seqlen_k, heads in ((1, 1, 1), (1, 193, 4), (3, 5000, 8)):
        backward(*tensors(batch=batch, seqlen_k=seqlen_k, heads_q=heads, heads_kv=heads))
        main = kernels.of(BackwardSpec)[-1]
        tiles = math.ceil(seqlen_k / main["spec"].tile_n) * heads * batch
        assert 1 <= main["blocks"] <= min(tiles, H200.sm_count)


# The short way --------------------------------------------------------------------------------------------------------

#: Of a launch, what depends on where memory happens to be.
ADDRESSES = {
    "q",
    "k",
    "v",
    "dout",
    "out",
    "dq",
    "dk",
    "dv",
    "lse",
    "dlse",
    "lse_log2",
    "delta",
    "sums",
    "turns",
    "counter",
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_left": 30},
        {"softcap": 5.0},
        {"deterministic": True},
        {"dlse": torch.randn(2, 4, 100)},
    ],
    ids=str,
)
def test_plain_calls_launch_what_the_long_way_does(kernels, options):
    q, k, v = tensors(heads_kv=4)
    given = results_of(q, v)
    backward(q, k, v, given=given, **options)
    assert all(known.plain for known in hopper_backward._known.values())
    short, kernels.calls = kernels.calls, []
    backward(q, k, v, given=given, into=tuple(torch.empty_like(x) for x in (q, k, v)), **options)
    assert len(short) == len(kernels.calls) == 3
    for one, other in zip(short, kernels.calls, strict=True):
        assert {name: x for name, x in one.items() if name not in ADDRESSES | {"stream"}} == {
            name: x for name, x in other.items() if name not in ADDRESSES | {"stream"}
        }
        assert [bool(one[name]) for name in sorted(ADDRESSES & set(one))] == [
            bool(other[name]) for name in sorted(ADDRESSES & set(other))
        ]
        assert all(one[name] % 16 == 0 for name in ADDRESSES & set(one))


def test_the_sums_and_statistics_of_a_plain_call_do_not_overlap(kernels):
    q, k, v = tensors(seqlen_q=333, seqlen_k=400, heads_kv=4)
    backward(q, k, v)
    main = kernels.one(BackwardSpec)
    spec = main["spec"]
    rows = q.shape[0] * q.shape[2] * math.ceil(333 / spec.tile_m) * spec.tile_m
    assert main["lse"] - main["dq"] == 4 * rows * spec.head_dim
    assert main["delta"] - main["lse"] == 4 * rows
