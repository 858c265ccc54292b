"""Reading machine code: counts, loops and overlap from text, and the real tools on a real kernel."""

from __future__ import annotations

import argparse
import dataclasses
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from fa3.backward_spec import BackwardSpec, FinishSpec, PrepareSpec
from fa3.cli import inspect as command
from fa3.compiler import inspect
from fa3.compiler.inspect import Report, check, cubin_of, read_report
from fa3.errors import CompileError
from fa3.kernel_spec import KernelSpec
from fa3.spec import ForwardSpec

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function kernel_name_0:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1336 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

SPEC = ForwardSpec(
    dtype="bf16",
    head_dim=128,
    head_dim_v=128,
    mask="full",
    tile_m=128,
    tile_n=16,
    stages=2,
    warp_specialized=True,
    pingpong=True,
    overlap=True,
    rescale_threshold=8.0,
)
KEPT = Report(
    registers=168,
    stack=0,
    local=0,
    spills=0,
    shared_static=1024,
    hgmma=32,
    utmaldg=12,
    utmastg=2,
    exp2=132,
    waits=4,
    setmaxreg=[24, 240],
    overlap=[66],
)

QK = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"]
PV = ["HGMMA.64x128x16.F32.BF16 R88, R180, gdesc[UR8].tnspB, R88, gsb0"]
ONE_LEFT = ["WARPGROUP.DEPBAR.LE gsb0, 0x1"]
NONE_LEFT = ["WARPGROUP.DEPBAR.LE gsb0, 0x0"]
SOFTMAX = ["MUFU.EX2 R26, R26"] * 4
BACK = ["@P0 BRA `(.L_loop)"]
EXIT = ["EXIT"]


