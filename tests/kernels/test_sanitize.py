"""The cases of `benchmarks/sanitize.py` run, in Triton's interpreter."""

import importlib

import pytest
import torch

from seqarch.kernels import select_chunks


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    return importlib.import_module("benchmarks.sanitize")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", ["top1_large", "top1_decode", "dense_decode"])
def test_cases_run(sanitize, name, capsys):
    sanitize.check([name])
    assert capsys.readouterr().out == f"{name}: ran, results are finite\n"


@pytest.mark.usefixtures("interpreter")
def test_the_case_of_bounds_has_short_and_full_lists_in_each_mode(sanitize, monkeypatch):
    from seqarch.kernels.top1_chunk import triton as kernels

    seen, candidates = set(), kernels.candidates

    def spy(q, *args):
        found = candidates(q, *args)
        lengths = q[0, :: 2 * kernels.LISTED, 0].float().norm(dim=-1).round().tolist()
        pairs = torch.nn.functional.pad(found[2][0], (0, 1), value=True)[: 2 * len(lengths)].view(-1, 2)
        seen.update(zip(lengths, pairs.all(1).tolist(), strict=True))
        return found

    def select(q, k, v, **options):
        return select_chunks(q.detach(), k.detach(), **options)

    monkeypatch.setattr(kernels, "candidates", spy)
    monkeypatch.setattr(sanitize, "top1_chunk_attention", select)
    sanitize.top1_bounds(3)
    assert seen >= {(length, full) for length in sanitize.LENGTHS for full in (True, False)}


@pytest.mark.usefixtures("interpreter")
def test_what_is_not_finite_is_an_error(sanitize):
    arguments = sanitize.inputs.decoding(1, 40, 2, 16, dtype=sanitize.DTYPE)
    arguments["v_cache"][0, 0] = float("inf")
    with pytest.raises(ArithmeticError, match="attention_decode gives numbers that are not finite"):
        sanitize.run(sanitize.attention_decode, arguments)


@pytest.mark.usefixtures("interpreter")
def test_the_interpreter_finds_an_access_out_of_bounds(sanitize):
    """As memcheck does on a GPU; so each test of a kernel in the interpreter checks its bounds."""
    with pytest.raises(Exception, match="create_masked_store outside of the kernel's tensors"):
        sanitize.check(["out_of_bounds"])
