"""The cases of `benchmarks/sanitize.py` run, in Triton's interpreter."""

import importlib

import pytest


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    return importlib.import_module("benchmarks.sanitize")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", ["top1_large", "top1_several_packed", "top1_decode", "dense_decode"])
def test_cases_run(sanitize, name, capsys):
    sanitize.check([name])
    assert capsys.readouterr().out == f"{name}: ran, results are finite\n"


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
