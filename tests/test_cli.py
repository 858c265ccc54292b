"""The command line: what it prints, what it writes, and how it says no."""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import fa3
from command_line import ROOT, empty_store, on_cpu  # noqa: F401
from fa3.cli import bench, check, demo, explain, plots
from fa3.cli.main import COMMANDS, main
from fa3.compiler.build import Artifact
from fa3.compiler.store import Store, default_store
from fa3.errors import FA3Error
from fa3.options import Options
from fa3.plan import H200, plan
from fa3.presets import shipped_specs
from fa3.problem import check_forward


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
        assert said["plan"]["order"] == asdict(planned.order)
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

    @on_cpu
    def test_it_shows_the_artifact_of_a_pass_before_attention_too(self, capsys):
        arguments = ("--shape", "4,4096,8,256", "--dtype", "e4m3")
        said = self.said(capsys, *arguments)
        assert said["plan"]["before"] == "transpose_e4m3_4"
        assert main(["explain", *arguments]) == 0
        out = capsys.readouterr().out
        assert "spec of a pass before: transpose_e4m3_4\n" in out
        assert out.index("artifact of the pass before: not in the store") < out.index("artifact: not in the store")
        assert "artifact_before" not in self.said(capsys, *arguments, "--v-transposed")

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

    def test_a_dtype_without_kernel_has_no_plan_and_says_why(self, capsys):
        said = self.said(capsys, "--shape", "1,128,4,96", "--dtype", "fp32")
        assert said["plan"] is None
        assert "fp32" in said["no_plan"]
        assert main(["explain", "--shape", "1,128,4,96", "--dtype", "fp32"]) == 0
        assert "the hopper backend has none: dtype fp32: kernels exist for fp16, bf16" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "mask", "heads_packed"),
        [
            (["--causal"], "causal", False),
            (["--seqlen-k", "8192"], "full", True),
            (["--seqlen-k", "8192", "--causal"], "full", True),
        ],
        ids=["prefill", "decode", "decode-causal"],
    )
    def test_a_decode_step_is_planned_without_a_mask_and_with_packed_heads(self, capsys, arguments, mask, heads_packed):
        seqlen = 8192 if mask == "causal" else 1
        said = self.said(capsys, "--shape", f"8,{seqlen},32,128", "--kv-heads", "8", *arguments)
        assert (said["plan"]["spec"]["mask"], said["plan"]["spec"]["pack_gqa"]) == (mask, heads_packed)
        assert any("share tiles" in reason for reason in said["plan"]["reasons"]) == heads_packed

    @pytest.mark.parametrize(
        ("arguments", "mask"),
        [
            ([], "full: every query sees all 512 keys"),
            (["--window", "511,-1"], "full: every query sees all 512 keys, what was asked hides none"),
            (["--causal"], "causal: query i, at position p = i, sees keys up to p"),
            (["--window", "-1,0"], "causal: query i, at position p = i, sees keys up to p"),
            (["--window=-1,0"], "causal: query i, at position p = i, sees keys up to p"),
            (["--window", "9,0"], "window: query i, at position p = i, sees keys from p - 9 to p"),
            (["--window", "9,7", "--causal"], "window: query i, at position p = i, sees keys from p - 9 to p"),
            (["--window", "0,7"], "window: query i, at position p = i, sees keys from p to p + 7"),
            (["--window", "-1,7"], "window: query i, at position p = i, sees keys up to p + 7"),
            (["--window", "9,-1"], "window: query i, at position p = i, sees keys from p - 9 on"),
            (
                ["--attention-chunk", "64", "--seqlen-k", "1000"],
                "window: query i, at position p = i + 488, sees keys of its chunk, 64 keys from 64 * floor(p / 64) on",
            ),
            (
                ["--attention-chunk", "64", "--causal", "--seqlen-k", "500"],
                "window: query i, at position p = i - 12, sees keys up to p of its chunk, "
                "64 keys from 64 * floor(p / 64) on",
            ),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_it_says_in_words_which_keys_a_query_sees(self, capsys, arguments, mask):
        assert main(["explain", "--shape", "1,512,2,64", *arguments]) == 0
        assert f"\n  mask {mask}\n" in capsys.readouterr().out

    @pytest.mark.parametrize("seqlen_k", [37, 20, 50])
    @pytest.mark.parametrize(
        ("arguments", "left", "right", "chunk"),
        [
            ([], None, None, None),
            (["--causal"], None, 0, None),
            (["--window", "5,3"], 5, 3, None),
            (["--window", "-1,4", "--attention-chunk", "16"], None, 4, 16),
        ],
        ids=["full", "causal", "window", "chunk"],
    )
    def test_work_is_that_of_the_pairs_that_are_seen(self, capsys, arguments, left, right, chunk, seqlen_k):
        shape = ["--shape", "3,37,4,64", "--head-dim-v", "128", "--seqlen-k", str(seqlen_k)]
        said = self.said(capsys, *shape, *arguments)
        positions = range(seqlen_k - 37, seqlen_k)
        seen = [
            sum(
                (left is None or p - left <= key)
                and (right is None or key <= p + right)
                and (chunk is None or key // chunk == p // chunk)
                for key in range(seqlen_k)
            )
            for p in positions
        ]
        assert said["visible_pairs"] == sum(seen)
        assert said["flops"] == 2 * 3 * 4 * sum(seen) * (64 + 128)
        limits = said["roofline"]
        assert limits["exp_us"] == pytest.approx(3 * 4 * sum(seen) / (16 * limits["sm_count"] * limits["clock_mhz"]))
        assert said["first_row_with_keys"] == next(row for row, keys in enumerate(seen) if keys)

    def test_queries_without_keys_are_named_with_their_lse(self, capsys):
        arguments = ["explain", "--shape", "1,64,2,64", "--seqlen-k", "40", "--causal"]
        assert main(arguments) == 0
        assert "the first 24 queries see no key: out 0, LSE -inf" in capsys.readouterr().out
        assert main([*arguments, "--sink"]) == 0
        assert "the first 24 queries see no key: out 0, LSE their head's sink" in capsys.readouterr().out

    def test_without_any_key_no_kernel_runs(self, capsys):
        said = self.said(capsys, "--shape", "1,8,4,64", "--seqlen-k", "0")
        assert said["plan"] is None
        assert said["no_plan"] == "there is no key, so out is 0 without a kernel"

    def test_its_problem_is_that_of_a_call_with_the_same_options(self):
        asked = ["--kv-heads", "2", "--head-dim-v", "64", "--window", "9,0", "--attention-chunk", "16", "--lse"]
        asked += ["--softcap", "30", "--sink", "--qv", "--pack-gqa", "--sm-margin", "5", "--dtype", "fp16"]
        q, k = torch.empty(2, 24, 4, 32, dtype=torch.float16), torch.empty(2, 24, 2, 32, dtype=torch.float16)
        v, qv = torch.empty(2, 24, 2, 64, dtype=torch.float16), torch.empty(2, 24, 4, 64, dtype=torch.float16)
        options = Options(9, -1, 16, 30.0, torch.empty(4), qv, pack_gqa=True, sm_margin=5)
        expected = check_forward(q, k, v, causal=True, return_lse=True, options=options)
        assert explain.problem_of(explain_arguments("--shape", "2,24,4,32", *asked)) == expected
        assert explain.problem_of(explain_arguments("--shape", "2,24,4,32")).pack_gqa is None
        assert explain.problem_of(explain_arguments("--shape", "2,24,4,32", "--no-pack-gqa")).pack_gqa is False

    def test_of_e4m3_it_says_how_scales_and_v_come_and_counts_twice_the_rate_of_tensor_cores(self, capsys):
        arguments = ["--shape", "2,8192,8,128", "--dtype", "e4m3", "--scale-blocks", "64,128", "--v-transposed"]
        arguments += ["--no-two-level", "--out-dtype", "fp16"]
        problem = explain.problem_of(explain_arguments(*arguments))
        assert (problem.q_block, problem.k_block, problem.v_transposed) == (64, 128, True)
        assert (problem.two_level, problem.out_dtype) == (False, "fp16")
        assert main(["explain", *arguments]) == 0
        out = capsys.readouterr().out
        assert "V^T  (2, 8, 128, 8192)" in out
        assert "scales: of 64 rows of q, of 128 of k and v" in out
        assert "out  fp16" in out
        assert "packed heads: no" in out
        assert "(8-bit)" in out
        said = self.said(capsys, *arguments)
        wide = self.said(capsys, "--shape", "2,8192,8,128")
        assert said["roofline"]["tensor_us"] == wide["roofline"]["tensor_us"] / 2
        assert said["plan"]["spec"]["key_block"] == 128

    def test_of_e4m3_plain_arguments_are_a_scale_a_head_and_out_in_bf16(self, capsys):
        assert main(["explain", "--shape", "2,100,8,128", "--dtype", "e4m3", "--kv-heads", "2", "--pack-gqa"]) == 0
        out = capsys.readouterr().out
        assert "scales of q, k and v: one a head" in out
        assert "out  bf16" in out
        assert "packed heads: no: kernels of e4m3 pack no heads" in out
        assert "a call in e4m3 has none: flash_attn_fp8_func" in out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["--dtype", "e4m3", "--scale-blocks", "64"],
                "--scale-blocks '64': expected Q,K: 64 or 128 rows of q, 64, 96",
            ),
            (["--dtype", "e4m3", "--scale-blocks", "64,32"], "--scale-blocks '64,32': expected Q,K: 64 or 128 rows"),
            (["--dtype", "e4m3", "--scale-blocks", "0,0"], "--scale-blocks '0,0': expected Q,K: 64 or 128 rows"),
            (["--v-transposed"], "--v-transposed: goes with --dtype e4m3, not bf16"),
            (["--scale-blocks", "64,64"], "--scale-blocks: goes with --dtype e4m3, not bf16"),
            (["--no-two-level"], "--two-level, --no-two-level: goes with --dtype e4m3, not bf16"),
            (["--out-dtype", "fp16"], "--out-dtype: goes with --dtype e4m3, not bf16"),
            (["--dtype", "e4m3", "--qv"], "qv beside dtype='e4m3'"),
        ],
        ids=str,
    )
    def test_options_of_e4m3_that_mean_nothing_are_refused(self, capsys, arguments, message):
        assert main(["explain", "--shape", "1,64,2,64", *arguments]) == 2
        assert message in capsys.readouterr().err

    def test_options_that_were_asked_for_are_lines_of_the_call_and_fields_of_the_spec(self, capsys):
        arguments = ["explain", "--shape", "2,512,8,64", "--sink", "--softcap", "15", "--qv"]
        assert main(arguments) == 0
        out = capsys.readouterr().out
        for line in ("qv   (2, 512, 8, 64)", "sink (8,)", "softmax_scale 0.0883883; softcap 15"):
            assert f"\n  {line}\n" in out
        said = self.said(capsys, *arguments[1:])
        assert (said["plan"]["spec"]["softcap"], said["plan"]["spec"]["qv"]) == (True, True)
        assert said["flops"] == 2 * 2 * 8 * 512**2 * (64 + 2 * 64)
        plain = self.said(capsys, "--shape", "2,512,8,64")
        assert said["roofline"]["exp_us"] == pytest.approx(2 * plain["roofline"]["exp_us"])

    @pytest.mark.parametrize(
        ("arguments", "packing", "packed"),
        [
            (["--kv-heads", "8"], "no: each query head has a K/V head of its own", False),
            (["--kv-heads", "2"], "yes, the plan's choice: the 4 query heads of a K/V head share tiles", True),
            (["--kv-heads", "2", "--no-pack-gqa"], "no, as asked", False),
            (["--kv-heads", "2", "--pack-gqa"], "yes, as asked: the 4 query heads", True),
            (["--kv-heads", "2", "--pack-gqa", "--qv"], "no, though asked for: kernels with qv pack no heads", False),
        ],
        ids=["no group", "plan", "refused", "asked", "asked beside qv"],
    )
    def test_it_says_whether_query_heads_share_tiles_and_who_chose(self, capsys, arguments, packing, packed):
        said = self.said(capsys, "--shape", "64,1,8,128", "--seqlen-k", "512", *arguments)
        assert said["plan"]["packing"].startswith(packing)
        assert said["plan"]["spec"]["pack_gqa"] == packed

    def test_multiprocessors_left_free_are_not_planned_for(self, capsys):
        said = self.said(capsys, "--shape", "2,4096,16,128", "--sm-margin", "100")
        assert said["plan"]["grid_blocks"] == said["roofline"]["sm_count"] - 100
        assert any(f"on {said['plan']['grid_blocks']} multiprocessors" in reason for reason in said["plan"]["reasons"])

    def test_wide_values_are_computed_in_parts_one_launch_each(self, capsys):
        arguments = ["--shape", "1,512,4,40", "--head-dim-v"]
        assert self.said(capsys, *arguments, "320")["plan"]["column_parts"] == [256, 64]
        assert self.said(capsys, *arguments, "256")["plan"]["column_parts"] == [256]
        assert main(["explain", *arguments, "320"]) == 0
        out = capsys.readouterr().out
        assert "tile class (64, 256) for head dims 40 and 320; columns of v in 2 parts, 256 and 64" in out
        assert "2 launches of" in out

    def test_odd_head_dims_are_planned_for_the_tile_class_that_holds_them(self, capsys):
        said = self.said(capsys, "--shape", "1,4096,4,40", "--head-dim-v", "320")
        assert (said["plan"]["spec"]["head_dim"], said["plan"]["spec"]["head_dim_v"]) == (64, 256)

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--shape", "1,128,4,64", "--kv-heads", "3"], "heads"),
            (["--shape", "1,128,4,63"], "head_dim"),
            (["--shape", "1,128,4,64", "--softmax-scale", "-1"], "softmax_scale"),
            (["--shape", "1,128,4,64", "--head-dim-v", "-8", "--qv"], "head_dim_v"),
            (["--shape", "1,128,4,64", "--seqlen-k", "-1"], "seqlen_k"),
            (["--shape", "1,128,4,64", "--window", "-2,0"], "--window '-2,0': expected LEFT,RIGHT"),
            (["--shape", "1,128,4,64", "--window", "-1,0,1"], "--window '-1,0,1': expected LEFT,RIGHT"),
            (["--shape", "1,128,4,64", "--window", "5"], "--window '5': expected LEFT,RIGHT"),
            (["--shape", "1,128,4,64", "--window", "²,0"], "--window '²,0': expected LEFT,RIGHT"),
            (["--shape", "1,128,4,64", "--attention-chunk", "-1"], "attention_chunk=-1"),
            (["--shape", "1,128,4,64", "--softcap", "nan"], "softcap=nan"),
            (["--shape", "1,128,4,64", "--sm-margin", "-1"], "sm_margin=-1"),
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
