"""Gradients with a block mask on a Hopper GPU, against autograd of the float64 oracle."""

import itertools
import math

import pytest
import torch
from test_backward import DEVICE, count_of_differences, gradients_of, random_dlse

import fa3
from fa3 import mods
from fa3.backends import hopper_backward
from fa3.mods import BLOCK, CUT, EMPTY, WHOLE, BlockMask, MaskMod, ordered_blocks
from fa3.options import Options
from oracle_gradients import assert_gradients_accurate

HEAD_DIMS = (64, 128, 256)
LENGTHS = ((700, 700), (130, 900), (900, 130), (64, 127), (256, 512), (1025, 1023))

#: Query heads, K/V heads; batch and heads of the mask: its own for each, or the same for all.
SHARING = (((4, 2), (2, 4)), ((6, 1), (1, 6)), ((3, 3), (2, 1)), ((8, 1), (1, 1)))

_numbers = itertools.count()

of_head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def documents(batch, length):
    """Two documents in each sequence, with a causal mask in each: blocks of every kind, if the length has some."""
    places = torch.arange(length, device=DEVICE)
    ends = torch.tensor([0.8, 0.35], device=DEVICE)[torch.arange(batch, device=DEVICE) % 2, None] * length
    return mods.document((places >= ends).int(), causal=True)


