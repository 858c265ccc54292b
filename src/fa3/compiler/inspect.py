"""What the assembler made of a kernel: registers, spills, instruction counts, and whether the overlap survived.

Read from the machine code with NVIDIA's cuobjdump and nvdisasm (fa3's extra ``inspect``); needs no GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3.backward_spec import BackwardSpec, FinishSpec, QueryGradientSpec
from fa3.errors import CompileError
from fa3.spec import WARPGROUP_THREADS, ForwardSpec

if TYPE_CHECKING:
    from fa3.kernel_spec import KernelSpec

#: Machine type of CUDA in the ELF header.
_EM_CUDA = 190

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
#: Names of the WGMMA instructions: of 16-bit operands, of FP8 and of int8.
PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
_LABEL = re.compile(r"^(\.L\w+):")
_LABEL_OPERAND = re.compile(r"`\((\.L\w+)\)")


@dataclass(frozen=True)
class Report:
    """Facts of one kernel's machine code.

    Attributes:
        registers: registers a thread at launch; with register reallocation the average of the roles.
        stack: bytes of stack a thread.
        local: bytes of local memory a thread.
        spills: LDL and STL instructions.
        spills_in_loops: those of each main loop.
        shared_static: bytes of static shared memory, of which the CUDA runtime keeps 1024.
        hgmma, utmaldg, utmastg, exp2: counts of WGMMA, TMA load, TMA store and MUFU.EX2 instructions.
        waits: WARPGROUP.DEPBAR instructions, the waits for products.
        setmaxreg: register counts that USETMAXREG asks for, in the order of the code.
        overlap: for each main loop (an innermost loop with WGMMA and EX2) the exponentials between the wait
            that leaves one product in flight and the wait that leaves none.
        under: for each main loop the exponentials that are issued while any product is in flight: behind a product
            and before the wait that leaves none.
        vector_reductions: additions of 16 bytes of float32 from registers to global memory.
        bulk_reductions: additions of shared memory to global memory.
        qgmma, igmma: those of the WGMMA instructions whose operands are FP8, and int8.
        ldsm: LDSM instructions, which load matrices from shared memory to registers.
    """

    registers: int
    stack: int
    local: int
    spills: int
    shared_static: int
    hgmma: int
    utmaldg: int
    utmastg: int
    exp2: int
    waits: int
    setmaxreg: list[int] = field(hash=False)
    overlap: list[int] = field(hash=False)
    under: list[int] = field(hash=False, default_factory=list)
    vector_reductions: int = 0
    bulk_reductions: int = 0
    spills_in_loops: list[int] = field(hash=False, default_factory=list)
    qgmma: int = 0
    ldsm: int = 0
    igmma: int = 0


@dataclass(frozen=True)
class Instruction:
    """One line of machine code; ``opcode`` with its suffixes, ``predicate`` without the ``@``."""

    address: int
    predicate: str | None
    opcode: str
    operands: str

    @property
    def multiplies(self) -> bool:
        """Whether it is one of ``PRODUCTS``."""
        return any(self.is_a(family) for family in PRODUCTS)

    def is_a(self, family: str) -> bool:
        """True for ``HGMMA.64x128x16...`` and the family ``HGMMA``."""
        return self.opcode == family or self.opcode.startswith(family + ".")


@functools.cache
def find_tool(name: str) -> Path | None:
    """Path of cuobjdump or nvdisasm: from PyPI's packages, CUDA_HOME, CUDA_PATH or PATH; None if missing.

    The packages come first: the tool must be as new as the DSL's assembler, what is on PATH often is not.
    """
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        for found in sorted(Path(folder).glob(f"*/bin/{name}"), reverse=True):
            if os.access(found, os.X_OK):
                return found
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            found = Path(os.environ[variable]) / "bin" / name
            if os.access(found, os.X_OK):
                return found
    on_path = shutil.which(name)
    return None if on_path is None else Path(on_path)


def tools_installed() -> bool:
    """True if both tools are there."""
    return find_tool("cuobjdump") is not None and find_tool("nvdisasm") is not None


def _run_tool(name: str, arguments: Sequence[str], cubin: bytes) -> str:
    tool = find_tool(name)
    if tool is None:
        raise CompileError(f"{name} not found: pip install nvidia-cuda-{name}, or set CUDA_HOME to a CUDA toolkit")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), *arguments, file.name], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{tool} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def cubin_of(shared_object: bytes) -> bytes:
    """The GPU binary inside an artifact. Raises ``CompileError`` if there is none."""
    start = 0
    while (start := shared_object.find(b"\x7fELF", start + 1)) > 0:
        header = shared_object[start : start + 64]
        if len(header) < 64 or struct.unpack_from("<H", header, 18)[0] != _EM_CUDA:
            continue
        program_headers, section_headers = struct.unpack_from("<QQ", header, 32)
        program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", header, 54)
        # The two tables of headers end an ELF file that ptxas wrote.
        end = max(program_headers + program_size * program_count, section_headers + section_size * section_count)
        return shared_object[start : start + end]
    raise CompileError("no GPU binary in this file: is it an artifact of fa3?")


def disassemble(cubin: bytes) -> str:
    """Machine code of a GPU binary as text."""
    return _run_tool("nvdisasm", ["-c"], cubin)


def report(cubin: bytes) -> Report:
    """Inspect a GPU binary. Raises ``CompileError`` if the tools are missing or fail."""
    return read_report(_run_tool("cuobjdump", ["--dump-resource-usage"], cubin), disassemble(cubin))


def report_or_none(cubin: bytes) -> dict[str, Any] | None:
    """``report`` as a dict of the facts, or None where the tools are missing."""
    return asdict(report(cubin)) if tools_installed() else None


def read_report(resource_usage: str, sass: str) -> Report:
    """Make the report from the text of ``cuobjdump --dump-resource-usage`` and of ``nvdisasm -c``."""
    usage = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", resource_usage)}
    missing = {"REG", "STACK", "LOCAL", "SHARED"} - usage.keys()
    if missing:
        raise CompileError(f"cuobjdump says nothing about {', '.join(sorted(missing))}: {resource_usage[:300]!r}")
    blocks = _basic_blocks(sass)
    instructions = [instruction for block in blocks for instruction in block.instructions]
    if not instructions:
        raise CompileError(f"nvdisasm shows no instructions: {sass[:300]!r}")

    def count(*families: str) -> int:
        return sum(any(instruction.is_a(family) for family in families) for instruction in instructions)

    def count_vectors(family: str, suffix: str) -> int:
        return sum(i.is_a(family) and suffix in i.opcode.split(".") for i in instructions)

    setmaxreg = [
        int(instruction.operands.split(",")[-1], 0) for instruction in instructions if instruction.is_a("USETMAXREG")
    ]
    loops = list(_main_loops(blocks))
    return Report(
        registers=usage["REG"],
        stack=usage["STACK"],
        local=usage["LOCAL"],
        spills=count("LDL", "STL"),
        shared_static=usage["SHARED"],
        hgmma=count(*PRODUCTS),
        utmaldg=count("UTMALDG"),
        utmastg=count("UTMASTG"),
        exp2=count("MUFU.EX2"),
        waits=count("WARPGROUP.DEPBAR"),
        setmaxreg=setmaxreg,
        overlap=[_exponentials_in_flight(loop) for loop in loops],
        under=[_exponentials_under_products(loop) for loop in loops],
        vector_reductions=count_vectors("REDG", "F32x4"),
        bulk_reductions=count("UBLKRED"),
        spills_in_loops=[sum(i.is_a("LDL") or i.is_a("STL") for i in loop) for loop in loops],
        qgmma=count("QGMMA"),
        igmma=count("IGMMA"),
        ldsm=count("LDSM"),
    )


def check(spec: KernelSpec, found: Report) -> list[str]:
    """Promises of the spec that the machine code breaks, one sentence each; empty if it keeps them all."""
    broken = []
    if isinstance(spec, BackwardSpec):
        return [*_check_products(spec, found), *_check_spills(found), *_check_backward(spec, found)]
    if isinstance(spec, ForwardSpec) and spec.fp8:
        common = (*_check_products(spec, found), *_check_spills(found), *_check_overlap(spec, found))
        return [*common, *_check_fp8(spec, found)]
    if found.stack or found.local:
        broken.append(f"stack {found.stack} and local memory {found.local} bytes: must be 0")
    if found.spills:
        broken.append(f"{found.spills} spill instructions (LDL, STL): must be none")
    if isinstance(spec, ForwardSpec):
        return [*broken, *_check_products(spec, found), *_check_overlap(spec, found)]
    if isinstance(spec, QueryGradientSpec):
        return [*broken, *_check_products(spec, found), *_check_query_gradient(spec, found)]
    if isinstance(spec, FinishSpec) and not found.utmastg:
        broken.append("no UTMASTG: dQ must be written by TMA")
    return broken


def _check_products(spec: ForwardSpec | BackwardSpec | QueryGradientSpec, found: Report) -> Iterator[str]:
    """What kernels with a main loop have in common: TMA, products that run on their own, registers that move."""
    for name, number in (
        ("HGMMA, QGMMA or IGMMA", found.hgmma),
        ("UTMALDG", found.utmaldg),
        ("UTMASTG", found.utmastg),
    ):
        # Packed rows of the output are no rectangle: threads write them.
        if not number and not (name == "UTMASTG" and spec.pack_gqa):
            yield f"no {name}: tiles must go through the tensor cores and TMA"
    # A product is several HGMMA under one wait. When the registers of an accumulator are moved or spilled while
    # products are in flight, ptxas waits after each single HGMMA instead.
    if 2 * found.waits > found.hgmma:
        yield f"{found.waits} waits for {found.hgmma} HGMMA: the assembler serialized the products"
    groups = spec.consumer_warpgroups
    if spec.warp_specialized:
        if len(set(found.setmaxreg)) != 2:
            yield f"USETMAXREG {found.setmaxreg}: producer and consumer must each set their own count"
        else:
            producer, consumer = min(found.setmaxreg), max(found.setmaxreg)
            asked = WARPGROUP_THREADS * (producer + groups * consumer)
            # What the producer gives up is all that the consumers can gain; asking for more waits forever.
            owned = found.registers * spec.threads
            if asked > owned:
                yield f"USETMAXREG {found.setmaxreg} asks for {asked} registers: the block owns {owned}"
    elif found.setmaxreg:
        yield f"USETMAXREG {found.setmaxreg} without warp specialization"
    if not found.overlap:
        yield "no main loop with both HGMMA and MUFU.EX2"


def _check_overlap(spec: ForwardSpec, found: Report) -> Iterator[str]:
    # A thread holds tile_n / 2 scores of a tile, one exponential each. Half of them under the product prove
    # that the softmax as a whole was not moved behind the wait.
    enough = spec.tile_n // 4
    # In parts PV comes before the scores.
    overlaps = spec.overlap and spec.parts == 1
    if overlaps and found.overlap and min(found.overlap) < enough:
        yield f"overlap: {found.overlap} exponentials under a product in the main loops, expected {enough} on"
    elif not overlaps and any(found.overlap):
        yield f"overlap is off, but {found.overlap} exponentials run under a product"


#: Bytes of stack that a thread of the backward, or of the forward of e4m3, may use outside its main loop.
STACK_AROUND_THE_LOOP = 64


def _check_spills(found: Report) -> Iterator[str]:
    # The main loop takes all registers there are. Addresses of what happens once in a tile of work may wait in memory.
    if any(found.spills_in_loops):
        yield f"{found.spills_in_loops} spill instructions (LDL, STL) in the main loops: must be none"
    if found.local or found.stack > STACK_AROUND_THE_LOOP:
        yield f"stack {found.stack} and local memory {found.local} bytes: at most {STACK_AROUND_THE_LOOP} and 0"


def _check_fp8(spec: ForwardSpec, found: Report) -> Iterator[str]:
    if found.qgmma + found.igmma < found.hgmma:
        others = found.hgmma - found.qgmma - found.igmma
        yield f"{others} of {found.hgmma} WGMMA are no QGMMA or IGMMA: all must take 8-bit operands"
    if bool(spec.qk_dtype) != bool(found.igmma):
        yield f"{found.igmma} IGMMA: there must be some where q and k are int8, and none elsewhere"
    # Nothing else is loaded as matrices: products read shared memory themselves.
    if spec.transpose_stages and not found.ldsm:
        yield "no LDSM: tiles of v in rows must be transposed by matrices"
    if found.ldsm and not spec.transpose_stages:
        yield f"{found.ldsm} LDSM: V^T needs no transposition"


def _check_backward(spec: BackwardSpec, found: Report) -> Iterator[str]:
    # As in the forward half of a thread's exponentials. It does not matter whether they run under dK or, where the
    # assembler put them behind the wait for it, under dQ.
    enough = spec.score_rows // 4
    if found.under and min(found.under) < enough:
        yield f"{found.under} exponentials under a product in the main loops, expected {enough} on"
    if spec.dq_stages and not found.bulk_reductions:
        yield "no UBLKRED: dQ must be added to its sums by bulk copies"


def _check_query_gradient(spec: QueryGradientSpec, found: Report) -> Iterator[str]:
    # As in the forward half of a thread's exponentials.
    enough = spec.tile_n // 4
    if found.overlap and min(found.overlap) < enough:
        yield f"overlap: {found.overlap} exponentials under dP in the main loops, expected {enough} on"
    if found.vector_reductions:
        yield f"{found.vector_reductions} REDG: nothing may be added in an order that is not fixed"


# ----------------------------------------------------------------------------------------------------------
# Control flow of the machine code


@dataclass
class _Block:
    """Instructions that run one after the other, and the indices of the blocks that may follow."""

    instructions: list[Instruction]
    labels: list[str]
    followers: list[int]


def _basic_blocks(sass: str) -> list[_Block]:
    blocks = [_Block([], [], [])]
    ended = False  # the last instruction may go elsewhere, so that the next one starts a block
    reconvergence: dict[str, str] = {}
    leaves: list[tuple[int, str]] = []
    falls_through: list[bool] = [True]

    def start_block() -> None:
        if blocks[-1].instructions:
            blocks.append(_Block([], [], []))
            falls_through.append(True)

    for line in sass.splitlines():
        label = _LABEL.match(line.strip())
        if label:
            start_block()
            ended = False
            blocks[-1].labels.append(label[1])
            continue
        match = _INSTRUCTION.search(line)
        if match is None:
            continue
        if ended:
            start_block()
            ended = False
        instruction = Instruction(int(match[1], 16), match[2], match[3], match[4])
        blocks[-1].instructions.append(instruction)
        target = _LABEL_OPERAND.search(instruction.operands)
        if instruction.is_a("BSSY") and target:
            reconvergence[instruction.operands.split(",")[0].strip()] = target[1]
        elif instruction.is_a("BSYNC"):
            ended = True
            after = reconvergence.get(instruction.operands.split(",")[0].strip())
            if after:
                leaves.append((len(blocks) - 1, after))
        elif target or instruction.is_a("EXIT") or instruction.is_a("RET"):
            ended = True
            # `BRA.DIV UR4, label` and `BRA P1, label` are conditional through an operand.
            leading = instruction.operands[: target.start()].strip() if target else ""
            unconditional = instruction.predicate is None and not leading
            if unconditional and instruction.opcode.split(".")[0] in ("BRA", "EXIT", "RET"):
                falls_through[-1] = False
            if target:
                leaves.append((len(blocks) - 1, target[1]))
    home = {label: index for index, block in enumerate(blocks) for label in block.labels}
    for index, block in enumerate(blocks):
        if falls_through[index] and index + 1 < len(blocks):
            block.followers.append(index + 1)
    for index, label_name in leaves:
        if label_name in home:
            blocks[index].followers.append(home[label_name])
    return blocks


def _dominators(blocks: list[_Block]) -> list[int]:
    """For each block the set, as bits, of the blocks that every way to it passes through."""
    everything = (1 << len(blocks)) - 1
    leading_here: list[list[int]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        for follower in block.followers:
            leading_here[follower].append(index)
    dominators = [1] + [everything] * (len(blocks) - 1)
    changed = True
    while changed:
        changed = False
        for index in range(1, len(blocks)):
            common = everything
            for before in leading_here[index]:
                common &= dominators[before]
            common |= 1 << index
            if common != dominators[index]:
                dominators[index] = common
                changed = True
    return dominators


def _main_loops(blocks: list[_Block]) -> Iterator[list[Instruction]]:
    """Innermost loops that multiply and exponentiate, each as its instructions in the order of the code.

    Found through dominators: a wait's retry code stands far behind the loop and jumps back into it, so the
    range of a backward branch alone would mislead.
    """
    dominators = _dominators(blocks)
    leading_here: list[list[int]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        for follower in block.followers:
            leading_here[follower].append(index)
    loops: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for head in block.followers:
            if not dominators[index] >> head & 1:
                continue
            body = loops.setdefault(head, {head})
            waiting = [index]
            while waiting:
                inside = waiting.pop()
                if inside not in body:
                    body.add(inside)
                    waiting += leading_here[inside]

    def does_both(body: set[int]) -> bool:
        opcodes = [instruction for index in body for instruction in blocks[index].instructions]
        return any(i.multiplies for i in opcodes) and any(i.is_a("MUFU.EX2") for i in opcodes)

    main = [body for body in loops.values() if does_both(body)]
    for body in main:
        if not any(other < body for other in main):
            yield [instruction for index in sorted(body) for instruction in blocks[index].instructions]


def _exponentials_in_flight(loop: list[Instruction]) -> int:
    """MUFU.EX2 between the wait that leaves one product in flight and the wait that leaves none."""
    one_left = False
    count = 0
    # Twice round, counted in the second: the compiler may have rotated the loop.
    for counted in (False, True):
        for instruction in loop:
            if instruction.is_a("WARPGROUP.DEPBAR"):
                one_left = int(instruction.operands.split(",")[-1], 0) >= 1
            elif instruction.is_a("MUFU.EX2"):
                count += counted and one_left
    return count


def _exponentials_under_products(loop: list[Instruction]) -> int:
    """MUFU.EX2 behind an HGMMA and before the wait that leaves no product in flight."""
    in_flight = False
    count = 0
    # Twice round, counted in the second, as above.
    for counted in (False, True):
        for instruction in loop:
            if instruction.multiplies:
                in_flight = True
            elif instruction.is_a("WARPGROUP.DEPBAR"):
                in_flight = in_flight and int(instruction.operands.split(",")[-1], 0) >= 1
            elif instruction.is_a("MUFU.EX2"):
                count += counted and in_flight
    return count
