"""Gradients on a Hopper GPU as a guest of PyTorch: compilation, checkpoints, graphs and streams."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fa3

#: Clock cycles of `torch.cuda._sleep`: about 50 ms, longer than any test needs to run ahead.
LONG = 100_000_000


def test_torch_compile_keeps_forward_and_backward_in_one_graph_each(make):
    tensors = make(2, 300, 400)
    dout = torch.randn_like(tensors[0])

    def loss(q, k, v):
        out, lse = fa3.flash_attn_func(q * 2, k, v, causal=True, return_lse=True, deterministic=True)
        return (out * dout).sum() + lse.sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        function(*leaves).backward()
        results.append([x.grad for x in leaves])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_activation_checkpointing_gives_the_same_gradients(make):
    tensors = make(2, 300, 400)
    dout = torch.randn_like(tensors[0])

    def attend(q, k, v):
        return fa3.flash_attn_func(q * 2, k, v, causal=True, deterministic=True)

    results = []
    for function in (attend, lambda *inputs: checkpoint(attend, *inputs, use_reentrant=False)):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        results.append(torch.autograd.grad(function(*leaves), leaves, dout))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
def test_a_captured_backward_replays_with_new_inputs(deterministic, make):
    q, k, v = (x.requires_grad_() for x in make(2, 500, 600))
    dout = torch.randn_like(q)

    def step():
        out = fa3.flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
        return torch.autograd.grad(out, (q, k, v), dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for tensor in (q, k, v, dout):
                tensor.normal_()
        for gradient in captured:
            gradient.fill_(math.nan)
        graph.replay()
        for gradient, expected in zip(captured, step(), strict=True):
            if deterministic:
                assert torch.equal(gradient, expected)
            else:
                torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=1e-3)


def test_torch_compile_may_put_forward_and_backward_into_graphs_of_its_own(make):
    """Its check that a graph's memory holds nothing but results is on by default."""
    compiled = torch.compile(
        lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True), mode="reduce-overhead", fullgraph=True
    )
    for _ in range(5):
        q, k, v = (x.requires_grad_() for x in make(2, 512, 512, 4, 4, 64))
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(q, k, v)
        dout = torch.randn_like(out)
        found = [x.clone() for x in torch.autograd.grad(out, (q, k, v), dout)]
        expected = torch.autograd.grad(fa3.flash_attn_func(q, k, v, causal=True), (q, k, v), dout)
        for gradient, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=2**-7, atol=1e-3)


def test_backwards_on_two_streams_do_not_disturb_each_other(make):
    problems = [make(2, 600, 700, 8, 2, 128), make(3, 500, 900, 4, 4, 64)]
    douts = [torch.randn_like(q) for q, _, _ in problems]

    def step(index):
        leaves = [x.detach().requires_grad_() for x in problems[index]]
        out = fa3.flash_attn_func(*leaves, causal=True, deterministic=True)
        return torch.autograd.grad(out, leaves, douts[index])

    expected = [step(index) for index in range(2)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = [[], []]
    # Both streams sleep while the host enqueues: they start together and overlap.
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
    for _ in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[index].append(step(index))
    torch.cuda.synchronize()
    for index in range(2):
        for found in results[index]:
            assert all(torch.equal(one, other) for one, other in zip(found, expected[index], strict=True))


def test_in_a_fixed_order_a_block_waits_only_for_running_ones(make):
    """Each launch has more tiles of keys than the card has room for, and gets it in parts, as others leave it."""
    q, k, v = make(1, 4096, 4096, 8, 8, 64)
    dout = torch.randn_like(q)

    def step():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = fa3.flash_attn_func(*leaves, deterministic=True)
        return torch.autograd.grad(out, leaves, dout)

    expected = step()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1, 0, -1)]
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(step())
    torch.cuda.synchronize()
    for found in results:
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_backward_does_not_wait_for_the_gpu(make):
    q, k, v = (x.requires_grad_() for x in make(2, 300, 300))
    dout = torch.randn_like(q)
    torch.autograd.grad(fa3.flash_attn_func(q, k, v), (q, k, v), dout)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    torch.autograd.grad(fa3.flash_attn_func(q, k, v), (q, k, v), dout)
    ahead = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert ahead
