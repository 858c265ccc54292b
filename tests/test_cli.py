"""The command line: what it prints, what it writes, and how it says no."""

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fa3
from fa3.cli import bench, check, demo, explain, measure, peers, plots, roofline, timing
from fa3.cli.main import COMMANDS, main
from fa3.compiler.build import Artifact
from fa3.compiler.store import Store, default_store
from fa3.errors import FA3Error
from fa3.plan import H200, plan, shipped_specs

ROOT = Path(__file__).resolve().parents[1]

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch, tmp_path):
    monkeypatch.setenv("FA3_STORE", str(tmp_path / "store"))
    default_store.cache_clear()
    yield
    default_store.cache_clear()


def figures_script():
    spec = importlib.util.spec_from_file_location("make_figures", ROOT / "scripts" / "make_figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(impl="fa3", **changes):
    cell = measure.make_cell(128, False, 16384, 16384, 2048)
    entrant = measure.Entrant(peers.Impl(impl, "1", lambda q, k, v, causal: lambda: None), [], 3.0)
    fields = measure.row(entrant, cell, "bf16", timing.Sample(3.0, 1600.0, 690.0), "burst")
    return {**fields, **changes}


def result(kind="speed", rows=(), date="2026-01-02T03:04:05+00:00"):
    head = {
        "kind": kind,
        "gpu": "NVIDIA H200",
        "sm_count": 132,
        "driver": "580.1",
        "cuda": "13.0",
        "torch": "2.11.0",
        "cutlass": "4.8.1",
        "fa3": "0.1.0",
        "commit": "0123456789abcdef",
        "date": date,
        "command": "fa3 bench",
        "impls": {"fa3": "0.1.0", "fa2": "torch 2.11.0"},
        "missing": {},
        "notes": [],
    }
    return {**head, "rows": list(rows)}


class TestMain:
    def test_without_a_command_it_prints_help_and_returns_2(self, capsys):
        assert main([]) == 2
        out = capsys.readouterr().out
        assert all(command in out for command in COMMANDS)

    def test_version_is_that_of_the_package(self, capsys):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out.strip() == f"fa3 {fa3.__version__}"

    def test_an_unknown_command_is_refused(self):
        with pytest.raises(SystemExit) as stopped:
            main(["sing"])
        assert stopped.value.code == 2

    def test_a_bad_argument_is_one_line_on_stderr_and_code_2(self, capsys):
        assert main(["explain", "--shape", "1,2,3"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == (
            "fa3 explain: --shape '1,2,3': expected four positive integers B,S,H,D below 2**31: "
            "batch, seqlen, heads, head dim\n"
        )

    @pytest.mark.parametrize(
        ("error", "line", "code"),
        [
            (FA3Error("no way"), "no way", 2),
            (NotImplementedError("later"), "later", 2),
            (TypeError("q: list"), "TypeError: q: list", 2),
            (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied", 1),
            (RuntimeError("CUDA out of memory. Tried\nand tried"), "not enough memory: CUDA out of memory. Tried", 1),
            (RuntimeError("broken\nat line 1"), "RuntimeError: broken", 1),
            (MemoryError(), "not enough memory: MemoryError", 1),
        ],
    )
    def test_an_error_is_one_line_and_a_traceback_only_where_asked_for(self, monkeypatch, capsys, error, line, code):
        def failing(problem):
            raise error

        monkeypatch.setattr(explain, "explanation", failing)
        assert main(["explain", "--shape", "1,2,3,64"]) == code
        assert capsys.readouterr().err == f"fa3 explain: {line}\n"
        with pytest.raises(type(error)):
            main(["--traceback", "explain", "--shape", "1,2,3,64"])

    def test_a_reader_that_has_gone_is_no_error(self):
        shown = subprocess.run(
            [f"{sys.executable} -m fa3 explain --shape 1,512,2,64 | true; echo ${{PIPESTATUS[0]}}"],
            shell=True,
            executable="/bin/bash",
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        assert (shown.stdout, shown.stderr) == ("1\n", "")

    def test_ctrl_c_ends_with_130(self, monkeypatch, capsys):
        def interrupted(problem):
            raise KeyboardInterrupt

        monkeypatch.setattr(explain, "explanation", interrupted)
        assert main(["explain", "--shape", "1,2,3,64"]) == 130

    def test_python_dash_m_is_the_same_command(self):
        shown = subprocess.run(
            [sys.executable, "-m", "fa3", "--version"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        assert shown.returncode == 0
        assert shown.stdout.strip() == f"fa3 {fa3.__version__}"


class TestExplain:
    def said(self, capsys, *arguments):
        assert main(["explain", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    @on_cpu
    def test_it_names_the_backend_here_and_the_plan_on_an_h200(self, capsys):
        assert main(["explain", "--shape", "2,4096,16,128", "--causal"]) == 0
        out = capsys.readouterr().out
        assert "backend here: tiled" in out
        assert "plan for an assumed NVIDIA H200" in out
        assert "artifact: not in the store" in out

    @on_cpu
    def test_its_plan_is_that_of_plan(self, capsys):
        said = self.said(capsys, "--shape", "2,4096,16,128", "--kv-heads", "4", "--causal")
        arguments = explain_arguments("--shape", "2,4096,16,128", "--kv-heads", "4", "--causal")
        planned = plan(explain.problem_of(arguments), H200)
        assert said["plan"]["spec"] == planned.spec.as_dict()
        assert said["plan"]["reasons"] == list(planned.reasons)
        assert said["plan"]["grid_blocks"] == planned.order.blocks
        assert (said["flops"], said["bytes"]) == (planned.flops, planned.bytes_moved)

    def test_it_shows_the_facts_of_the_artifact_in_the_store(self, capsys, tmp_path):
        (spec,) = shipped_specs("smoke")
        content = b"not a real kernel"
        facts = {"symbol": "fa3_forward", "sha256": hashlib.sha256(content).hexdigest(), "registers": 168, "spills": 0}
        store = Store([tmp_path / "store"])
        facts |= {"spec": spec.as_dict(), "target": store.target.as_dict()}
        path = store.put(spec, Artifact(content, facts))
        said = self.said(capsys, "--shape", "1,16384,16,128")
        assert said["artifact"] == {"state": "in the store", "path": str(path), **facts}
        assert main(["explain", "--shape", "1,16384,16,128"]) == 0
        assert "registers: 168" in capsys.readouterr().out

    @pytest.mark.parametrize("store", ["a file", "under a file", "open to others"])
    def test_a_store_that_cannot_be_used_promises_no_compilation(self, capsys, monkeypatch, tmp_path, store):
        folder = tmp_path / "place"
        if store == "open to others":
            folder.mkdir()
            folder.chmod(0o777)
        else:
            folder.write_text("")
        monkeypatch.setenv("FA3_STORE", str(folder / "store" if store == "under a file" else folder))
        default_store.cache_clear()
        said = self.said(capsys, "--shape", "1,16384,16,128")
        assert "the first call compiles it" not in said["artifact"]["state"]
        assert "cannot compile it: no folder of the store takes new artifacts" in said["artifact"]["state"]

    def test_roofline_times_are_work_over_rate(self, capsys):
        said = self.said(capsys, "--shape", "1,16384,16,128")
        limits = said["roofline"]
        clocks_per_us = limits["sm_count"] * limits["clock_mhz"]
        assert said["flops"] == 4 * 16 * 16384**2 * 128
        assert limits["tensor_us"] == pytest.approx(said["flops"] / (4096 * clocks_per_us))
        assert limits["exp_us"] == pytest.approx(16 * 16384**2 / (16 * clocks_per_us))
        assert limits["memory_us"] == pytest.approx(4 * 16 * 16384 * 128 * 2 / limits["bytes_per_second"] * 1e6)
        assert limits["bound"] == "tensor cores"

    def test_a_single_query_is_bound_by_memory(self, capsys):
        said = self.said(capsys, "--shape", "1,1,32,128", "--seqlen-k", "8192", "--kv-heads", "8")
        assert said["roofline"]["bound"] == "memory"

    def test_a_head_dim_without_kernel_has_no_plan_and_says_why(self, capsys):
        said = self.said(capsys, "--shape", "1,128,4,96")
        assert said["plan"] is None
        assert "96" in said["no_plan"]

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--shape", "1,128,4,64", "--kv-heads", "3"], "heads"),
            (["--shape", "1,128,4,63"], "head_dim"),
            (["--shape", "1,128,4,64", "--softmax-scale", "-1"], "softmax_scale"),
            (["--shape", "1,128,-4,64"], "--shape"),
            (["--shape", "1,128,²,64"], "--shape"),
            (["--shape", "1,128,4,64,"], "--shape"),
            (["--shape", f"1,{2**31},4,64"], "--shape"),
            (["--shape", "1," + "9" * 5000 + ",4,64"], "--shape"),
        ],
    )
    def test_a_problem_that_cannot_be_is_refused_by_name(self, capsys, arguments, named):
        assert main(["explain", *arguments]) == 2
        assert named in capsys.readouterr().err


def explain_arguments(*arguments):
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    return parser.parse_args(arguments)


class TestCheck:
    def test_a_machine_without_a_gpu_is_ready_for_tiled(self, capsys, monkeypatch):
        monkeypatch.setattr(check, "_hopper", lambda: (False, "none that torch can use"))
        monkeypatch.setattr(check, "driver_version", lambda: None)
        assert main(["check"]) == 0
        assert "\nready" in capsys.readouterr().out

    def test_a_hopper_gpu_with_an_old_driver_is_not_ready(self, capsys, monkeypatch):
        monkeypatch.setattr(check, "_hopper", lambda: (True, "NVIDIA H200 (sm_90)"))
        monkeypatch.setattr(check, "driver_version", lambda: "550.54.15")
        assert main(["check"]) == 1
        out = capsys.readouterr().out
        assert "550.54.15, too old" in out
        assert "driver 580 on runs the extra hopper, 575.51 on runs hopper-cu12" in out
        assert "not ready" in out

    def test_a_hopper_gpu_without_the_runtime_library_is_not_ready(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(check, "_hopper", lambda: (True, "NVIDIA H200 (sm_90)"))
        monkeypatch.setattr(check, "driver_version", lambda: "580.95.05")
        monkeypatch.setenv("FA3_CUTE_RUNTIME", str(tmp_path))
        assert main(["check", "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        missing = [finding["subject"] for finding in report["findings"] if finding["status"] == "missing"]
        assert "runtime library" in missing

    def test_a_store_that_others_may_write_to_is_named(self, capsys, monkeypatch, tmp_path):
        folder = tmp_path / "open"
        folder.mkdir()
        folder.chmod(0o777)
        monkeypatch.setenv("FA3_STORE", str(folder))
        default_store.cache_clear()
        main(["check"])
        assert f"chmod -R go-w {folder}" in capsys.readouterr().out

    def test_the_folder_of_the_package_is_read_only_and_not_worth_a_line_where_it_is_missing(self, tmp_path):
        store = Store([tmp_path / "own"], read_only=[tmp_path / "shipped"])
        (own,) = check._store(store, hopper=False, complete=False)
        assert own.found == f"{tmp_path / 'own'}: not there yet"
        (tmp_path / "shipped").mkdir()
        shipped, _ = check._store(store, hopper=False, complete=False)
        assert shipped.found == f"{tmp_path / 'shipped'}: 0 artifacts, read-only"

    def test_it_makes_no_folder(self, tmp_path, capsys):
        main(["check"])
        assert not (tmp_path / "store").exists()
        assert "new artifacts" not in capsys.readouterr().out

    @pytest.mark.parametrize("hopper", [False, True])
    def test_a_store_that_is_a_file_is_named(self, capsys, monkeypatch, tmp_path, hopper):
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(check, "_hopper", lambda: (hopper, "a GPU or none"))
        monkeypatch.setattr(check, "driver_version", lambda: "580.95.05")
        monkeypatch.setenv("FA3_STORE", str(tmp_path / "file"))
        default_store.cache_clear()
        main(["check", "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        (store,) = [finding for finding in findings if finding["subject"] == "store"]
        assert store["status"] == ("missing" if hopper else "note")
        assert store["found"].endswith("file: not a folder")
        (kernels,) = [finding for finding in findings if finding["subject"] == "kernels"]
        assert "the first call compiles" not in kernels["remedy"]

    @pytest.mark.parametrize(
        ("version", "extra"),
        [
            ("580.65.06", "hopper"),
            ("610.10", "hopper"),
            ("579.99", "hopper-cu12"),
            ("575.51.03", "hopper-cu12"),
            ("575.50", None),
            ("535.1", None),
        ],
    )
    def test_the_driver_decides_the_extra(self, version, extra):
        assert check.extra_for_driver(check.parse_driver(version)) == extra

    def test_what_is_no_driver_version_is_refused(self):
        with pytest.raises(ValueError, match="driver version"):
            check.parse_driver("none")


class TestDemo:
    @on_cpu
    def test_it_shows_error_memory_and_time_and_draws(self, capsys, tmp_path):
        picture = tmp_path / "demo.png"
        assert main(["demo", "--shape", "1,700,2,64", "--causal", "--png", str(picture)]) == 0
        out = capsys.readouterr().out
        assert "fa3 (tiled)" in out
        assert "plain PyTorch" in out
        assert "never made by fa3: 4 MB" in out
        assert picture.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("command", [["demo", "--png"], ["bench", "--png"], ["bench", "--json"]])
    @pytest.mark.parametrize("path", [".", "/proc/x/y", "file/y", "/dev/null"])
    def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
        self, capsys, monkeypatch, tmp_path, command, path
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(torch, "randn", lambda *_, **__: pytest.fail("it ran"))
        monkeypatch.setattr(bench, "inputs", lambda *_: pytest.fail("it ran"))
        assert main([*command, path]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"fa3 {command[0]}: {command[1]} {path}: ")

    @pytest.mark.parametrize("command", ["demo", "bench"])
    def test_a_picture_that_is_asked_for_needs_matplotlib_before_anything_runs(
        self, capsys, monkeypatch, tmp_path, command
    ):
        monkeypatch.setattr(plots, "available", lambda: False)
        assert main([command, "--png", str(tmp_path / "a.png")]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "pip install matplotlib" in captured.err

    @on_cpu
    def test_a_problem_that_does_not_fit_is_refused_before_it_takes_the_memory(self, capsys, tmp_path):
        assert main(["demo", "--shape", "1,2000000,16,64", "--png", str(tmp_path / "a.png")]) == 2
        assert "512,028.7 GB, and" in capsys.readouterr().err

    def test_plain_attention_is_attention(self):
        q, k, v = (torch.randn(1, 65, 2, 32, dtype=torch.float64) for _ in range(3))
        for causal in (False, True):
            expected, _ = fa3.reference(q, k, v, causal=causal)
            torch.testing.assert_close(demo.plain_attention(q, k, v, causal), expected, atol=1e-5, rtol=0)

    @on_cpu
    def test_a_wrong_result_is_not_passed_over(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(fa3, "flash_attn_func", lambda q, k, v, causal: v * 1.1)
        assert main(["demo", "--shape", "1,128,1,64", "--png", str(tmp_path / "demo.png")]) == 1
        assert "something is wrong" in capsys.readouterr().err


ROW_FIELDS = {
    *("impl", "direction", "dtype", "d", "dv", "causal", "b", "s", "h", "hk"),
    *("ms", "tflops", "clock_mhz", "watts", "regime"),
}


class TestBench:
    @on_cpu
    def test_it_writes_a_result_file_with_what_was_run(self, tmp_path, capsys):
        file, picture = tmp_path / "results" / "cpu.json", tmp_path / "cpu.png"
        arguments = ["bench", "--quick", "--tokens", "256", "--hidden", "128", "--cells", "64-full-128,64-causal-256"]
        assert main([*arguments, "--json", str(file), "--png", str(picture)]) == 0
        written = json.loads(file.read_text())
        assert {"gpu", "driver", "torch", "cutlass", "fa3", "commit", "date", "command"} <= set(written)
        assert [set(entry) for entry in written["rows"]] == [ROW_FIELDS] * 2
        first, second = written["rows"]
        assert (first["impl"], first["d"], first["causal"], first["b"], first["s"], first["h"]) == (
            "tiled", 64, False, 2, 128, 2,
        )  # fmt: skip
        assert (second["causal"], second["b"], second["s"]) == (True, 1, 256)
        for entry in written["rows"]:
            assert entry["ms"] > 0
            assert entry["regime"] == "burst"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert not list(file.parent.glob("*.partial"))
        assert "fa2: needs a GPU" in capsys.readouterr().out

    def test_tflops_are_flops_over_time(self):
        assert row()["tflops"] == pytest.approx(4 * 16 * 16384**2 * 128 / 3e-3 / 1e12, rel=1e-4)

    def test_a_causal_mask_counts_half(self):
        shape = {"batch": 2, "heads": 3, "seqlen_q": 5, "seqlen_k": 5, "head_dim": 8, "head_dim_v": 8}
        assert roofline.attention_flops(**shape, causal=False) == 4 * 2 * 3 * 5 * 5 * 8
        assert roofline.attention_flops(**shape, causal=True) == 2 * 2 * 3 * 5 * 5 * 8

    def test_utilisation_is_one_at_the_rate_of_the_chip(self):
        assert roofline.utilisation(132 * 4096 * 1.5e9 / 1e12, 132, 1500) == pytest.approx(1.0)

    def test_rounds_alternate_between_implementations(self, monkeypatch):
        order = []

        def entrant(name):
            impl = peers.Impl(name, "1", lambda q, k, v, causal: lambda: None)
            return measure.Entrant(impl, [lambda: order.append(name)], 1e9)

        cell = measure.make_cell(64, False, 128, 128, 64)
        cpu = torch.device("cpu")
        rows = measure.measure_cell(
            [entrant("fa3"), entrant("fa2")], cell, "bf16", cpu, timing.Sensors(cpu), burst_rounds=3, steady_rounds=0
        )
        assert order == ["fa3", "fa2"] * 3
        assert [entry["impl"] for entry in rows] == ["fa3", "fa2"]

    def test_a_steady_run_lasts_and_counts_only_what_came_after_settling(self, monkeypatch):
        monkeypatch.setattr(timing, "SETTLE_SECONDS", 0.05)
        cpu = torch.device("cpu")
        calls = []

        def call():
            calls.append(1)
            import time

            # The first half second of a real card is faster; here the first calls are slower.
            time.sleep(0.02 if len(calls) <= 2 else 0.005)

        monkeypatch.setattr(timing, "CHUNK_MS", 5.0)
        sample = timing.steady(cpu, [call], 5.0, 0.25, timing.Sensors(cpu))
        assert 5.0 <= sample.ms < 10.0

    def test_an_implementation_that_fails_is_noted_and_the_others_are_measured(self):
        def broken(q, k, v, causal):
            raise RuntimeError("no kernel image\nsecond line")

        cell = measure.make_cell(64, False, 128, 128, 64)
        cpu = torch.device("cpu")
        good = peers.Impl("tiled", "1", peers._tiled)
        notes = []
        entrants = measure.enter(
            [(peers.Impl("fa4", "1", broken), None), (good, None)],
            cell,
            measure.inputs(cell, torch.float32, cpu),
            cpu,
            notes,
        )
        assert [entrant.impl.name for entrant in entrants] == ["tiled"]
        assert notes == ["64-full-128: fa4 left out: RuntimeError: no kernel image"]

    def test_an_implementation_that_computes_something_else_is_noted(self):
        cell = measure.make_cell(64, False, 128, 128, 64)
        cpu = torch.device("cpu")
        wrong = peers.Impl("official", "1", lambda q, k, v, causal: lambda: v)
        notes = []
        tensors = measure.inputs(cell, torch.float32, cpu)
        measure.enter([(peers.Impl("tiled", "1", peers._tiled), None), (wrong, None)], cell, tensors, cpu, notes)
        assert len(notes) == 1
        assert notes[0].startswith("64-full-128: official differs from tiled")

    def test_sdpa_computes_what_fa3_computes(self):
        q, k, v = (torch.randn(2, 96, 4, 64) for _ in range(3))
        for causal in (False, True):
            out = peers._sdpa(q, k[:, :, :2], v[:, :, :2], causal)().transpose(1, 2)
            expected = fa3.flash_attn_func(q, k[:, :, :2], v[:, :, :2], causal=causal)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize(
        "cells", ["128", "128-full", "128-diagonal-512", "0-full-512", "64-causal-0", "a-full-512", ""]
    )
    def test_cells_that_are_none_are_refused(self, cells):
        with pytest.raises(ValueError, match="--cells"):
            bench.parse_cells(cells, 16384, 2048)

    def test_default_cells_hold_16k_tokens_of_2048_columns(self):
        arguments = bench_arguments()
        cells = bench._choose_cells(arguments, on_gpu=True)
        assert len(cells) == 36
        assert all(cell.batch * cell.seqlen == 16384 and cell.heads * cell.head_dim == 2048 for cell in cells)

    def test_an_unknown_implementation_is_refused_with_the_known_ones(self, capsys):
        assert main(["bench", "--impls", "fa5"]) == 2
        assert "fa3, official, fa4, cudnn, fa2, tiled" in capsys.readouterr().err

    @on_cpu
    def test_the_time_limit_stops_between_cells_and_says_so(self, tmp_path):
        file = tmp_path / "none.json"
        assert main(["bench", "--quick", "--cells", "64-full-128", "--limit", "-1", "--json", str(file)]) == 1
        assert json.loads(file.read_text())["notes"][-1] == "stopped after -1 s: 1 cells not measured"

    @on_cpu
    def test_host_time_has_rows_of_its_own(self, tmp_path, monkeypatch):
        monkeypatch.setattr(measure, "HOST_CALLS", 2)
        monkeypatch.setattr(measure, "HOST_ROUNDS", 2)
        file = tmp_path / "host.json"
        assert main(["bench", "--host", "--json", str(file)]) == 0
        (entry,) = json.loads(file.read_text())["rows"]
        assert entry["regime"] == "host"
        assert entry["host_us"] > 0
        assert entry["ms"] is None

    @on_cpu
    def test_the_ablation_needs_a_gpu(self, capsys):
        assert main(["bench", "--ablation"]) == 2
        assert "needs a Hopper GPU" in capsys.readouterr().err

    def test_the_ablation_runs_every_switch_of_the_schedule(self):
        names = [spec for _, spec in measure.schedule_impls()]
        assert len(names) == len(set(names))
        specs = [spec for spec in shipped_specs("schedule") if spec.name in names]
        assert {(spec.dtype, spec.head_dim, spec.causal) for spec in specs} == {("bf16", 128, False)}
        switches = {(spec.warp_specialized, spec.pingpong, spec.overlap) for spec in specs}
        assert switches == set(itertools.product((False, True), repeat=3))


def bench_arguments(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


class TestFigures:
    def test_the_readme_is_what_the_result_files_say(self):
        checked = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "make_figures.py"), "--check"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        assert checked.returncode == 0, checked.stderr

    def test_the_table_marks_the_fastest_and_comes_from_the_latest_file(self, tmp_path):
        script = figures_script()
        old = result(rows=[row(tflops=999.0)], date="2025-01-01T00:00:00+00:00")
        new = result(rows=[row(tflops=640.4), row("fa2", tflops=346.0)])
        (tmp_path / "a.json").write_text(json.dumps(new))
        (tmp_path / "b.json").write_text(json.dumps(old))
        (tmp_path / "cpu.json").write_text(json.dumps({**new, "gpu": None, "date": "2027"}))
        block = script.block(script.latest(tmp_path))
        assert "| 128 | full | 16384 | **640** | 346 |" in block
        assert "999" not in block
        assert "NVIDIA H200, driver 580.1, CUDA 13.0" in block

    def test_without_result_files_the_readme_says_so(self, tmp_path):
        script = figures_script()
        assert "Not measured yet" in script.block(script.latest(tmp_path))

    def test_a_readme_without_markers_is_refused(self):
        with pytest.raises(ValueError, match="markers"):
            figures_script().updated("# fa3", "block")

    @pytest.mark.parametrize("kind", ["speed", "ablation", "host"])
    def test_every_kind_of_result_can_be_drawn(self, kind, tmp_path):
        changes = {"speed": {}, "ablation": {"spec": "forward_serial"}, "host": {"host_us": 17.0, "regime": "host"}}
        drawn = result(kind, [row(**changes[kind]), row("fa2", host_us=22.0, regime=row(**changes[kind])["regime"])])
        plots.save(plots.figure_of(drawn), tmp_path / "drawn.png")
        assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")

    def test_the_same_result_gives_the_same_picture(self, tmp_path):
        drawn = result(rows=[row(), row("fa2", tflops=346.0)])
        for name in ("first.png", "second.png"):
            plots.save(plots.figure_of(drawn), tmp_path / name)
        assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()

    def test_without_matplotlib_the_error_names_the_remedy(self, monkeypatch):
        monkeypatch.setattr(plots, "available", lambda: False)
        with pytest.raises(FA3Error, match="pip install matplotlib"):
            plots.figure_of(result(rows=[row()]))
