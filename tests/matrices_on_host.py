"""Moving matrices between shared memory and the registers of a warp, for kernel bricks on the CPU.

There is one thread at a time here, and such moves are made by 32 together. So a brick runs twice: the first time its
addresses are written down, and the words that each lane gets are made of them in Python (`loaded`); the second time
they are handed out, and what is stored is written down. Calls are told apart by their number in the code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

#: Bytes of a row of a matrix of 8 x 8 elements of 16 bits; what no address is.
CHUNK, NOWHERE = 16, -(10**6)


@dataclass
class Tape:
    """Where the calls of one brick are written down; set anew by the wrapper of the brick, while it is compiled."""

    loads: cute.Tensor | None = None
    words: cute.Tensor | None = None
    stores: cute.Tensor | None = None
    thread: Int32 | None = None
    counts: dict[str, int] = field(default_factory=lambda: {"loads": 0, "stores": 0})

    def next(self, kind: str) -> int:
        self.counts[kind] += 1
        return self.counts[kind] - 1


_tape = Tape()


def begin(loads: cute.Tensor | None, words: cute.Tensor | None, stores: cute.Tensor | None) -> None:
    """loads (thread, call), words (thread, call, 4), stores (thread, call, 5: address and words); int32."""
    global _tape
    _tape = Tape(loads, words, stores)


def become(thread: Int32) -> None:
    """Calls from here on are those of this thread."""
    _tape.thread = thread


def load_matrices_transposed(address: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """`fa3.kernels.parts.ptx.load_matrices_transposed`."""
    call = _tape.next("loads")
    _tape.loads[_tape.thread, call] = address
    one, two, three, four = (_tape.words[_tape.thread, call, m] for m in range(4))
    return one, two, three, four


def store_words(address: Int32, *words: Int32) -> None:
    """`fa3.kernels.parts.ptx.store_matrices` and ``store_pair``."""
    call = _tape.next("stores")
    for i, value in enumerate((address, *words)):
        _tape.stores[_tape.thread, call, i] = value


def permute_bytes(low: Int32, high: Int32, selector: int) -> Int32:
    """`cute.arch.prmt`: byte i of the result is the byte of ``low`` (0 to 3) or ``high`` (4 to 7) that digit i says."""
    result = Int32(0)
    for i in range(4):
        chosen = selector >> 4 * i & 0xF
        byte = (cutlass.Int32((low, high)[chosen // 4]) >> 8 * (chosen % 4)) & 0xFF
        result = result | (byte << 8 * i)
    return result


def tables(threads: int, calls: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tables of loads, of words and of stores."""
    shapes = (threads, calls), (threads, calls, 4), (threads, calls, 5)
    return tuple(torch.full(shape, NOWHERE, dtype=torch.int32) for shape in shapes)  # type: ignore[return-value]


def loaded(loads: Tensor, memory: Tensor) -> Tensor:
    """The words that lanes of whole warps get: (thread, call, 4) int32 of the addresses and the bytes (uint8)."""
    used = loads[:, (loads != NOWHERE).any(dim=0)]
    warps, calls = loads.shape[0] // 32, used.shape[1]
    rows = used.view(warps, 4, 8, calls).long().clamp_min(0)
    # (warp, matrix, row, call, column, byte of the element)
    chunks = memory[rows[..., None] + torch.arange(CHUNK)].unflatten(-1, (8, 2))
    # Lane 4 * c + r has column c of rows 2 * r and 2 * r + 1.
    pairs = chunks.unflatten(2, (4, 2)).permute(0, 5, 2, 4, 1, 3, 6)
    words = pairs.reshape(32 * warps, calls, 4, 4).contiguous().view(torch.int32)[..., 0]
    result = torch.zeros(*loads.shape, 4, dtype=torch.int32)
    result[:, :calls] = words
    return result


def stored(stores: Tensor, memory: Tensor) -> Tensor:
    """How often each byte is written; ``memory`` gets what whole warps store by `store_matrices`."""
    times = torch.zeros(memory.shape, dtype=torch.int32)
    warps = stores.shape[0] // 32
    for call in range(stores.shape[1]):
        for warp in range(warps):
            lanes = stores[32 * warp : 32 * warp + 32, call]
            if lanes[0, 0] == NOWHERE:
                continue
            for matrix in range(4):
                for row in range(8):
                    place = int(lanes[8 * matrix + row, 0])
                    words = lanes[4 * row : 4 * row + 4, 1 + matrix].contiguous().view(torch.uint8)
                    memory[place : place + CHUNK] = words
                    times[place : place + CHUNK] += 1
    return times
