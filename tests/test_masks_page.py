"""The examples of docs/masks.md, run as they stand but for the device, against dense scores."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fa3
from fa3 import twins

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "masks.md").read_text(encoding="utf-8")


def examples() -> dict[str, list[str]]:
    """The Python blocks under each heading, on the CPU."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE):
        heading = section.splitlines()[0]
        blocks = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
        if blocks:
            found[heading] = [block.replace("cuda", "cpu") for block in blocks]
    return found


EXAMPLES = examples()
#: What all others begin with.
((PREAMBLE,), *_) = EXAMPLES.values()
#: The file of twins, before the program that uses it.
TWINS, _ = EXAMPLES["Your own"]

#: Queries, keys.
I, J = torch.arange(384)[:, None], torch.arange(384)[None, :]  # noqa: E741


def pages_documents(names: dict[str, Any]) -> Tensor:
    return names["document_ids"][0, I] == names["document_ids"][0, J]


def by_head(values: Tensor) -> Tensor:
    return values[:, None, None]


#: What each example computes: (scores (batch, heads, 384, 384), its names) -> (scores, visible keys).
DENSE: dict[tuple[str, int], Callable[[Tensor, dict[str, Any]], tuple[Tensor, Tensor]]] = {
    ("Windows", 0): lambda s, names: (s, (J <= I) & (J >= I - 127)),
    ("Chunks", 0): lambda s, names: (s, (J <= I) & (J // 100 == I // 100)),
    ("Softcap", 0): lambda s, names: (15 * torch.tanh(s / 15), J <= I),
    ("Sinks", 0): lambda s, names: (s, J >= 0),
    ("Score modifications", 0): lambda s, names: (
        s - by_head(torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])) * (I - J),
        J <= I,
    ),
    ("Score modifications", 1): lambda s, names: (s + names["bias"][:, (J - I).clamp(-32, 32) + 32], J >= 0),
    ("Mask modifications", 0): lambda s, names: (s, (J <= I) | (torch.tensor([100, 7])[:, None, None, None] > J)),
    ("Mask modifications", 1): lambda s, names: (s, (J <= I) & pages_documents(names)),
    ("Block masks", 0): lambda s, names: (s, pages_documents(names)),
    ("Your own", 1): lambda s, names: (
        s * by_head(torch.tensor([0.5, 1.0, 1.5, 2.0])),
        (J <= I) & ((J < 4) | (I - J < 100)),
    ),
}


@pytest.fixture
def _module_of_twins(tmp_path, monkeypatch):
    name = re.match(r"# (\w+)\.py\n", TWINS)
    assert name
    (tmp_path / f"{name[1]}.py").write_text(TWINS)
    monkeypatch.syspath_prepend(tmp_path)
    # Each run of an example is a program of its own, with PyTorch twins of its own.
    for registry in ("_twins", "_derivatives"):
        monkeypatch.setattr(twins, registry, dict(getattr(twins, registry)))
    yield
    sys.modules.pop(name[1], None)


def test_every_example_with_a_result_is_compared():
    with_result = {
        (heading, i)
        for heading, blocks in EXAMPLES.items()
        for i, block in enumerate(blocks)
        # The example of gradients has a test of its own.
        if "out" in block and heading != "Gradients"
    }
    assert with_result == set(DENSE)


@pytest.mark.usefixtures("_module_of_twins")
@pytest.mark.parametrize(("heading", "number"), list(DENSE))
def test_an_example_of_the_page_computes_what_the_page_says(heading, number):
    names: dict[str, Any] = {}
    exec(PREAMBLE, names)
    exec(EXAMPLES[heading][number], names)
    q, k, v = (names[name].double().transpose(1, 2) for name in "qkv")
    scores, visible = DENSE[heading, number](q @ k.mT * q.shape[-1] ** -0.5, names)
    scores = scores.masked_fill(~visible, -torch.inf)
    total = scores.exp().sum(-1, keepdim=True)
    if "sink" in names:
        total = total + by_head(names["sink"]).double().exp()
        torch.testing.assert_close(names["lse"].double(), total.log().squeeze(-1), rtol=1e-5, atol=1e-5)
    expected = (scores.exp() / total @ v).transpose(1, 2)
    # One rounding to bfloat16.
    torch.testing.assert_close(names["out"].double(), expected, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("line", ["BlockMask(batch=2", "██····", "··██··", "····██"])
def test_the_picture_on_the_page_is_that_of_its_example(line):
    names: dict[str, Any] = {}
    exec(PREAMBLE, names)
    # Without the call, which other tests make.
    exec(EXAMPLES["Block masks"][0].replace("out =", "# out ="), names)
    drawn = str(names["block_mask"])
    assert line in drawn
    assert drawn in PAGE


@pytest.mark.usefixtures("_module_of_twins")
def test_the_twins_on_the_page_say_the_same():
    pytest.importorskip("cutlass")
    from mod_wrappers import run_cute_derivative, run_cute_twin

    names: dict[str, Any] = {}
    program = EXAMPLES["Your own"][1]
    exec(PREAMBLE + program[: program.index("block_mask =")], names)
    cases = torch.stack([torch.randint(0, n, (2000,)) for n in (2, 4, 384, 384)], dim=1)
    scores = torch.randn(2000)
    score_mod, mask_mod = names["score_mod"], names["mask_mod"]
    changed = score_mod.torch(scores, *cases.unbind(1), *score_mod.aux)
    visible = mask_mod.torch(*cases.unbind(1), *mask_mod.aux)
    assert run_cute_twin(score_mod, cases, scores).tolist() == changed.tolist()
    assert run_cute_twin(mask_mod, cases, scores).tolist() == visible.int().tolist()
    scores.requires_grad_()
    gradients = torch.randn(2000)
    changed = score_mod.torch(scores, *cases.unbind(1), *score_mod.aux)
    (expected,) = torch.autograd.grad(changed, scores, gradients)
    found = run_cute_derivative(score_mod, cases, scores.detach(), gradients)
    torch.testing.assert_close(found, expected)


def test_the_example_of_gradients_has_the_gradients_of_the_oracle():
    names: dict[str, Any] = {}
    exec(PREAMBLE, names)
    ((example,),) = (blocks for heading, blocks in EXAMPLES.items() if heading == "Gradients")
    exec(example, names)
    inputs = [names[name].detach().double().requires_grad_() for name in ("q", "k", "v", "sink")]
    out, lse = fa3.reference(*inputs[:3], causal=True, sink=inputs[3])
    expected = torch.autograd.grad(out.square().sum() + lse.sum(), inputs)
    for name, gradient in zip(("q", "k", "v", "sink"), expected, strict=True):
        # One rounding of each gradient and of out, to bfloat16.
        error = (names[name].grad.double() - gradient).abs().max()
        assert error <= 2**-6 * gradient.abs().max(), name
