"""The hopper backend remembers calls: a call must never be taken for another one with other tensors or options."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3 import plan as planning
from fa3.backends import hopper
from fa3.mods import MaskMod, ScoreMod
from fa3.plan import H200, make_spec, usual_tiles
from fa3.problem import check_forward
from problems import problem_of
from recorder import (
    OF_ONE_CALL,
    Recorder,
    block_mask,
    forgotten,
    forward,
    install,
    keep_key,
    keep_score,
    options_of_every_kind,
    tensors,
)


@pytest.fixture
def kernel(monkeypatch):
    return install(monkeypatch)


def test_a_repeated_call_with_options_is_not_planned_again(kernel, monkeypatch):
    q, k, v = tensors()
    options = {key: value for one in options_of_every_kind().values() for key, value in one.items()}
    forward(q, k, v, **options)
    monkeypatch.setattr(hopper, "check_forward", lambda *_: pytest.fail("checked again"))
    forward(q + 1, k, v, **options)
    assert len(kernel.calls) == 2


AUX = (
    (),
    (torch.zeros(4),),
    (torch.zeros(5),),
    (torch.zeros(4, dtype=torch.int32),),
    (torch.zeros(2, 2),),
    (torch.zeros(4), torch.zeros(4)),
)
WIDE = torch.zeros(2, 100, 4, 256).bfloat16()
QV = {
    "contiguous": WIDE[..., :128].contiguous(),
    "strided": WIDE[..., :128],
    "steps of two": WIDE[..., ::2],
    "half": WIDE[..., :128].half(),
    "narrow": WIDE[..., :64],
}

#: What calls may differ in, the usual first; with some of the values there is no such call.
CHOICES: dict[str, tuple[Any, ...]] = {
    "sizes": ({}, {"seqlen_q": 99}, {"head_dim_v": 64}, {"seqlen_k": 129}, {"heads_kv": 4}, {"dtype": torch.float16}),
    "softmax_scale": (None, 0.5, 0.25),
    "causal": (False, True),
    "window_left": (-1, 0, 1, 2),
    "window_right": (-1, 0, 1, 2),
    "attention_chunk": (0, 1, 2),
    "softcap": (0.0, 1.0, 5.0),
    "sink": (
        *(None, torch.zeros(4), torch.zeros(4).bfloat16(), torch.zeros(4).half(), torch.zeros(8)[::2]),
        *(torch.zeros(5), torch.zeros(4, 1), torch.zeros(4).double()),
    ),
    "pack_gqa": (None, False, True),
    # All but a few multiprocessors: there are few tiles.
    "sm_margin": (0, 130, 131),
    "qv": (None, *QV),
    "score_mod": (None, "one:score", "other:score"),
    "score_aux": AUX,
    "mask_mod": (None, "one:mask", "other:mask"),
    "mask_aux": AUX,
    # Sizes of a block mask that was made for these sequences or longer ones.
    "blocks": (None, (1, 1, 130), (2, 1, 130), (1, 4, 130), (2, 4, 130), (3, 1, 130), (1, 1, 129)),
}
TENSORS = {tuple(sizes.items()): tensors(**sizes) for sizes in CHOICES["sizes"]}
PLAIN = {name: values[0] for name, values in CHOICES.items()}


def arguments_of(choices: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `forward` after the tensors, and the sizes of those."""
    call = dict(choices)
    sizes = call["sizes"]
    score_aux, mask_aux, blocks = (call.pop(name) for name in ("score_aux", "mask_aux", "blocks"))
    call["qv"] = QV.get(call["qv"])
    if call["score_mod"] is not None:
        call["score_mod"] = ScoreMod(call["score_mod"], keep_score, score_aux)
    if blocks is not None:
        batch, heads, seqlen_k = blocks
        call["block_mask"] = block_mask(batch, heads, sizes.get("seqlen_q", 100), seqlen_k, mask_aux)
    if call["mask_mod"] is not None:
        call["mask_mod"] = MaskMod(call["mask_mod"], keep_key, mask_aux)
    return call


