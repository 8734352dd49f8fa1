import importlib
from types import SimpleNamespace

import pytest

from seqarch.errors import UserError
from seqarch.kernels import fla_tuning

pytest.importorskip("triton")


def config(warps, stages, **kwargs):
    return SimpleNamespace(kwargs=kwargs, num_warps=warps, num_stages=stages)


def kernel(module, name):
    return SimpleNamespace(fn=SimpleNamespace(fn=SimpleNamespace(__module__=module, __name__=name)))


def test_recorded_settings_are_kept():
    configs = [config(1, 2, BK=32, BV=32), config(8, 3, BK=64, BV=64), config(8, 4, BK=64, BV=64)]
    kept = fla_tuning.few_of(kernel("fla.ops.common.chunk_h", "chunk_bwd_kernel_dh"), configs)
    assert kept == [configs[1]]


@pytest.mark.parametrize(
    ("module", "name", "stages"),
    [("fla.ops.common.chunk_h", "chunk_bwd_kernel_dh", 7), ("fla.ops.other", "chunk_bwd_kernel_dh", 3)],
)
def test_what_is_not_recorded_has_settings_spread_over_the_list(module, name, stages):
    configs = [config(warps, stages, BK=64, BV=64) for warps in (1, 8)]
    assert fla_tuning.few_of(kernel(module, name), configs) == configs
    configs *= 5
    assert fla_tuning.few_of(kernel(module, name), configs) == [configs[index] for index in (0, 3, 6, 9)]
    assert fla_tuning.few_of(kernel(module, name), configs, None) == configs


def test_kernels_defined_inside_choose_among_few(monkeypatch):
    import triton
    from triton.runtime.autotuner import Autotuner

    here = f"{__name__}:scale_kernel"
    settings = {here: [{"BK": 32, "num_warps": 4, "num_stages": 3}]}
    monkeypatch.setattr(fla_tuning, "_settings", lambda: settings)
    configs = [triton.Config({"BK": 32}, num_warps=4, num_stages=stages) for stages in (2, 3, 4)]

    def define():
        @triton.autotune(configs, key=["n"])
        @triton.jit
        def scale_kernel(x, n, BK: triton.language.constexpr):
            pass

        assert isinstance(scale_kernel, Autotuner)
        return scale_kernel.configs

    with fla_tuning.few_settings():
        assert define() == [configs[1]]
    assert define() == configs


def test_where_none_of_the_few_fits_all_are_tried(monkeypatch):
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    configs = [triton.Config({}, num_warps=4, num_stages=stages) for stages in (2, 3, 4)]
    monkeypatch.setattr(fla_tuning, "_settings", lambda: {f"{__name__}:kernel": [{"num_warps": 4, "num_stages": 3}]})
    tried = []

    def run(self, *args, **options):
        tried.append((self.configs, args, options))
        if not any(config in fitting for config in self.configs):
            raise OutOfResources(300, 200, "shared memory")
        return "launched"

    monkeypatch.setattr(Autotuner, "run", run)
    with fla_tuning.few_settings():

        @triton.autotune(configs, key=["n"])
        @triton.jit
        def kernel(x, n):
            pass

    kernel.cache[("of the few",)] = configs[1]
    fitting = configs[1:2]
    assert kernel[(1,)](5) == "launched"
    fitting = configs[:1]
    assert kernel[(1,)](5) == "launched"
    assert not kernel.cache
    assert kernel[(1,)](5) == "launched"
    assert [each for each, _, _ in tried] == [[configs[1]], [configs[1]], configs, configs]
    assert all(args == (5,) and options["grid"] == (1,) for _, args, options in tried)
    fitting = []
    with pytest.raises(OutOfResources):
        kernel[(1,)](5)


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv(fla_tuning.VARIABLE, "some")
    fla_tuning.fla_module.cache_clear()
    with pytest.raises(UserError, match="SEQARCH_FLA_TUNING in the environment 'some': expected few or full"):
        fla_tuning.fla_module("fla.ops.rwkv7")


def test_modules_are_imported_with_few_settings_on_gpus_that_were_measured(monkeypatch, tmp_path):
    source = """
import triton
configs = [triton.Config({}, num_warps=4, num_stages=stages) for stages in range(9)]
@triton.autotune(configs, key=["n"])
@triton.jit
def kernel(x, n):
    pass
"""
    for name in ("measured", "other"):
        (tmp_path / f"tuned_on_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    counts = []
    for name in ("measured", "other"):
        monkeypatch.setattr(fla_tuning, "_is_hopper", lambda name=name: name == "measured")
        counts.append(len(fla_tuning.fla_module(f"tuned_on_{name}").kernel.configs))
    assert counts == [fla_tuning.SPREAD, 9]


def test_recorded_settings_are_those_of_fla():
    pytest.importorskip("fla")
    from triton.runtime.autotuner import Autotuner

    few = 0
    for name, settings in fla_tuning._settings().items():
        module, kernel = name.split(":")
        found = getattr(importlib.import_module(module), kernel)
        while not isinstance(found, Autotuner):
            found = found.fn
        assert found.cache_results
        few += len(fla_tuning.few_of(found, found.configs)) <= len(settings) < len(found.configs)
    # some settings are for GPUs with more shared memory than fla finds without one
    assert few > 0.8 * len(fla_tuning._settings())
