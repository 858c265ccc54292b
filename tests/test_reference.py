"""The oracle against attention written as loops over single numbers."""

import itertools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa3
from fa3.mods import MaskMod, ScoreMod, alibi
from fa3.reference import visible_keys


def attention_of_one_row(q, keys, values, scale, softcap, sink, qv, change):
    """q, qv: lists; keys, values: lists of lists, the visible ones only; change(score, place). Returns (out, lse)."""
    scores = []
    for place, (key, value) in enumerate(zip(keys, values, strict=True)):
        score = sum(a * b for a, b in zip(q, key, strict=True))
        if qv is not None:
            score += sum(a * b for a, b in zip(qv, value, strict=True))
        score *= scale
        score = softcap * math.tanh(score / softcap) if softcap else score
        scores.append(change(score, place))
    logits = scores + ([] if sink is None else [sink])
    if not logits:
        return None, -math.inf
    largest = max(logits)
    total = sum(math.exp(x - largest) for x in logits)
    weights = [math.exp(x - largest) / total for x in scores]
    width = len(values[0]) if values else 0
    out = [sum(w * value[c] for w, value in zip(weights, values, strict=True)) for c in range(width)]
    return out or None, largest + math.log(total)


def sees(i, j, seqlen_q, seqlen_k, causal, window, chunk):
    position = i + seqlen_k - seqlen_q
    left, right = window
    if causal and j > position:
        return False
    if left != -1 and j < position - left:
        return False
    if right != -1 and not causal and j > position + right:
        return False
    return not chunk or chunk * math.floor(position / chunk) <= j < chunk * math.floor(position / chunk) + chunk


def bend(score, batch, head, q_index, kv_index, factors, offsets):
    """Of tensors and of plain numbers alike."""
    return score * factors[batch] + score**2 * head + offsets[kv_index] - factors[batch] * q_index / 4


def sieve(batch, head, q_index, kv_index, numbers):
    return (q_index + numbers[head] * kv_index + batch) % 3 != 1


options = {
    "causal": st.booleans(),
    "window": st.tuples(st.integers(-1, 4), st.integers(-1, 4)),
    "chunk": st.integers(0, 4),
}


