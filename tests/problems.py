"""Problems for tests of the plan: one by name, and any that a call may describe."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fa3.problem import Problem, max_head_dim_v


def problem_of(**changes: Any) -> Problem:
    """Two sequences of a thousand tokens, 16 query heads on 4 K/V heads of 128 columns, and what is changed of that."""
    fields: dict[str, Any] = {
        "batch": 2,
        "seqlen_q": 1000,
        "seqlen_k": 1000,
        "heads_q": 16,
        "heads_kv": 4,
        "head_dim": 128,
        "head_dim_v": 128,
        "dtype": "bf16",
        "softmax_scale": 0.1,
        **changes,
    }
    if "head_dim" in changes:
        fields["head_dim_v"] = changes.get("head_dim_v", changes["head_dim"])
    return Problem(**fields)


#: Lengths around those of tiles, of rows of the tile tables, and long ones.
LENGTHS = st.one_of(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1024, 1025, 2048, 2049, 100_000]))

#: What of the fields of a problem changes no kernel's machine code but its mask, beyond sizes.
PLAIN = ("causal", "window_left", "window_right", "attention_chunk", "sm_margin", "sink", "return_lse")


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a problem that has output elements and keys."""
    heads_kv, group = draw(st.integers(1, 9)), draw(st.sampled_from([1, 1, 2, 4, 8, 16]))
    head_dim = 8 * draw(st.integers(1, 32))
    return {
        "batch": draw(st.integers(1, 20)),
        "seqlen_q": draw(LENGTHS),
        "seqlen_k": draw(LENGTHS),
        "heads_q": heads_kv * group,
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": draw(
            st.one_of(st.just(head_dim), st.integers(1, max_head_dim_v(head_dim) // 8).map(lambda n: 8 * n))
        ),
        "dtype": draw(st.sampled_from(["fp16", "bf16"])),
    }


@st.composite
def masks(draw: st.DrawFn) -> dict[str, Any]:
    """A causal mask, a window and chunks, or some of them."""
    side = st.one_of(st.just(-1), st.integers(-1, 300), st.integers(-1, 10**6))
    return {
        "causal": draw(st.booleans()),
        "window_left": draw(side),
        "window_right": draw(side),
        "attention_chunk": draw(st.one_of(st.just(0), st.integers(1, 300), st.integers(0, 10**6))),
    }


@st.composite
def plain_problems(draw: st.DrawFn) -> Problem:
    """Problems of calls without options but windows, chunks, a sink and free multiprocessors."""
    others = {name: draw(st.booleans()) for name in ("sink", "return_lse")}
    return problem_of(**draw(sizes()), **draw(masks()), **others, sm_margin=draw(st.sampled_from([0, 0, 3, 131, 500])))


@st.composite
def any_problems(draw: st.DrawFn) -> Problem:
    """Problems of calls with any options."""
    block_sparse = draw(st.booleans())
    options = {
        "softcap": draw(st.sampled_from([0.0, 0.0, 30.0])),
        "qv": draw(st.booleans()),
        "pack_gqa": draw(st.sampled_from([None, False, True])),
        "sm_margin": draw(st.sampled_from([0, 5])),
        "score_mod": draw(st.sampled_from(["", "one:score"])),
        "mask_mod": "one:mask" if block_sparse else draw(st.sampled_from(["", "one:mask"])),
        "block_sparse": block_sparse,
    }
    for kind in ("score", "mask"):
        if options[f"{kind}_mod"]:
            options[f"{kind}_aux"] = draw(st.sampled_from([(), ("f1",), ("i2", "f3")]))
    return problem_of(**draw(sizes()), **({} if block_sparse else draw(masks())), **options)