def sass(lines: Sequence[str]) -> str:
    """Text as nvdisasm prints it; a line that ends with a colon is a label."""
    text, address = ["\t.target\tsm_90a"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(text)


def overlap_of(lines: Sequence[str]) -> list[int]:
    return read_report(USAGE, sass(lines)).overlap


def test_counts_resources_and_register_reallocation_are_read() -> None:
    code = ["USETMAXREG.DEALLOC.CTAPOOL 0x18", "UTMALDG.4D [UR8], [UR4]", "@!P1 LDL R1, [R2]", "STL.64 [R2], R4"]
    code += ["USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", *QK, *NONE_LEFT, *SOFTMAX, "MUFU.RCP R1, R2"]
    code += ["UTMASTG.4D [UR8], [UR4]", "LDGSTS.E [R1], [R2]"]
    code += ["STG.E.128 desc[UR4][R2.64], R4", "UBLKRED.G.S.ADD.F32.RN [UR4], [UR6], UR8"]
    code += ["REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4", "REDG.E.ADD.F32.FTZ.RN [R2], R4", *EXIT]
    report = read_report(USAGE, sass(code))
    assert report == Report(168, 0, 0, 2, 1024, 2, 1, 1, 4, 1, [24, 240], [], [], 1, 1)


def test_products_of_8_bits_are_products_and_are_counted_by_themselves_too() -> None:
    of_8_bits = "QGMMA.64x96x32.F32.E4M3.E4M3 R24, R180, gdesc[UR8], R24, gsb0"
    report = read_report(USAGE, sass([*QK, of_8_bits, "LDSM.16.MT88.4 R4, [R2]", "STSM.16.M88.4 [R2], R4", *EXIT]))
    assert (report.hgmma, report.qgmma, report.ldsm, report.igmma) == (3, 1, 1, 0)
    of_int8 = "IGMMA.64x96x32.S8.S8 R24, gdesc[UR8], !UPT, gsb0"
    report = read_report(USAGE, sass([*QK, of_8_bits, of_int8, *EXIT]))
    assert (report.hgmma, report.qgmma, report.igmma) == (4, 1, 1)


def test_softmax_between_the_two_waits_is_overlap() -> None:
    assert overlap_of([".L_loop:", *QK, *PV, *ONE_LEFT, *SOFTMAX, *NONE_LEFT, *BACK, *EXIT]) == [4]


def test_a_wait_hoisted_above_the_softmax_is_no_overlap() -> None:
    assert overlap_of([".L_loop:", *QK, *PV, *ONE_LEFT, *NONE_LEFT, *SOFTMAX, *BACK, *EXIT]) == [0]
    assert overlap_of([".L_loop:", *QK, *NONE_LEFT, *SOFTMAX, *PV, *NONE_LEFT, *BACK, *EXIT]) == [0]


def test_a_wait_sunk_into_the_softmax_counts_what_is_left_before_it() -> None:
    half = SOFTMAX[:2]
    assert overlap_of([".L_loop:", *QK, *PV, *ONE_LEFT, *half, *NONE_LEFT, *half, *BACK, *EXIT]) == [2]


def under(lines: Sequence[str]) -> list[int]:
    return read_report(USAGE, sass(lines)).under


def test_exponentials_behind_any_product_that_is_not_waited_for_run_under_it() -> None:
    loop = [".L_loop:", *QK, *PV, *ONE_LEFT, *NONE_LEFT, *PV, *SOFTMAX, *NONE_LEFT, *BACK, *EXIT]
    assert (under(loop), overlap_of(loop)) == ([4], [0])
    assert under([".L_loop:", *QK, *PV, *ONE_LEFT, *SOFTMAX, *NONE_LEFT, *BACK, *EXIT]) == [4]
    assert under([".L_loop:", *QK, *NONE_LEFT, *SOFTMAX, *PV, *NONE_LEFT, *BACK, *EXIT]) == [0]


def test_a_product_at_the_end_of_a_loop_is_in_flight_at_its_beginning() -> None:
    assert under([".L_loop:", *SOFTMAX, *NONE_LEFT, *SOFTMAX, *QK, *BACK, *EXIT]) == [4]
    # A wait that leaves one of none leaves none.
    assert under([".L_loop:", *ONE_LEFT, *SOFTMAX, *QK, *NONE_LEFT, *BACK, *EXIT]) == [0]


def test_a_rotated_loop_is_followed_round() -> None:
    assert overlap_of([".L_loop:", *SOFTMAX, *NONE_LEFT, *QK, *PV, *ONE_LEFT, *BACK, *EXIT]) == [4]


def test_the_softmax_before_and_after_the_loop_does_not_count() -> None:
    around = [*QK, *ONE_LEFT, *SOFTMAX]
    loop = [".L_loop:", *QK, *PV, *ONE_LEFT, *NONE_LEFT, *SOFTMAX, *BACK]
    assert overlap_of([*around, *NONE_LEFT, *loop, *around, *EXIT]) == [0]


def test_the_retry_of_a_wait_far_behind_does_not_widen_the_loop() -> None:
    retry = [".L_retry:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR33], R5", "@!P0 BRA `(.L_retry)", "BRA `(.L_on)"]
    loop = [".L_loop:", *QK, "@!P0 BRA `(.L_retry)", ".L_on:", *PV, *ONE_LEFT, *SOFTMAX, *NONE_LEFT, *BACK]
    assert overlap_of([*loop, *QK, *ONE_LEFT, *SOFTMAX, *EXIT, *retry]) == [4]


def test_of_nested_loops_the_innermost_is_the_main_loop() -> None:
    inner = [".L_loop:", *QK, *PV, *ONE_LEFT, *SOFTMAX, *NONE_LEFT, *BACK]
    first_tile = [*QK, *NONE_LEFT, *SOFTMAX]
    assert overlap_of([".L_tiles:", *first_tile, *inner, "@P1 BRA `(.L_tiles)", *EXIT]) == [4]


def test_masked_and_unmasked_loops_are_reported_each() -> None:
    masked = [".L_masked:", *QK, *PV, *NONE_LEFT, *SOFTMAX, "@P0 BRA `(.L_masked)"]
    whole = [".L_loop:", *QK, *PV, *ONE_LEFT, *SOFTMAX, *NONE_LEFT, *BACK]
    assert overlap_of([*masked, *whole, *EXIT]) == [0, 4]


def test_a_reconvergence_point_behind_the_loop_is_part_of_it() -> None:
    branch = ["BSSY B0, `(.L_join)", "@P1 BRA `(.L_skip)", *SOFTMAX, ".L_skip:", "BSYNC B0", ".L_join:"]
    assert overlap_of([".L_loop:", *QK, *PV, *ONE_LEFT, *branch, *NONE_LEFT, *BACK, *EXIT]) == [4]


def test_a_kernel_that_keeps_its_promises_has_nothing_broken() -> None:
    assert check(SPEC, KEPT) == []
    plain = dataclasses.replace(SPEC, warp_specialized=False, overlap=False)
    assert check(plain, dataclasses.replace(KEPT, setmaxreg=[], overlap=[0])) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stack": 32}, "stack 32"),
        ({"local": 8}, "local memory 8"),
        ({"spills": 3}, "3 spill"),
        ({"hgmma": 0, "waits": 0}, "no HGMMA"),
        ({"utmaldg": 0}, "no UTMALDG"),
        ({"utmastg": 0}, "no UTMASTG"),
        ({"waits": 32}, "serialized"),
        ({"setmaxreg": []}, "USETMAXREG"),
        ({"setmaxreg": [240]}, "USETMAXREG"),
        ({"setmaxreg": [40, 240]}, "asks for 66560 registers"),
        ({"overlap": []}, "no main loop"),
        ({"overlap": [66, 3]}, "expected 4"),
    ],
)
def test_each_broken_promise_is_named(change: dict[str, object], sentence: str) -> None:
    (broken,) = check(SPEC, dataclasses.replace(KEPT, **change))  # type: ignore[arg-type]
    assert sentence in broken


