"""``fa3 bench``: what it measures, how, and what it writes; and the figures made of that."""

import argparse
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

import fa3
from command_line import ROOT, empty_store, figures_script, on_cpu, result, row  # noqa: F401
from fa3.backends import hopper
from fa3.cli import bench, measure, odd, peers, plots, roofline, sweep, timing
from fa3.cli.main import main
from fa3.errors import FA3Error
from fa3.plan import computes, why_not
from fa3.presets import shipped_specs
from fa3.tiles import CANDIDATES
from problems import problem_of

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

    def test_each_round_goes_over_all_implementations_in_another_order(self):
        order = []

        def entrant(name):
            impl = peers.Impl(name, "1", lambda q, k, v, causal: lambda: None)
            return measure.Entrant(impl, [lambda: order.append(name)], 1e9)

        names = ["fa3", "official", "fa2"]
        cell = measure.make_cell(64, False, 128, 128, 64)
        cpu = torch.device("cpu")
        rows = measure.measure_cell(
            [entrant(name) for name in names], cell, "bf16", cpu, timing.Sensors(cpu), burst_rounds=8, steady_rounds=0
        )
        taken = [tuple(order[first : first + 3]) for first in range(0, len(order), 3)]
        assert len(taken) == 8
        assert all(sorted(each) == sorted(names) for each in taken)
        assert len(set(taken)) > 3
        assert [entry["impl"] for entry in rows] == names

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
        assert "fa3, fa3-det, official, fa4, cudnn, fa2, tiled" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["bench", "accuracy"])
    @pytest.mark.parametrize("limit", ["nan", "-NaN", "soon"])
    def test_a_time_limit_that_is_no_number_is_refused(self, command, limit, capsys):
        with pytest.raises(SystemExit) as stopped:
            main([command, f"--limit={limit}"])
        assert stopped.value.code == 2
        assert f"argument --limit: {limit}: must be a number of seconds; inf: no limit" in capsys.readouterr().err

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

    @pytest.mark.parametrize("gpu", [False, True], ids=["no GPU", "another GPU"])
    @pytest.mark.parametrize("kind", ["ablation", "sweep", "odd"])
    def test_what_measures_the_kernels_alone_needs_a_hopper_gpu(self, capsys, monkeypatch, tmp_path, kind, gpu):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
        file = tmp_path / "never.json"
        assert main(["bench", f"--{kind}", "--json", str(file)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == f"fa3 bench: --{kind} measures fa3's own kernels: it needs a Hopper GPU\n"
        assert not file.exists()

    @pytest.mark.parametrize(
        ("arguments", "refusal"),
        [
            (["--sweep", "--cells", "128-full-512"], "--cells: --sweep has no use for it"),
            (["--sweep", "--impls", "fa2"], "--impls: --sweep has no use for it"),
            (["--sweep", "--png", "a.png"], "--png: --sweep has no use for it"),
            (["--odd", "--quick"], "--quick: --odd has no use for it"),
            (["--odd", "--head-dims", "64"], "--head-dims: --odd has no use for it"),
            (
                ["--sweep", "--head-dims", "64,72"],
                "--head-dims 72: those of the tile classes are 64, 96, 128, 192, 256",
            ),
            (["--ablation", "--dtype", "bf16"], "--ablation --dtype bf16: the ablation is the paper's, in fp16"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_an_option_that_would_change_nothing_is_refused(self, capsys, arguments, refusal):
        assert main(["bench", *arguments]) == 2
        assert capsys.readouterr().err == f"fa3 bench: {refusal}\n"

    def test_a_run_is_of_one_kind(self, capsys):
        with pytest.raises(SystemExit) as stopped:
            main(["bench", "--sweep", "--ablation"])
        assert stopped.value.code == 2
        assert "not allowed with" in capsys.readouterr().err

    def test_the_ablation_runs_every_switch_of_the_schedule_as_the_paper_does(self):
        names = [spec for _, spec in measure.schedule_impls()]
        assert len(names) == len(set(names)) == 8
        specs = [spec for spec in shipped_specs("schedule") if spec.name in names]
        assert {(spec.dtype, spec.head_dim, spec.mask) for spec in specs} == {("fp16", 128, "full")}
        switches = {(spec.warp_specialized, spec.pingpong, spec.overlap) for spec in specs}
        assert switches == set(itertools.product((False, True), repeat=3))
        (cell,) = bench._choose_cells(bench_arguments("--ablation"), on_gpu=True)
        assert (cell.batch, cell.seqlen, cell.heads, cell.head_dim, cell.causal) == (4, 16384, 16, 128, False)


def bench_arguments(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


class TestSweep:
    def test_every_candidate_can_compute_the_shapes_of_its_class(self):
        kinds = tuple(CANDIDATES)
        tried = set()
        for shape in sweep.shapes(kinds):
            sizes = {
                "batch": shape.b,
                "seqlen_q": shape.s,
                "seqlen_k": shape.s,
                "heads_q": shape.h,
                "heads_kv": shape.h,
            }
            window = {"window_left": sweep.WINDOW, "window_right": 0} if shape.mask == "window" else {}
            problem = problem_of(
                **sizes, head_dim=shape.d, head_dim_v=shape.dv, causal=shape.mask == "causal", **window
            )
            for spec in sweep.candidates((shape.d, shape.dv), shape.mask, "bf16"):
                assert computes(spec, problem)
                tried.add(spec)
        assert tried == set(shipped_specs("sweep"))

    def test_shapes_hold_as_many_tokens_or_do_not_fill_the_card(self):
        for shape in sweep.shapes(tuple(CANDIDATES)):
            assert shape.b * shape.s == sweep.TOKENS or (shape.b, shape.h) == (1, 16)
            assert shape.h * shape.d <= sweep.HIDDEN or shape.h == 16

    def test_tile_classes_are_all_or_those_of_a_head_dim(self):
        assert sweep.tile_classes() == tuple(CANDIDATES)
        assert sweep.tile_classes([64, 96]) == ((64, 64), (96, 96), (64, 256))
        with pytest.raises(ValueError, match="--head-dims 512"):
            sweep.tile_classes([64, 512])

    def test_a_row_ranks_the_candidates_of_a_shape_by_their_time(self, monkeypatch):
        asked = []

        def forward_with_spec(spec, q, k, v, options):
            asked.append((spec, tuple(q.shape), options))

        def burst(device, calls, count, sensors=None):
            calls[0]()
            # The narrower the tile, the faster; the clock is read while the calls run.
            return timing.Sample(asked[-1][0].tile_m / 1e3, None if sensors is None else 1700.0)

        monkeypatch.setattr(hopper, "forward_with_spec", forward_with_spec)
        monkeypatch.setattr(sweep, "burst", burst)
        cpu = torch.device("cpu")
        shape = sweep.Shape(64, 64, "window", 2, 32, 1)
        (entry,) = sweep.sweep(cpu, torch.bfloat16, [shape], timing.Sensors(cpu))
        specs = sweep.candidates((64, 64), "window", "bf16")
        assert {spec for spec, _, _ in asked} == set(specs)
        assert {(shape, options.window_left, options.window_right) for _, shape, options in asked} == {
            ((2, 32, 1, 64), sweep.WINDOW, 0)
        }
        by_width = sorted(specs, key=lambda spec: spec.tile_m)
        assert entry["fastest"] == by_width[0].name
        assert list(entry["microseconds"].values()) == [float(spec.tile_m) for spec in by_width]
        assert entry["microseconds"][entry["runner_up"]] == by_width[1].tile_m
        assert entry["margin"] == pytest.approx(by_width[1].tile_m / by_width[0].tile_m - 1)
        assert (entry["d"], entry["mask"], entry["b"], entry["s"], entry["dtype"]) == (64, "window", 2, 32, "bf16")
        assert entry["clock_mhz"] == 1700.0
        assert sweep.describe(entry).startswith("(2, 32, 1, d 64) window: 64x128x4 64.0  128x128x3 128.0  192x")

    def test_its_file_is_written_after_every_shape_and_says_what_was_not_measured(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(bench, "_check_kind", lambda args: None)
        monkeypatch.setattr(sweep, "burst", lambda device, calls, count, sensors=None: timing.Sample(0.25))
        monkeypatch.setattr(sweep, "shapes", lambda kinds: [sweep.Shape(*dims, "full", 1, 16, 1) for dims in kinds])
        file = tmp_path / "sweep.json"
        arguments = ["bench", "--sweep", "--head-dims", "192", "--json", str(file)]
        assert main(arguments) == 0
        written = json.loads(file.read_text())
        assert written["kind"] == "sweep"
        assert [(entry["d"], entry["dv"]) for entry in written["rows"]] == [(192, 128), (192, 192)]
        assert "(1, 16, 1, d 192, dv 128) full: " in capsys.readouterr().out

        describe = sweep.describe

        def interrupted(entry):
            if entry["dv"] == 192:
                raise KeyboardInterrupt
            return describe(entry)

        monkeypatch.setattr(sweep, "describe", interrupted)
        assert main(arguments) == 130
        assert [entry["dv"] for entry in json.loads(file.read_text())["rows"]] == [128]

        assert main([*arguments, "--limit", "-1"]) == 1
        written = json.loads(file.read_text())
        assert written["rows"] == []
        assert written["notes"][-1] == "stopped after -1 s: 2 shapes not measured"
        assert "note: stopped after -1 s: 2 shapes not measured" in capsys.readouterr().out


SIZES = (1, 64, 2, 1, 16, 16)


class TestOdd:
    def measured(self, monkeypatch, impls, shapes):
        """Rows of each shape, and the notes."""
        monkeypatch.setattr(odd, "ROUNDS", 1)
        monkeypatch.setattr(odd, "CALLS", 2)
        notes = []
        return list(odd.measure_odd(torch.device("cpu"), torch.float32, shapes, impls, notes)), notes

    def test_a_row_has_the_time_with_and_without_the_host_and_a_window_its_share(self, monkeypatch):
        shapes = (odd.OddShape(*SIZES, False), odd.OddShape(*SIZES, True), odd.OddShape(*SIZES, True, 7))
        impls = [peers.Impl("tiled", "1", peers._tiled), peers.Impl("fa3", "1", peers._tiled)]
        (full, causal, windowed), notes = self.measured(monkeypatch, impls, shapes)
        assert notes == []
        for rows in (full, causal):
            assert [entry["impl"] for entry in rows] == ["tiled", "fa3"]
            assert all(entry["gpu_us"] > 0 and entry["call_us"] > 0 and entry["tflops"] >= 0 for entry in rows)
            assert {entry["dtype"] for entry in rows} == {"fp32"}
        # Peers have no windows here. Of 64 x 64 pairs a window of 8 keys leaves 7 rows of fewer and 57 of 8.
        (entry,) = windowed
        pairs = sum(min(row + 1, 8) for row in range(64))
        assert entry["of_ideal_share"] == pytest.approx(
            entry["gpu_us"] / (full[1]["gpu_us"] * pairs / 64**2), rel=0.01, abs=0.01
        )
        assert odd.describe(full).startswith("(1, 64, 2/1, d 16) full: tiled ")
        assert odd.describe(windowed).startswith("(1, 64, 2/1, d 16) window 7: fa3 ")
        assert odd.describe(windowed).endswith("of the ideal share")

    def test_a_line_has_the_lead_over_the_best_peer_by_both_times(self):
        shape = {"b": 1, "s": 8, "h": 2, "hk": 1, "d": 192, "dv": 128, "causal": True, "window": 0}
        rows = [
            {**shape, "impl": impl, "gpu_us": gpu_us, "call_us": call_us}
            for impl, gpu_us, call_us in (("cudnn", 30.0, 33.0), ("fa3", 20.0, 22.0), ("fa2", 25.0, 44.0))
        ]
        assert odd.describe(rows) == (
            "(1, 8, 2/1, d 192, dv 128) causal: cudnn 30.0/33.0  fa3 20.0/22.0  fa2 25.0/44.0 us"
            "  best peer / fa3: 1.250 of the GPU's time, 1.500 with the host"
        )
        assert odd.describe([rows[0], rows[2]]).endswith("fa2 25.0/44.0 us")

    def test_who_cannot_compute_a_shape_or_computes_something_else_is_noted(self, monkeypatch):
        def broken(q, k, v, causal):
            raise RuntimeError("no kernel image")

        impls = [
            peers.Impl("fa3", "1", broken),
            peers.Impl("tiled", "1", peers._tiled),
            peers.Impl("official", "1", lambda q, k, v, causal: lambda: torch.zeros_like(q)),
        ]
        shapes = (odd.OddShape(*SIZES, False), odd.OddShape(*SIZES, True, 7))
        (full, windowed), notes = self.measured(monkeypatch, impls, shapes)
        assert [entry["impl"] for entry in full] == ["tiled", "official"]
        assert notes[0] == "(1, 64, 2/1, d 16) full: fa3 left out: RuntimeError: no kernel image"
        assert notes[1].startswith("(1, 64, 2/1, d 16) full: official differs from tiled")
        # There is nothing that the window could be compared with.
        assert [entry["impl"] for entry in windowed] == ["fa3"]
        assert "of_ideal_share" not in windowed[0]

    def test_a_shape_that_nobody_can_compute_has_no_rows(self, monkeypatch):
        shapes = (odd.OddShape(*SIZES, True, 7), odd.OddShape(*SIZES, False))
        measured, _ = self.measured(monkeypatch, [peers.Impl("tiled", "1", peers._tiled)], shapes)
        assert [[entry["window"] for entry in rows] for rows in measured] == [[0]]

    def test_its_file_has_the_rows_of_all_shapes_until_the_time_is_up(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(bench, "_check_kind", lambda args: None)
        monkeypatch.setattr(odd, "SHAPES", (odd.OddShape(*SIZES, False), odd.OddShape(*SIZES, True)))
        monkeypatch.setattr(odd, "ROUNDS", 1)
        file = tmp_path / "odd.json"
        assert main(["bench", "--odd", "--impls", "tiled", "--json", str(file)]) == 0
        written = json.loads(file.read_text())
        assert written["kind"] == "odd"
        assert [(entry["impl"], entry["causal"]) for entry in written["rows"]] == [("tiled", False), ("tiled", True)]
        assert "(1, 64, 2/1, d 16) causal: tiled " in capsys.readouterr().out
        assert main(["bench", "--odd", "--impls", "tiled", "--limit", "-1"]) == 1
        assert "stopped after -1 s: 2 shapes not measured" in capsys.readouterr().out

    def test_every_shape_has_a_kernel_and_comes_once(self):
        assert len(set(odd.SHAPES)) == len(odd.SHAPES)
        for shape in odd.SHAPES:
            sizes = {
                "batch": shape.b,
                "seqlen_q": shape.s,
                "seqlen_k": shape.s,
                "heads_q": shape.h,
                "heads_kv": shape.hk,
            }
            problem = problem_of(
                **sizes,
                head_dim=shape.d,
                head_dim_v=shape.dv,
                causal=shape.causal,
                window_left=shape.window or -1,
            )
            assert why_not(problem) is None
            assert problem.mask == ("window" if shape.window else "causal" if shape.causal else "full")

    def test_every_windowed_shape_comes_after_the_same_without_one(self):
        seen = set()
        for shape in odd.SHAPES:
            place = shape.b, shape.s, shape.h, shape.hk, shape.d, shape.dv
            assert not shape.window or place in seen
            seen |= set() if shape.causal else {place}


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