def outcome(kernel: Recorder, choices: dict[str, Any]) -> Any:
    """What a call launches, without what is another's in every call; of addresses only whether there is one.

    Or the error that it is refused with.
    """
    call = arguments_of(choices)
    before = len(kernel.calls)
    try:
        forward(*TENSORS[tuple(call.pop("sizes").items())], **call)
    except (TypeError, ValueError, NotImplementedError) as error:
        return repr(error)
    return [
        {
            **{name: value for name, value in one.items() if name not in OF_ONE_CALL},
            "sink": bool(one["sink"]),
            # Addresses among the extra arguments are those of tensors that live on, but for copies.
            "extras": one["extras"] and tuple(0 if value > 2**32 else value for value in one["extras"]),
        }
        for one in kernel.calls[before:]
    ]


def bases() -> list[dict[str, Any]]:
    """A plain call, calls with one option each, and others."""
    draw = random.Random(0)
    single = [{**PLAIN, name: values[1]} for name, values in CHOICES.items()]
    pairs = [
        {**PLAIN, **dict(draw.sample([(name, values[1]) for name, values in CHOICES.items()], 3))} for _ in range(8)
    ]
    return [PLAIN, *single, *pairs]


@pytest.mark.parametrize("name", list(CHOICES))
def test_calls_that_differ_in_one_thing_are_told_apart(name):
    different = 0
    for base in bases():
        with pytest.MonkeyPatch.context() as patch:
            kernel = install(patch)
            remembered = [outcome(kernel, {**base, name: value}) for value in CHOICES[name]]
            for value, expected in zip(CHOICES[name], remembered, strict=True):
                with forgotten():
                    assert outcome(kernel, {**base, name: value}) == expected, value
            different += any(one != remembered[0] for one in remembered)
    assert different, "it has a say somewhere"


@st.composite
def pairs_of_calls(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A call, and one that differs from it in some things."""
    first, other = ({name: draw(st.sampled_from(values)) for name, values in CHOICES.items()} for _ in range(2))
    if first["blocks"] is not None:
        first.update({name: PLAIN[name] for name in ("causal", "window_left", "window_right", "attention_chunk")})
        first["mask_mod"] = None
    changed = draw(st.lists(st.sampled_from(list(CHOICES)), min_size=1, max_size=4))
    return [first, {**first, **{name: other[name] for name in changed}}]


@settings(max_examples=200, deadline=None)
@given(pairs_of_calls())
def test_a_remembered_call_is_never_taken_for_another(pair):
    with pytest.MonkeyPatch.context() as patch:
        kernel = install(patch)
        remembered = [outcome(kernel, call) for call in pair]
        for call, expected in zip(pair, remembered, strict=True):
            with forgotten():
                assert outcome(kernel, call) == expected


def test_a_tensor_of_the_score_is_not_taken_for_one_of_the_mask(kernel):
    q, k, v = tensors()
    tensor = (torch.zeros(4),)
    for score_aux, mask_aux in ((tensor, ()), ((), tensor)):
        score_mod = ScoreMod("one:score", keep_score, score_aux)
        forward(q, k, v, score_mod=score_mod, mask_mod=MaskMod("one:mask", keep_key, mask_aux))
    assert [(spec.score_aux, spec.mask_aux) for spec in kernel.specs] == [("f1", ""), ("", "f1")]


def test_calls_with_a_spec_and_without_are_remembered_apart(kernel):
    q, k, v = tensors()
    planned = planning.plan(check_forward(q, k, v), H200).spec
    other = make_spec("bf16", 128, "full", usual_tiles(problem_of()))
    assert other != planned
    for _ in range(2):
        hopper.forward(q, k, v, None, False, False)
        hopper.forward_with_spec(other, q, k, v)
    assert kernel.specs == [planned, other]
    assert [call["spec"] for call in kernel.calls] == [planned, other] * 2


def test_a_call_is_planned_again_when_the_file_of_a_modification_has_changed(kernel, tmp_path, monkeypatch):
    file = tmp_path / "callers_own_mods.py"
    file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    q, k, v = tensors()
    own = ScoreMod("callers_own_mods:f", lambda score, *_: score)
    forward(q, k, v, score_mod=own)
    forward(q, k, v, score_mod=own)
    assert len(kernel.specs) == 1
    os.utime(file, ns=(1, 1))
    forward(q, k, v, score_mod=own)
    assert len(kernel.specs) == 2