def test_threads_write_the_packed_rows_of_a_group_so_no_tma_store_is_promised() -> None:
    packed = dataclasses.replace(SPEC, pack_gqa=True)
    assert check(packed, dataclasses.replace(KEPT, utmastg=0)) == []
    # K and V still come through TMA.
    (broken,) = check(packed, dataclasses.replace(KEPT, utmastg=0, utmaldg=0))
    assert "no UTMALDG" in broken


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "window"},
        {"mask": "blocks", "mask_mod": "m:f"},
        {"softcap": True},
        {"qv": True},
        {"score_mod": "m:f"},
        {"mask_mod": "m:f", "mask_aux": "i2"},
    ],
    ids=str,
)
def test_kernels_of_every_option_promise_the_same(changes: dict[str, object]) -> None:
    spec = dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]
    assert check(spec, KEPT) == []
    for change in ({"utmastg": 0}, {"spills": 1}, {"stack": 8}, {"waits": 32}, {"overlap": [66, 3]}):
        assert len(check(spec, dataclasses.replace(KEPT, **change))) == 1  # type: ignore[arg-type]


def test_e4m3_may_keep_a_few_addresses_in_memory_around_the_main_loop_but_none_in_it() -> None:
    spec = dataclasses.replace(SPEC, dtype="e4m3", out_dtype="bf16", tile_n=32)
    kept = dataclasses.replace(KEPT, stack=64, spills=9, spills_in_loops=[0, 0], overlap=[8, 8], qgmma=KEPT.hgmma)
    assert check(spec, kept) == []
    for change, sentence in (
        ({"stack": 72}, "stack 72 and local memory 0 bytes: at most 64 and 0"),
        ({"local": 8}, "local memory 8"),
        ({"spills_in_loops": [0, 1]}, "[0, 1] spill"),
        ({"overlap": [8, 3]}, "expected 8"),
        ({"utmaldg": 0}, "no UTMALDG"),
    ):
        (broken,) = check(spec, dataclasses.replace(kept, **change))  # type: ignore[arg-type]
        assert sentence in broken


def test_e4m3_multiplies_8_bits_and_loads_matrices_where_v_must_be_transposed_alone() -> None:
    spec = dataclasses.replace(SPEC, dtype="e4m3", out_dtype="bf16", tile_n=32)
    kept = dataclasses.replace(KEPT, spills_in_loops=[0], overlap=[8], qgmma=KEPT.hgmma)
    in_rows = dataclasses.replace(spec, transpose_stages=2)
    assert check(in_rows, dataclasses.replace(kept, ldsm=8)) == []
    for asked, change, sentence in (
        (spec, {"qgmma": KEPT.hgmma - 2}, "2 of 32 WGMMA are no QGMMA or IGMMA"),
        (spec, {"qgmma": KEPT.hgmma - 2, "igmma": 2}, "2 IGMMA: there must be some where q and k are int8, and none"),
        (dataclasses.replace(spec, qk_dtype="int8"), {}, "0 IGMMA"),
        (spec, {"ldsm": 8}, "8 LDSM"),
        (in_rows, {"ldsm": 0}, "no LDSM"),
    ):
        (broken,) = check(asked, dataclasses.replace(kept, **change))
        assert sentence in broken


