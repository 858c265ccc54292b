"""Options of a call on a Hopper GPU, against the float64 oracle, which has all of them too."""

import itertools
import math
import random

import pytest
import torch

import fa3
from fa3 import mods
from fa3.backends import hopper
from fa3.options import Options
from fa3.presets import shipped_specs

DTYPES = (torch.bfloat16, torch.float16)
LENGTHS = ((1, 1), (3, 799), (113, 203), (239, 1), (300, 100), (517, 1030))


# Head dims ----------------------------------------------------------------------------------------------------------

HEAD_DIMS = (
    *((d, d) for d in (8, 16, 40, 72, 80, 96, 104, 160, 184, 192, 200, 248)),
    *((192, 128), (136, 128), (104, 120), (64, 128), (256, 64), (8, 256), (64, 256), (24, 200), (128, 8), (88, 96)),
    *((64, 512), (32, 264), (8, 320), (64, 384)),
)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_every_head_dim_is_accurate(dims, causal, make, attend, assert_accurate):
    head_dim, head_dim_v = dims
    for number, lengths in enumerate(LENGTHS):
        q, k, v = make(2, *lengths, 6, 2, head_dim, DTYPES[number % 2], head_dim_v)
        assert_accurate(*attend(q, k, v, causal=causal), q, k, v, causal=causal)


def test_columns_beyond_the_head_dims_are_neither_read_nor_written(make, attend, assert_accurate):
    wide_q, wide_k, wide_v = make(2, 150, 260, 4, 2, 128)
    for wide in (wide_q, wide_k, wide_v):
        wide[..., 72:] = math.nan
    q, k, v = wide_q[..., :72], wide_k[..., :72], wide_v[..., :40]
    assert_accurate(*attend(q, k, v), q, k, v)


@pytest.mark.parametrize("spec", shipped_specs("sweep"), ids=lambda spec: spec.name)
def test_every_candidate_of_the_sweep_is_accurate(spec, make, attend, assert_accurate, available):
    available(spec)
    options = {"window_size": (70, 20)} if spec.mask == "window" else {}

    def function(q, k, v, softmax_scale, causal, return_lse, window_size=(-1, -1)):
        return hopper.forward_with_spec(
            spec, q, k, v, softmax_scale, return_lse=return_lse, options=Options(*window_size) if options else None
        )

    for lengths in ((3, 799), (300, 100), (1023, 1024)):
        q, k, v = make(2, *lengths, 6, 2, spec.head_dim, torch.bfloat16, spec.head_dim_v)
        out, lse = attend(q, k, v, causal=spec.causal, function=function, **options)
        assert_accurate(out, lse, q, k, v, causal=spec.causal, **options)


# Windows and chunks -------------------------------------------------------------------------------------------------

WINDOWS = ((0, 0), (1, 0), (0, 5), (63, 0), (64, 64), (100, 3), (-1, 17), (17, -1), (200, 200), (1000, 0), (5000, 9))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
def test_windows_are_accurate(window_size, head_dim, causal, make, attend, assert_accurate):
    for lengths in LENGTHS:
        q, k, v = make(2, *lengths, 4, 2, head_dim)
        out, lse = attend(q, k, v, causal=causal, window_size=window_size)
        assert_accurate(out, lse, q, k, v, causal=causal, window_size=window_size)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("attention_chunk", [1, 7, 64, 100, 4096])
def test_chunks_are_accurate(attention_chunk, causal, make, attend, assert_accurate):
    for lengths, window_size in itertools.product(LENGTHS, ((-1, -1), (30, 4))):
        q, k, v = make(2, *lengths)
        options = {"window_size": window_size, "attention_chunk": attention_chunk}
        assert_accurate(*attend(q, k, v, causal=causal, **options), q, k, v, causal=causal, **options)


def test_keys_outside_a_window_are_never_loaded_into_the_result(make, attend, assert_accurate):
    q, k, v = make(1, 700, 700)
    seen = k.clone(), v.clone()
    k[:, :300], v[:, :300] = math.nan, math.nan
    out, _ = attend(q, k, v, causal=True, window_size=(100, 0))
    rows = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
    rows[:, 400 + 192 :] = True  # rows whose tiles do not reach the bad keys
    expected, _ = attend(q, *seen, causal=True, window_size=(100, 0))
    assert torch.equal(out[rows], expected[rows])


