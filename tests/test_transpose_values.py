"""The pass that turns v of e4m3 to V^T, thread by thread, in plain Python."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa3.kernels import transpose_values
from fa3.kernels.transpose_values import TransposeKernel
from fa3.quantization import transposed
from fa3.spec import TransposeSpec

#: Where V^T lies in the memory of a test; more than v has bytes.
OUT = 1 << 20


class Registers:
    """Words in the place of a tensor in registers; a view begins at ``first``."""

    def __init__(self, words: list[int], first: int = 0) -> None:
        self.words, self.first = words, first

    @property
    def iterator(self) -> Registers:
        return self

    def __add__(self, words: int) -> Registers:
        return Registers(self.words, self.first + words)

    def __getitem__(self, i: int) -> int:
        return self.words[self.first + i]

    def fill(self, value: int) -> None:
        self.words[:] = [value] * len(self.words)

    def take(self, words: list[int]) -> None:
        self.words[self.first : self.first + len(words)] = words


class Written:
    """Words of V^T, each of which may be written once."""

    def __init__(self, out: torch.Tensor, address: int) -> None:
        self.out, self.address = out, address

    def __setitem__(self, i: int, value: int) -> None:
        first = self.address - OUT + 4 * i
        assert first % 4 == 0
        assert (self.out[first : first + 4] == -1).all()
        self.out[first : first + 4] = torch.tensor(list(value.to_bytes(4, "little")))


class HostKernel(TransposeKernel):
    """Runs a launch one thread after the other."""

    def __init__(self, v: torch.Tensor, written: int) -> None:
        super().__init__(TransposeSpec())
        self.v = v.view(torch.uint8)
        #: Bytes of V^T; -1: not written.
        self.out = torch.full((written,), -1)
        self.index: dict[str, tuple[int, ...]] = {}

    def words(self, address: int, count: int) -> Any:
        if address >= OUT:
            return Written(self.out, address)
        assert address % (4 * count) == 0
        content = self.v.untyped_storage()[address : address + 4 * count]
        data = bytes(content)
        assert len(data) == 4 * count
        return [int.from_bytes(data[4 * i : 4 * i + 4], "little") for i in range(count)]

    def kernel(self, *arguments: Any) -> Any:
        def launch(grid: list[int], block: list[int], stream: None) -> None:
            assert max(grid[1:]) < 2**16
            for *place, thread in itertools.product(*map(range, grid), range(block[0])):
                self.index = {"block": tuple(place), "thread": (thread, 0, 0)}
                TransposeKernel.kernel.__wrapped__(self, *arguments)

        return SimpleNamespace(launch=launch)


def permute_bytes(low: int, high: int, selector: int) -> int:
    """`cute.arch.prmt`."""
    data = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    return int.from_bytes(bytes(data[selector >> 4 * i & 0xF] for i in range(4)), "little")


@pytest.mark.parametrize(
    ("seqlen", "head_dim"), [(1, 16), (16, 208), (17, 256), (127, 240), (128, 32), (129, 144), (300, 64)]
)
def test_it_writes_every_byte_of_v_transposed_once(seqlen, head_dim, monkeypatch):
    # Rows and heads are further apart than they must be.
    v = torch.randint(0, 256, (2, seqlen, 2, head_dim + 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    v = v[..., :head_dim]
    expected = transposed(v).view(torch.uint8).flatten()
    host = HostKernel(v, expected.numel())
    for name, stand_in in {
        "cutlass": SimpleNamespace(range_constexpr=range),
        "Int32": int,
        "Int64": int,
        "cute": SimpleNamespace(
            arch=SimpleNamespace(
                thread_idx=lambda: host.index["thread"], block_idx=lambda: host.index["block"], prmt=permute_bytes
            ),
            make_rmem_tensor=lambda size, dtype: Registers([0] * size),
            make_layout=lambda size: size,
            make_tensor=lambda first, size: first,
            autovec_copy=lambda source, target: target.take(source),
        ),
    }.items():
        monkeypatch.setattr(transpose_values, name, stand_in)
    sizes = (2, seqlen, 2, head_dim)
    TransposeKernel.__call__.__wrapped__(host, 0, OUT, None, *sizes, v.stride()[:3])
    assert torch.equal(host.out, expected.long())