BACKWARD = BackwardSpec("bf16", 128, 128, "causal", tile_m=64, tile_n=128, stages=2, stages_dout=2)
BACKWARD_KEPT = dataclasses.replace(
    KEPT, hgmma=64, waits=6, overlap=[0], under=[32], bulk_reductions=1, spills_in_loops=[0]
)
PREPARE = PrepareSpec("bf16", 128, tile_m=64)
FINISH = FinishSpec("bf16", 128, tile_m=64)
#: Of a kernel without products.
PLAIN_KEPT = Report(32, 0, 0, 0, 0, 0, 0, 0, 0, 0, [], [])


@pytest.mark.parametrize(
    "changes", [{}, {"deterministic": True}, {"softcap": True}, {"score_mod": "m:f", "derivative": "m:g"}], ids=str
)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stack": 72}, "stack 72"),
        ({"local": 8}, "local memory 8"),
        ({"spills": 3, "spills_in_loops": [0, 3]}, "[0, 3] spill"),
        ({"hgmma": 0, "waits": 0}, "no HGMMA"),
        ({"utmaldg": 0}, "no UTMALDG"),
        ({"utmastg": 0}, "no UTMASTG"),
        ({"waits": 40}, "serialized"),
        ({"setmaxreg": [240]}, "USETMAXREG"),
        ({"setmaxreg": [24, 248]}, "asks for 66560 registers: the block owns 64512"),
        ({"overlap": [], "under": []}, "no main loop"),
        ({"under": [32, 15]}, "expected 16 on"),
        ({"bulk_reductions": 0}, "no UBLKRED"),
    ],
)
def test_each_broken_promise_of_the_backward_is_named(
    changes: dict[str, object], change: dict[str, object], sentence: str
) -> None:
    spec = dataclasses.replace(BACKWARD, **changes)  # type: ignore[arg-type]
    assert check(spec, BACKWARD_KEPT) == []
    (broken,) = check(spec, dataclasses.replace(BACKWARD_KEPT, **change))  # type: ignore[arg-type]
    assert sentence in broken


def test_a_main_pass_without_dq_adds_nothing() -> None:
    assert (
        check(dataclasses.replace(BACKWARD, dq_stages=0), dataclasses.replace(BACKWARD_KEPT, bulk_reductions=0)) == []
    )


def test_the_backward_may_keep_a_few_addresses_in_memory_around_its_main_loop() -> None:
    assert check(BACKWARD, dataclasses.replace(BACKWARD_KEPT, stack=64, spills=18)) == []


def test_warpgroups_that_share_their_keys_have_half_of_the_scores_each() -> None:
    shared = dataclasses.replace(BACKWARD, head_dim=256, head_dim_v=256, tile_n=64)
    assert not shared.split_keys
    assert check(shared, dataclasses.replace(BACKWARD_KEPT, under=[8])) == []
    (broken,) = check(shared, dataclasses.replace(BACKWARD_KEPT, under=[7]))
    assert "expected 8 on" in broken


@pytest.mark.parametrize(("spec", "kept"), [(PREPARE, {}), (FINISH, {"utmastg": 1})], ids=["prepare", "finish"])
def test_the_passes_around_the_main_one_promise_no_spills(spec: KernelSpec, kept: dict[str, int]) -> None:
    found = dataclasses.replace(PLAIN_KEPT, **kept)  # type: ignore[arg-type]
    assert check(spec, found) == []
    for change in ({"spills": 2}, {"local": 16}, {"stack": 8}):
        (broken,) = check(spec, dataclasses.replace(found, **change))  # type: ignore[arg-type]
        assert str(next(iter(change.values()))) in broken


def test_dq_leaves_by_tma() -> None:
    (broken,) = check(FINISH, PLAIN_KEPT)
    assert "no UTMASTG" in broken