# Softcap, sinks, qv -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (90, 10)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap_is_accurate(head_dim, mask, make, attend, assert_accurate):
    for lengths, softcap in itertools.product(LENGTHS[1:5], (0.5, 15.0, 50.0)):
        q, k, v = make(2, *lengths, 4, 2, head_dim)
        assert_accurate(*attend(q, k, v, 0.3, softcap=softcap, **mask), q, k, v, 0.3, softcap=softcap, **mask)


@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window_size": (90, 0)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sinks_are_accurate(head_dim, mask, sink_dtype, make, attend, assert_accurate):
    sink = torch.tensor([0.0, 3.0, -2.0, 8.0, 40.0, -1e4, 1e4, -math.inf], device="cuda").to(sink_dtype)
    for lengths in LENGTHS:
        q, k, v = make(2, *lengths, 8, 2, head_dim)
        assert_accurate(*attend(q, k, v, sink=sink, **mask), q, k, v, sink=sink, **mask)


def test_the_sink_of_a_call_without_keys_is_its_lse(make):
    q, k, v = make(2, 77, 0)
    sink = torch.randn(4, device="cuda")
    out, lse = fa3.flash_attn_func(q, k, v, sink=sink, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sink[None, :, None].expand(2, 4, 77))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (64, 256), (32, 200), (128, 128)], ids=str)
def test_qv_is_accurate(dims, causal, make, attend, assert_accurate):
    for lengths in LENGTHS:
        q, k, v = make(2, *lengths, 4, 2, dims[0], head_dim_v=dims[1])
        qv = torch.randn(*q.shape[:3], dims[1], device="cuda").to(q.dtype)
        assert_accurate(*attend(q, k, v, causal=causal, qv=qv), q, k, v, causal=causal, qv=qv)


def test_qv_that_tma_cannot_read_is_copied(make, attend, assert_accurate):
    q, k, v = make(2, 100, 150)
    qv = torch.randn(2, 100, 4, 132, device="cuda").to(q.dtype)[..., 1:129]
    assert_accurate(*attend(q, k, v, qv=qv), q, k, v, qv=qv)


def test_qv_beside_very_wide_values_names_the_way_out(make):
    q, k, v = make(1, 64, 64, head_dim=64, head_dim_v=512)
    with pytest.raises(NotImplementedError, match="qv beside head_dim_v=512"):
        fa3.flash_attn_func(q, k, v, qv=torch.zeros_like(q).repeat(1, 1, 1, 8))


# Packed heads, fewer multiprocessors --------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("heads", [(2, 1), (6, 2), (8, 2), (10, 2), (16, 1), (40, 8), (71, 1)], ids=str)
def test_packed_heads_are_accurate(heads, mask, head_dim, make, attend, assert_accurate):
    for seqlen_q, seqlen_k in ((1, 1), (1, 700), (3, 250), (17, 300), (100, 130), (130, 60)):
        q, k, v = make(2, seqlen_q, seqlen_k, *heads, head_dim)
        sink = torch.randn(heads[0], device="cuda")
        packed = attend(q, k, v, pack_gqa=True, sink=sink, **mask)
        assert_accurate(*packed, q, k, v, sink=sink, **mask)
        alone = attend(q, k, v, pack_gqa=False, sink=sink, **mask)
        assert_accurate(*alone, q, k, v, sink=sink, **mask)


def test_packed_heads_read_any_strides_and_narrow_heads(make, attend, assert_accurate):
    q, k, v = make(2, 20, 300, 8, 2, 128)
    wide = torch.full((2, 20, 3, 8, 128), math.nan, device="cuda", dtype=q.dtype)
    wide[:, :, 1] = q
    narrow = wide[:, :, 1, :, :104]
    narrow_k, narrow_v = k[..., :104], v[..., :72]
    assert_accurate(*attend(narrow, narrow_k, narrow_v, pack_gqa=True), narrow, narrow_k, narrow_v)


