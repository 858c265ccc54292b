"""The examples of docs/fp8.md, run as they stand but for the device, and what the page says of the format."""

import re
from pathlib import Path

import pytest
import torch

import fa3
from fa3 import quantization
from fa3.e4m3 import KEY_OF_SLOT

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "fp8.md").read_text(encoding="utf-8")
PREAMBLE, *EXAMPLES = (
    block.replace("cuda", "cpu") for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
)


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=["tensors of your own", "quantized once", "in place of 16 bits", "int8"]
)
def test_an_example_of_the_page_is_attention_as_near_as_e4m3_comes(example):
    assert len(EXAMPLES) == 4
    names = {}
    exec(PREAMBLE, names)
    exec(example, names)
    expected = fa3.reference(names["q"], names["k"], names["v"], causal=True)[0]
    assert names["out"].shape == expected.shape
    assert 1e-3 < (names["out"].double() - expected).square().mean().sqrt() < 0.03


def test_the_slots_on_the_page_are_those_of_the_format():
    slots, keys = (
        [int(number) for number in re.findall(r"\d+", line)]
        for line in PAGE.splitlines()
        if line.startswith(("| slot", "| key"))
    )
    assert slots == list(range(16))
    assert tuple(keys) == KEY_OF_SLOT


@pytest.mark.parametrize("head_dim", [64, 128, 256, 96, 192, 80])
def test_hadamard_blocks_are_as_large_as_the_page_says(head_dim):
    words = {3: "three", 5: "five"}
    size = quantization.hadamard_block(head_dim)
    if size != head_dim:
        assert f"{head_dim}: {words[head_dim // size]} of {size}" in PAGE
    else:
        assert head_dim & (head_dim - 1) == 0


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_keys_of_a_block_by_default_are_as_many_as_the_page_says(head_dim):
    words = " ".join(PAGE.split())
    assert "By default 64 rows of q share one, and 96 or 128 of k:" in words
    assert "96 for head dims from 80 to 128, and with sums in float32 up to 64" in words
    assert "v has one scale a head." in words
    assert quantization.default_block(head_dim) == (64, 96 if 80 <= head_dim <= 128 else 128)
    assert quantization.default_block(head_dim, two_level=True) == (64, 96 if head_dim <= 64 else 128)


@pytest.mark.parametrize(("out", "percent", "words"), [("e4m3", 2.6, "2.6 percent"), ("int8", 1.0, "one of 1 percent")])
def test_rounding_gaussian_rows_costs_what_the_page_says(out, percent, words):
    x = torch.randn(1, 1920, 4, 128)
    values, scale = quantization.quantize_tensor(x, rows=96, out=out)
    error = (quantization.dequantize(values, scale, 96) - x).norm() / x.norm()
    assert 100 * error.item() == pytest.approx(percent, abs=0.1)
    assert words in PAGE


def test_a_block_of_zeros_has_the_scale_that_the_page_says():
    _, scale = quantization.quantize_tensor(torch.zeros(1, 64, 1, 16), rows=64)
    assert "smallest amax there is, 2^-40" in PAGE
    assert scale.item() == pytest.approx(2.0**-40 / 448)