def random_blocks(sizes, lengths, batch, missing=0.3, seed=0):
    """A block mask of causal documents in which blocks are missing, and a mask that says the same of each score.

    Every head has blocks of its own. A block of queries sees nothing at all, and a block of keys is seen by nobody, in
    some of them.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)
    mask_mod = documents(batch, max(lengths))
    kinds = fa3.create_block_mask(mask_mod, batch, None, *lengths, device=DEVICE).kinds()
    # A mask that sequences share must be right for all of them.
    kinds = kinds if sizes[0] > 1 else torch.where((kinds == kinds[:1]).all(0, keepdim=True), kinds[:1], CUT)
    kinds = kinds.expand(*sizes, -1, -1).clone()
    keep = torch.rand(kinds.shape, generator=generator, device=DEVICE) >= missing
    if keep[0, 0].numel() > 4:
        for dim in (2, 3):
            keep &= torch.rand(kinds.shape, generator=generator, device=DEVICE).narrow(dim, 0, 1) >= 0.15
    kinds = torch.where(keep, kinds, EMPTY)
    keep = keep.expand(batch, -1, -1, -1)

    def twin(batch_index, head, q_index, kv_index, ids):
        of_head = head if keep.shape[1] > 1 else torch.zeros_like(head)
        seen = keep[batch_index, of_head, q_index // BLOCK, kv_index // BLOCK]
        return seen & mask_mod.torch(batch_index, head, q_index, kv_index, ids)

    block_mask = BlockMask(mask_mod, *lengths, *ordered_blocks(kinds))
    # A name has one twin; no kernel has one of these.
    return block_mask, MaskMod(f"oracle:mask_{next(_numbers)}", twin, mask_mod.aux)


def check(q, k, v, block_mask, dense, dlse=None, **options):
    gradients, dout = gradients_of(q, k, v, None, dlse, block_mask=block_mask, **options)
    assert_gradients_accurate(gradients, dout, dlse, q, k, v, mask_mod=dense, **options)


@of_head_dims
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("heads", "sizes"), SHARING, ids=str)
def test_each_listed_block_counts_once_in_every_head(heads, sizes, lengths, head_dim, make):
    q, k, v = make(2, *lengths, *heads, head_dim)
    check(q, k, v, *random_blocks(sizes, lengths, 2))


@of_head_dims
@pytest.mark.parametrize("seqlen", [100, 128, 129, 1000, 2000])
def test_causal_documents_have_the_gradients_of_their_mask(seqlen, head_dim, make):
    q, k, v = make(2, seqlen, seqlen, 4, 2, head_dim)
    mask_mod = documents(2, seqlen)
    block_mask = fa3.create_block_mask(mask_mod, 2, None, seqlen, seqlen, device=DEVICE)
    check(q, k, v, block_mask, mask_mod)


def test_whole_blocks_are_never_asked(make):
    """The gradient sees blocks that the lists call whole, though the mask would hide all of them."""
    q, k, v = make(1, 512, 512)
    ids = torch.arange(512, device=DEVICE, dtype=torch.int32)[None].contiguous()
    hides = mods.document(ids, causal=True)
    kinds = torch.full((1, 1, 4, 4), WHOLE, device=DEVICE)
    # The forward asks in the first step of a tile, whatever the lists say.
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    dout = torch.randn_like(out)
    options = Options(block_mask=BlockMask(hides, 512, 512, *ordered_blocks(kinds)))
    found = hopper_backward.backward(dout, None, q, k, v, out, lse, None, False, options)
    assert_gradients_accurate(dict(zip("qkv", found, strict=False)), dout, None, q, k, v)


@of_head_dims
def test_rows_that_see_no_key_get_and_give_nothing(head_dim, make):
    lengths = 500, 600
    q, k, v = make(2, *lengths, 4, 2, head_dim)
    block_mask, dense = random_blocks((2, 4), lengths, 2, missing=0.6, seed=1)
    out, lse = fa3.flash_attn_func(q, k, v, block_mask=block_mask, return_lse=True)
    hidden = (lse == -math.inf).mT
    assert hidden.any()
    assert not hidden.all()
    dout = torch.randn_like(out)
    clean, _ = gradients_of(q, k, v, dout, block_mask=block_mask)
    assert_gradients_accurate(clean, dout, None, q, k, v, mask_mod=dense)
    assert not clean["q"][hidden].any()
    q[hidden], dout[hidden] = math.nan, math.nan
    poisoned, _ = gradients_of(q, k, v, dout, block_mask=block_mask)
    for name in "kv":
        assert torch.isfinite(poisoned[name]).all(), name
    assert not poisoned["q"][hidden].any()


@of_head_dims
def test_blocks_that_are_not_listed_are_never_loaded(head_dim, make):
    q, k, v = make(1, 512, 512, 2, 1, head_dim)
    ids = (torch.arange(512, device=DEVICE, dtype=torch.int32)[None] // 256).contiguous()
    block_mask = fa3.create_block_mask(mods.document(ids, causal=True), 1, None, 512, 512, device=DEVICE)
    k[:, 256:], v[:, 256:] = math.nan, math.nan
    gradients, _ = gradients_of(q, k, v, block_mask=block_mask)
    for gradient in gradients.values():
        assert torch.isfinite(gradient[:, :256]).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lse_sinks_caps_and_biases_go_with_a_block_mask(head_dim, make):
    lengths = 400, 520
    q, k, v = make(2, *lengths, 4, 2, head_dim)
    lists, dense = random_blocks((1, 4), lengths, 2)
    check(q, k, v, lists, dense, random_dlse(q))
    check(q, k, v, lists, dense, sink=torch.randn(4, device=DEVICE))
    check(q, k, v, lists, dense, softcap=20.0)
    if head_dim == 64:
        check(q, k, v, lists, dense, score_mod=mods.relative_bias(torch.randn(4, 129, device=DEVICE)))


@of_head_dims
def test_in_a_fixed_order_20_repeats_agree_bitwise_and_are_accurate(head_dim, make):
    lengths = 1100, 1300
    q, k, v = make(2, *lengths, 4, 2, head_dim)
    block_mask, dense = random_blocks((2, 4), lengths, 2)
    dout = torch.randn_like(q)
    gradients, different = count_of_differences(20, (q, k, v), dout, block_mask=block_mask)
    assert different == 0
    assert_gradients_accurate(gradients, dout, None, q, k, v, mask_mod=dense)


def test_a_mask_that_changes_in_place_has_new_gradients(make):
    lengths = 512, 512
    q, k, v = make(1, *lengths, 2, 2)
    first, dense = random_blocks((1, 2), lengths, 1)
    check(q, k, v, first, dense)
    second, dense = random_blocks((1, 2), lengths, 1, seed=9)
    first.counts.copy_(second.counts)
    first.indices.copy_(second.indices)
    check(q, k, v, first, dense)


def test_gradients_in_a_graph_follow_the_lists_of_the_mask(make):
    """The lists by keys are made in the graph, so that it may be run again with other lists in the same memory."""
    lengths = 512, 384
    q, k, v = make(1, *lengths, 2, 2)
    block_mask, _ = random_blocks((1, 2), lengths, 1)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)

    def step():
        return torch.autograd.grad(fa3.flash_attn_func(*inputs, block_mask=block_mask), inputs, dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        gradients = step()
    other, dense = random_blocks((1, 2), lengths, 1, seed=9)
    block_mask.counts.copy_(other.counts)
    block_mask.indices.copy_(other.indices)
    graph.replay()
    assert_gradients_accurate(dict(zip("qkv", gradients, strict=True)), dout, None, q, k, v, mask_mod=dense)