@pytest.mark.parametrize("sm_margin", [1, 100, 131, 5000])
def test_a_margin_changes_no_result(sm_margin, make, attend):
    q, k, v = make(2, 700, 900)
    out, lse = attend(q, k, v, causal=True)
    other_out, other_lse = attend(q, k, v, causal=True, sm_margin=sm_margin)
    # Fewer multiprocessors may mean other tiles.
    torch.testing.assert_close(other_out, out, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(other_lse, lse, rtol=0, atol=1e-3)


# Modifications ------------------------------------------------------------------------------------------------------


def ready_made(batch, heads, seqlen, name):
    generator = torch.Generator("cuda").manual_seed(5)
    ids = torch.randint(0, 4, (batch, seqlen), generator=generator, device="cuda", dtype=torch.int32).sort(1).values
    prefix = torch.randint(0, seqlen + 1, (batch,), generator=generator, device="cuda", dtype=torch.int32)
    return {
        "alibi": lambda: mods.alibi(mods.alibi_slopes(heads, "cuda")),
        "bias": lambda: mods.relative_bias(torch.randn(heads, 129, generator=generator, device="cuda")),
        "prefix": lambda: mods.prefix_lm(prefix),
        "document": lambda: mods.document(ids),
        "document_causal": lambda: mods.document(ids, causal=True),
    }[name]()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(2, 2), (113, 203), (600, 600)], ids=str)
def test_alibi_is_accurate(lengths, head_dim, make, attend, assert_accurate):
    q, k, v = make(2, *lengths, 6, 2, head_dim)
    score_mod = ready_made(2, 6, lengths[1], "alibi")
    out, lse = attend(q, k, v, causal=True, score_mod=score_mod)
    assert_accurate(out, lse, q, k, v, causal=True, score_mod=score_mod)


@pytest.mark.parametrize("lengths", [(40, 40), (200, 200), (600, 600), (333, 333)], ids=str)
def test_a_score_mod_a_mask_mod_a_window_and_a_cap_at_once_are_accurate(lengths, make, attend, assert_accurate):
    q, k, v = make(2, *lengths, 6, 2)
    options = {"score_mod": ready_made(2, 6, lengths[1], "bias"), "mask_mod": ready_made(2, 6, lengths[1], "prefix")}
    assert_accurate(*attend(q, k, v, **options), q, k, v, **options)
    options |= {"window_size": (77, 33), "softcap": 20.0, "sink": torch.randn(6, device="cuda")}
    assert_accurate(*attend(q, k, v, **options), q, k, v, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [1, 100, 128, 300, 1024, 1333])
def test_block_masks_are_accurate(seqlen, head_dim, make, attend, assert_accurate):
    q, k, v = make(2, seqlen, seqlen, 6, 2, head_dim)
    mask_mod = ready_made(2, 6, seqlen, "document_causal")
    block_mask = fa3.create_block_mask(mask_mod, 2, None, seqlen, seqlen, device="cuda")
    assert_accurate(*attend(q, k, v, block_mask=block_mask), q, k, v, mask_mod=mask_mod)


def test_blocks_outside_a_block_mask_are_never_loaded(make, attend):
    q, k, v = make(1, 512, 512)
    ids = torch.arange(512, device="cuda", dtype=torch.int32)[None] // 256
    block_mask = fa3.create_block_mask(mods.document(ids.contiguous(), causal=True), 1, None, 512, 512, device="cuda")
    k[:, 256:], v[:, 256:] = math.nan, math.nan
    out, _ = attend(q, k, v, block_mask=block_mask)
    assert torch.isfinite(out[:, :256]).all()
    assert torch.isnan(out[:, 256:]).any()


# Everything at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_random_combinations_are_accurate(seed, make, attend, assert_accurate, monkeypatch):
    chance = random.Random(seed)
    heads_kv = chance.choice((1, 2, 3))
    heads = heads_kv * chance.choice((1, 2, 4, 5))
    head_dim, head_dim_v = 8 * chance.randint(1, 16), 8 * chance.randint(1, 16)
    dims = (128, 128) if max(head_dim, head_dim_v) > 96 else (96, 96) if max(head_dim, head_dim_v) > 64 else (64, 64)
    lengths = chance.randint(1, 700), chance.randint(1, 900)
    q, k, v = make(chance.randint(1, 3), *lengths, heads, heads_kv, head_dim, torch.bfloat16, head_dim_v)
    mask = chance.choice(({}, {"causal": True}, {"window_size": (chance.randint(0, 300), chance.randint(-1, 300))}))
    options = dict(mask)
    if "window_size" in mask and chance.random() < 0.5:
        options["attention_chunk"] = chance.randint(1, 400)
    if chance.random() < 0.4:
        options["sink"] = torch.randn(heads, device="cuda")
    if dims != (96, 96) and chance.random() < 0.3:
        options["softcap"] = chance.uniform(1.0, 60.0)
    assert_accurate(*attend(q, k, v, **options), q, k, v, **options)