@settings(max_examples=80, deadline=None)
@given(
    seqlen_q=st.integers(1, 7),
    seqlen_k=st.integers(0, 7),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    softcap=st.sampled_from([0.0, 1.5]),
    with_sink=st.booleans(),
    with_qv=st.booleans(),
    with_score_mod=st.booleans(),
    with_mask_mod=st.booleans(),
    seed=st.integers(0, 1000),
    **options,
)
def test_the_oracle_is_attention_by_definition(
    seqlen_q, seqlen_k, heads_kv, group, softcap, with_sink, with_qv, with_score_mod, with_mask_mod, seed, causal,
    window, chunk,
):  # fmt: skip
    torch.manual_seed(seed)
    heads_q = heads_kv * group
    q = torch.randn(2, seqlen_q, heads_q, 4, dtype=torch.float64)
    k = torch.randn(2, seqlen_k, heads_kv, 4, dtype=torch.float64)
    v = torch.randn(2, seqlen_k, heads_kv, 3, dtype=torch.float64)
    sink = torch.randn(heads_q) if with_sink else None
    qv = torch.randn(2, seqlen_q, heads_q, 3, dtype=torch.float64) if with_qv else None
    score_aux = torch.randn(2), torch.randint(0, 5, (max(seqlen_k, 1),), dtype=torch.int32)
    mask_aux = (torch.randint(0, 5, (heads_q,), dtype=torch.int32),)
    out, lse = fa3.reference(
        q,
        k,
        v,
        causal=causal,
        window_size=window,
        attention_chunk=chunk,
        softcap=softcap,
        sink=sink,
        qv=qv,
        score_mod=ScoreMod("reference_mods:bend", bend, score_aux) if with_score_mod else None,
        mask_mod=MaskMod("reference_mods:sieve", sieve, mask_aux) if with_mask_mod else None,
    )
    assert out.shape == (2, seqlen_q, heads_q, 3)
    assert lse.shape == (2, heads_q, seqlen_q)
    score_lists, mask_lists = [x.tolist() for x in score_aux], [x.tolist() for x in mask_aux]
    for b, h, i in itertools.product(range(2), range(heads_q), range(seqlen_q)):
        visible = [
            j
            for j in range(seqlen_k)
            if sees(i, j, seqlen_q, seqlen_k, causal, window, chunk)
            and (not with_mask_mod or sieve(b, h, i, j, *mask_lists))
        ]

        def change(score, place, b=b, h=h, i=i, visible=visible):
            return bend(score, b, h, i, visible[place], *score_lists) if with_score_mod else score

        expected, expected_lse = attention_of_one_row(
            q[b, i, h].tolist(),
            k[b, visible, h // group].tolist(),
            v[b, visible, h // group].tolist(),
            (4 + (3 if with_qv else 0)) ** -0.5,
            softcap,
            None if sink is None else sink[h].item(),
            None if qv is None else qv[b, i, h].tolist(),
            change,
        )
        assert out[b, i, h].tolist() == pytest.approx(expected or [0.0] * 3, abs=1e-12)
        assert lse[b, h, i].item() == pytest.approx(expected_lse, abs=1e-12)


@given(seqlen_q=st.integers(1, 9), seqlen_k=st.integers(0, 9), **options)
@settings(max_examples=80, deadline=None)
def test_masks_show_the_keys_that_the_definition_names(seqlen_q, seqlen_k, causal, window, chunk):
    mask = visible_keys(seqlen_q, seqlen_k, causal, window, chunk)
    expected = [
        [sees(i, j, seqlen_q, seqlen_k, causal, window, chunk) for j in range(seqlen_k)] for i in range(seqlen_q)
    ]
    assert mask.tolist() == expected


def test_it_answers_in_float64_for_every_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        out, lse = fa3.reference(*(torch.randn(1, 3, 2, 8).to(dtype) for _ in range(3)))
        assert out.dtype == lse.dtype == torch.float64


def test_a_step_over_heads_and_rows_changes_nothing(monkeypatch):
    q, k, v = torch.randn(2, 9, 4, 8), torch.randn(2, 11, 2, 8), torch.randn(2, 11, 2, 8)
    mods = {
        "score_mod": ScoreMod("reference_mods:bend", bend, (torch.randn(2), torch.arange(11, dtype=torch.int32))),
        "mask_mod": MaskMod("reference_mods:sieve", sieve, (torch.arange(4, dtype=torch.int32),)),
    }
    whole = fa3.reference(q, k, v, causal=True, **mods)
    for budget in (1, 40, 250):
        # The name fa3.reference is the function; the module is found among the loaded ones.
        monkeypatch.setattr(sys.modules["fa3.reference"], "_SCORES_PER_STEP", budget)
        in_steps = fa3.reference(q, k, v, causal=True, **mods)
        for one, other in zip(whole, in_steps, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_a_row_without_keys_has_out_0_lse_minus_infinity_and_gradient_0():
    q = torch.randn(1, 5, 1, 8, requires_grad=True)
    k, v = torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8)
    out, lse = fa3.reference(q, k, v, causal=True)
    assert (out[0, :2] == 0).all()
    assert (lse[0, 0, :2] == -math.inf).all()
    assert torch.isfinite(lse[0, 0, 2:]).all()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert (gradient[0, :2] == 0).all()
    assert torch.isfinite(gradient).all()


def test_without_any_key_the_sink_is_the_lse():
    sink = torch.tensor([0.5, -2.0])
    out, lse = fa3.reference(torch.randn(1, 3, 2, 8), torch.randn(1, 0, 2, 8), torch.randn(1, 0, 2, 8), sink=sink)
    assert (out == 0).all()
    torch.testing.assert_close(lse[0], sink.double()[:, None].expand(2, 3))


def test_empty_problems_have_empty_results():
    out, lse = fa3.reference(torch.randn(0, 3, 2, 8), torch.randn(0, 4, 2, 8), torch.randn(0, 4, 2, 16))
    assert out.shape == (0, 3, 2, 16)
    assert lse.shape == (0, 2, 3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, not list"),
        ({"sink": [1.0, 2.0]}, TypeError, "sink must be a torch.Tensor, not list"),
        ({"k": torch.zeros(1, 3, 2, 8, dtype=torch.int32)}, TypeError, "k has dtype torch.int32: must be a float"),
        ({"v": torch.zeros(1, 3, 2, 8, device="meta")}, ValueError, "devices cpu, cpu and meta"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale=nan: must be finite and positive"),
        ({"softmax_scale": 2**2000}, ValueError, "softmax_scale is too large"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale='1': must be a float"),
        ({"causal": 1}, TypeError, "causal=1: must be True or False"),
        ({"score_mod": abs}, TypeError, "score_mod must be a ScoreMod, not builtin"),
        ({"mask_mod": ScoreMod("reference_mods:bend", bend)}, TypeError, "mask_mod must be a MaskMod, not ScoreMod"),
    ],
)
def test_bad_kinds_of_arguments_are_named(change, error, words):
    arguments = {"q": torch.zeros(1, 3, 2, 8), "k": torch.zeros(1, 3, 2, 8), "v": torch.zeros(1, 3, 2, 8), **change}
    with pytest.raises(error, match=words):
        fa3.reference(**arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window_size": (-2, 0)}, "window_size"),
        ({"attention_chunk": -1}, "attention_chunk"),
        ({"softcap": -1.0}, "softcap"),
        ({"sink": torch.zeros(3)}, r"sink has shape \(3,\)"),
        ({"qv": torch.zeros(1, 3, 2, 4)}, r"qv has shape"),
        ({"k": torch.zeros(1, 3, 2, 16)}, "do not fit together"),
        ({"q": torch.zeros(3, 2, 8)}, "3, 4 and 4 dims"),
        ({"q": torch.zeros(1, 3, 3, 8)}, "q has 3 heads, k and v have 2"),
        ({"score_mod": alibi(torch.ones(3))}, r"slopes has shape \(3,\)"),
    ],
)
def test_bad_arguments_are_named(change, words):
    arguments = {"q": torch.zeros(1, 3, 2, 8), "k": torch.zeros(1, 3, 2, 8), "v": torch.zeros(1, 3, 2, 8), **change}
    with pytest.raises(ValueError, match=words):
        fa3.reference(**arguments)
