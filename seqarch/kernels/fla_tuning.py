"""Gives flash-linear-attention's kernels few settings to choose from, so that the first step compiles in seconds.

fla compiles and times each kernel with up to 135 settings at its first call, which takes minutes. `fla_tuning.json` has
the settings that won in training steps of the 110M recipes on an H200 (fla-core 0.6.0, Triton 3.7.1, head dims 64 to
192), about two per kernel. On GPUs of this kind fla chooses only among these. If none of them fits, which may happen
with larger heads, it chooses among all. Kernels that those steps do not run, such as kernels for decoding, choose among
a few settings that are spread over fla's list.
"""

import contextlib
import functools
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import check_known

VARIABLE = "SEQARCH_FLA_TUNING"
"""Environment variable: "full" lets fla choose among all of its settings."""


SPREAD = 4
"""How many settings a kernel without a record chooses from."""


@torch.compiler.disable()
def fla_recurrence(
    rule: str,
    *tensors: Any,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    step: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Run fla's kernels of a rule such as "rwkv7", chunked or token by token; outputs and final states."""
    kernel = getattr(fla_module(f"fla.ops.{rule}"), f"{'fused_recurrent' if step else 'chunk'}_{rule}")
    borders = None if cu_seqlens is None else _wide(cu_seqlens)
    return kernel(*tensors, initial_state=initial_state, output_final_state=True, cu_seqlens=borders, **options)


@functools.lru_cache(maxsize=1)
def _wide(cu_seqlens: Tensor) -> Tensor:
    """The borders as fla takes them. It makes its tables once for each tensor, and waits for the device to do so."""
    return cu_seqlens.long()


@functools.cache
def fla_module(module: str, spread: int | None = SPREAD) -> Any:
    """A module of fla, imported at the first call.

    Modules that were imported before keep fla's own tuning. So do all modules on GPUs that were not measured.

    Args:
        module: its full name.
        spread: how many settings a kernel without a record chooses from; all for `None`.

    Raises:
        UserError: the environment variable is set to something else than "few" or "full".
    """
    chosen = os.environ.get(VARIABLE, "few")
    check_known(f"{VARIABLE} in the environment", chosen, ("few", "full"))
    few = chosen == "few" and _is_hopper()
    with few_settings(spread) if few else contextlib.nullcontext():
        return importlib.import_module(module)


@contextlib.contextmanager
def few_settings(spread: int | None = SPREAD) -> Iterator[None]:
    """Let kernels that are defined inside choose among the recorded settings or, if there are none, among `spread`."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self: Any, fn: Any, arg_names: Any, configs: Sequence[Any], *args: Any, **options: Any) -> None:
        original(self, fn, arg_names, few_of(fn, configs, spread), *args, **options)
        self.run = functools.partial(_run_or_widen, self, list(configs))

    Autotuner.__init__ = init
    try:
        yield
    finally:
        Autotuner.__init__ = original


def _run_or_widen(tuner: Any, configs: list[Any], *args: Any, **options: Any) -> Any:
    """Launch with the best of the few settings. If none fits the GPU, use the best of all settings from then on."""
    from triton.runtime.errors import OutOfResources

    try:
        return type(tuner).run(tuner, *args, **options)
    except OutOfResources:
        if tuner.configs == configs:
            raise
        tuner.configs = configs
        tuner.cache.clear()
        return type(tuner).run(tuner, *args, **options)


def few_of(kernel: Any, configs: Sequence[Any], spread: int | None = SPREAD) -> list[Any]:
    """Return the settings that are recorded for the kernel or, if none is, `spread` of all settings."""
    function = kernel
    while hasattr(function, "fn"):  # Triton's decorators wrap each other
        function = function.fn
    settings = _settings().get(f"{function.__module__}:{function.__name__}", [])
    found = [
        config
        for config in configs
        if {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages} in settings
    ]
    if found:
        return found
    if spread is None or len(configs) <= spread:
        return list(configs)
    return [configs[index * (len(configs) - 1) // (spread - 1)] for index in range(spread)]


@functools.cache
def _settings() -> dict[str, list[dict[str, Any]]]:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