def test_switches_that_are_off_must_not_show() -> None:
    (broken,) = check(dataclasses.replace(SPEC, overlap=False), KEPT)
    assert "overlap is off" in broken
    (broken,) = check(dataclasses.replace(SPEC, warp_specialized=False), KEPT)
    assert "without warp specialization" in broken


def test_the_gpu_binary_is_cut_out_of_a_shared_object() -> None:
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<H", header, 18, 190)
    struct.pack_into("<QQ", header, 32, 64, 100)
    struct.pack_into("<HHHH", header, 54, 10, 2, 20, 3)
    cubin = bytes(header) + bytes(range(96))
    host = b"\x7fELF" + bytes(60)
    assert cubin_of(host + b"rodata" + cubin + b"more") == cubin
    with pytest.raises(CompileError, match="no GPU binary"):
        cubin_of(host + host)


def test_a_missing_tool_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "find_tool", lambda name: None)
    with pytest.raises(CompileError, match="cuobjdump not found: pip install nvidia-cuda-cuobjdump"):
        inspect.report(b"")
    assert inspect.report_or_none(b"") is None


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(inspect, "cubin_of", lambda shared_object: shared_object)
    monkeypatch.setattr(inspect, "report", lambda cubin: KEPT)
    monkeypatch.setattr(inspect, "disassemble", lambda cubin: "machine code")
    (tmp_path / "kernel.so").write_bytes(b"code")
    (tmp_path / "facts.json").write_text(json.dumps({"spec": SPEC.as_dict()}))
    return tmp_path


def test_the_command_prints_a_table_and_writes_the_machine_code(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(str(artifact), "--sass", str(artifact / "out.sass")) == 0
    assert (artifact / "out.sass").read_text() == "machine code"
    printed = capsys.readouterr().out
    assert "24/240" in printed
    assert "kept" in printed
    assert SPEC.name in printed


@pytest.mark.parametrize("spec", [BACKWARD, PREPARE, FINISH], ids=lambda spec: spec.name)
def test_the_command_knows_the_kernels_of_gradients(
    artifact: Path, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (artifact / "facts.json").write_text(json.dumps({"spec": spec.as_dict()}))
    found = dataclasses.replace(BACKWARD_KEPT, utmastg=1)
    monkeypatch.setattr(inspect, "report", lambda cubin: found)
    assert run_command(str(artifact)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(spec.name))
    assert line.split()[3] == str(spec.shared_bytes + found.shared_static)
    assert line.endswith("kept")


def test_an_artifact_of_another_version_is_shown_without_promises(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = SPEC.as_dict()
    fields["causal"] = fields.pop("mask") == "causal"
    (artifact / "facts.json").write_text(json.dumps({"spec": fields}))
    assert run_command(str(artifact), "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["shared_dynamic"], row["broken"]) == ("kernel.so", None, [])


def test_the_command_fails_when_a_promise_is_broken(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect, "report", lambda cubin: dataclasses.replace(KEPT, spills=1))
    assert run_command(str(artifact)) == 1
    assert "1 spill instructions" in capsys.readouterr().err


def test_the_command_fails_for_a_name_that_is_neither_spec_nor_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("forward_of_nothing") == 1
    assert "neither a shipped spec" in capsys.readouterr().err


def test_a_kernel_that_is_not_in_the_store_is_no_broken_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("--preset", "smoke", "--store", str(tmp_path / "store"), "--cuda", "13") == 1
    printed = capsys.readouterr()
    assert "0 kernels inspected, 0 broken promises, 1 not in the store" in printed.out
    assert "not in the store: fa3 compile" in printed.err


def test_registers_that_the_block_never_owned_are_a_broken_promise() -> None:
    # Five warpgroups get 96 registers a thread at the launch; the SM has more, the block has not.
    spec = dataclasses.replace(SPEC, tile_m=256)
    found = dataclasses.replace(KEPT, registers=96, setmaxreg=[24, 120], overlap=[4])
    assert any("asks for 64512 registers: the block owns 61440" in broken for broken in check(spec, found))
    kept = dataclasses.replace(found, setmaxreg=[32, 112])
    assert not any("USETMAXREG" in broken for broken in check(spec, kept))
