"""The profile of a training step: kinds and parts of kernels, and a whole run at a tiny size on a CPU."""

import itertools
from pathlib import Path

import pytest
import torch

from benchmarks.step_profile import MARK, PARTS, PROFILED, Slice, by_kernel, kind, profile_recipe
from seqarch.model.lm import Blocks

pytestmark = pytest.mark.commands

ROOT = Path(__file__).parents[2]
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTN", "product"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "product"),
        ("aten::addmm", "product"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", "attention"),
        ("triton_tem_fused_flex_attention_3", "attention"),
        ("local_backward_kernel", "attention"),
        ("select_exact_kernel", "selection"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>", "sort, search"),
        ("Memcpy DtoD (Device -> Device)", "copy, cast"),
        ("triton_poi_fused__to_copy_2", "copy, cast"),
        ("triton_poi_fused__to_copy_addcmul_sub_2", "compiled elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<int>", "other"),
    ],
)
def test_kernels_have_a_kind(name, expected):
    assert kind(name) == expected


def two_steps():
    """Two steps of 40 us: each part has 3 us of a product and 2 us of another kernel, after a mark of 1 us."""
    clock = itertools.count(100.0, 10.0)
    for start in itertools.islice(clock, 2 * len(PARTS)):
        yield from (Slice(SPIN, start, 1.0), Slice("nvjet_a", start + 2, 3.0), Slice("triton_poi_b", start + 6, 2.0))
    yield Slice(SPIN, next(clock), 1.0)


def test_kernels_are_counted_by_part_and_the_rest_is_gaps():
    outside = [Slice("nvjet_a", 0.0, 50.0), Slice("nvjet_a", 500.0, 50.0)]
    *rows, gaps, step = by_kernel([*reversed(list(two_steps())), *outside], steps=2)
    assert sorted(rows) == sorted(
        (part, *each) for part in PARTS for each in (("product", "nvjet_a", 1.0, 3.0),
                                                     ("compiled elementwise", "triton_poi_b", 1.0, 2.0))
    )  # fmt: skip
    assert [row[-1] for row in rows] == [3.0] * 4 + [2.0] * 4
    assert gaps[-1] == 40.0 - 4 * 5.0
    assert step[-1] == 40.0


def test_a_profile_without_a_mark_is_refused():
    with pytest.raises(RuntimeError, match="2 steps has 8 marks, not 9"):
        by_kernel(list(two_steps())[1:], steps=2)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = {"d_model": 32, "n_layers": 2, "vocab_size": 300, "compile": False}
    return {"model": model, "model.mixers.shell.init_args.n_heads": 2, "data": {"sequence_length": 32}}


@pytest.mark.parametrize("recompute", [False, True])
def test_the_profile_is_of_the_last_steps_of_the_benchmark(tiny, recompute):
    before = torch.Tensor.backward, Blocks.forward
    tiny["model"]["activation_checkpointing"] = recompute
    recipe = str(ROOT / "recipes/rwkv7_shell_top1_chunk_approx_100k.yaml")
    row = profile_recipe(recipe, tiny, steps=PROFILED + 2)
    assert (torch.Tensor.backward, Blocks.forward) == before
    assert (row["steps"], row["sequence_length"]) == (PROFILED + 2, 32)
    assert row["tokens_per_s"] > 0
    *rows, gaps, step = row["kernels"]
    calls = {
        part: sum(row[3] for row in rows if row[:2] == (part, "product") and "bmm" not in row[2]) for part in PARTS
    }
    # a layer: receptance, key, value, output, gate (2) and channel-mix (2); from the second on, the values' gate (2)
    products = 2 * 8 + 2
    if not recompute:
        assert calls == {"forward": products, "loss": 3, "backward": 2 * products, "optimizer": 0}
    again = [row for row in rows if row[:2] == ("backward", "attention") and "backward" not in row[2]]
    assert bool(again) == recompute
    assert any(part == "optimizer" and "adamw" in name for part, _, name, *_ in rows)
    assert not any(MARK in row[2] for row in rows)
    assert 0 < sum(row[-1] for row in rows) <= step[-1]
    assert gaps[-1] < step[-1]
