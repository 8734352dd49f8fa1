"""An op: a reference, faster backends, the obstacles of each, and the one place that chooses among them."""

import dataclasses
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError, unknown
from seqarch.kernels.packages import INSTALL, is_installed

TITLES = {"triton": "own Triton", "mamba_ssm": "mamba-ssm", "sdpa": "PyTorch (cuDNN, FlashAttention, FlexAttention)"}
"""Names of backends in tables."""


HEAD_DIM = 256
"""Largest head dim of our kernels, and of fla's."""


class SlowPathWarning(UserWarning):
    """An op on a GPU does not run its fastest backend."""


def takes_all(*args: Any) -> None:
    """The obstacle of a backend that takes every call."""


def wide_heads(q: Tensor, *_: Any) -> str | None:
    """The obstacle of kernels that hold a head of `q [..., D]` at once."""
    return f"heads of {q.shape[-1]} dims are more than it holds, {HEAD_DIM}" if q.shape[-1] > HEAD_DIM else None


@dataclasses.dataclass(frozen=True)
class Backend:
    """A faster way to compute an op than its reference, on one kind of device.

    Args:
        name: value of the op's option `backend`.
        run: computes a call with the arguments of the reference: a function, or "package.module:function", which is
            imported at the first call.
        package: what has to be installed; None for PyTorch itself.
        device: type of the device that it needs.
        obstacle: takes the same arguments; says why the backend cannot take the call, or None.
        float64: whether it takes float64.
        automatic: whether `backend="auto"` may take it: always, never, or a function of the same arguments. With a
            function, another backend may run without a warning.
        peer: whether it is the fastest for the calls that the backends before it refuse. Then there is no warning.
    """

    name: str
    run: Callable[..., Any] | str
    package: str | None = None
    device: str = "cuda"
    obstacle: Callable[..., str | None] = takes_all
    float64: bool = False
    automatic: bool | Callable[..., bool] = True
    peer: bool = False

    def serves(self, *args: Any) -> bool:
        """Whether "auto" may take the call."""
        return self.automatic(*args) if callable(self.automatic) else self.automatic

    def refusal(self, *args: Any) -> str | None:
        """The reason why it cannot take the call on any device, or None."""
        if args[0].dtype == torch.float64 and not self.float64:
            return "it does not take float64"
        return self.obstacle(*args)

    def function(self) -> Callable[..., Any]:
        """What computes a call."""
        return load_function(self.run) if isinstance(self.run, str) else self.run

    def absence(self) -> str | None:
        """A message that its package is not installed, with the install command, or None."""
        if self.package is None or is_installed(self.package):
            return None
        return f"it is not installed: {INSTALL[self.package]}"

    def misplacement(self, t: Tensor) -> str | None:
        """A message that the tensors are on another device, or None. Triton's interpreter takes tensors on a CPU."""
        if t.device.type == self.device or (self.package == "triton" and interpreting()):
            return None
        return f"the tensors are on {t.device.type}, not on a {self.device.upper()} device"


def load_function(name: str) -> Callable[..., Any]:
    """The function "package.module:function", also while a graph is compiled, which cannot trace `pkgutil`."""
    module, _, function = name.partition(":")
    import_module(module)
    return getattr(sys.modules[module], function)


def import_module(name: str) -> None:
    """Import a module, also while a graph is compiled."""
    importlib.import_module(name)


LEFT: ContextVar[bool] = ContextVar("LEFT", default=False)
"""Whether a compiled graph was left for the call that runs."""


def in_compiled_pass() -> bool:
    """Whether a compiler traces this call, or a compiled graph was left for it."""
    return torch.compiler.is_compiling() or LEFT.get()


FEW = 4
"""Tokens of a decoding step: one, and what a short convolution sees with it."""

DECLARED: "list[Op]" = []
"""Each op that was made, in this order."""


@dataclasses.dataclass(frozen=True)
class Op:
    """A function on tensors with a reference and backends; all of them take the same positional arguments.

    Args:
        name: of the public function in `seqarch.kernels`.
        reference: plain PyTorch, for any device and precision.
        backends: the fastest first.
        fuses: whether calls of few tokens run the reference inside compiled graphs, where the compiler fuses it with
            what surrounds it: a decoding step then launches a fraction of the kernels.
    """

    name: str
    reference: Callable[..., Any]
    backends: tuple[Backend, ...] = ()
    fuses: bool = False

    def __post_init__(self) -> None:
        DECLARED.append(self)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of the option `backend`."""
        return ("auto", "reference", *[backend.name for backend in self.backends])

    def check(self, backend: str) -> None:
        """Refuse a `backend` that the op does not have."""
        if backend not in self.choices:
            raise unknown("backend", backend, self.choices)

    def run(self, backend: str, *args: Any) -> Any:
        """Compute the call `reference(*args)`; see `choose`."""
        return self.choose(backend, *args)(*args)

    def choose(self, backend: str, *args: Any) -> Callable[..., Any]:
        """The function that computes the call `reference(*args)`, whose first argument is a tensor.

        "reference" gives the reference, another name gives that backend. "auto" gives the reference for tensors on a
        CPU. On a GPU it gives the first backend that takes the call. If that is slower than the first backend, or is
        the reference, the op warns once per process.

        Raises:
            UserError: `backend` cannot take the call. With "auto" on a GPU: no backend takes it, and one is missing.
        """
        self.check(backend)
        if backend == "reference" or (backend == "auto" and (not args[0].is_cuda or self._fused(args[0]))):
            return self.reference
        if backend == "auto":
            return self._fastest(*args)
        chosen = self.backends[self.choices.index(backend) - 2]
        reason = chosen.refusal(*args) or chosen.absence() or chosen.misplacement(args[0])
        if reason:
            raise UserError(f"{self.name}: backend '{backend}' cannot run this: {reason}")
        return chosen.function()

    def _fused(self, t: Tensor) -> bool:
        return self.fuses and torch.compiler.is_compiling() and t.shape[1] <= FEW and not torch.is_grad_enabled()

    def _fastest(self, *args: Any) -> Callable[..., Any]:
        passed_over, absent = [], []
        for backend in self.backends:
            if not backend.serves(*args):
                continue
            reason = backend.refusal(*args)
            if reason is None and (reason := backend.absence()):
                absent.append(INSTALL[backend.package or ""])
            if reason is None:
                if passed_over and not backend.peer:
                    warn_once(self.name, f"{'; '.join(passed_over)}; '{backend.name}' runs instead, which is slower")
                return backend.function()
            passed_over.append(f"backend '{backend.name}' cannot run this: {reason}")
        if absent:
            raise UserError(f"{self.name}: no backend for CUDA is here: {'; or '.join(absent)}; or take 'reference'")
        if passed_over:
            warn_once(self.name, f"{'; '.join(passed_over)}; plain PyTorch runs instead, which is slower")
        return self.reference


WARNED: set[str] = set()
"""Ops that have warned in this process."""


def warn_once(op: str, message: str) -> None:
    """Warn once per op, also while a graph is compiled: tracing calls this function."""
    if op not in WARNED:
        WARNED.add(op)
        warnings.warn(f"{op}: {message}", SlowPathWarning, stacklevel=2)


for function in (warn_once, import_module):
    # What torch.compiler.assume_constant_result does, without the seconds that its import takes.
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def interpreting() -> bool:
    """Whether Triton's interpreter runs, which takes tensors on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernels_of(ops: Iterable[Op]) -> dict[str, str]:
    """The backends of some ops on a CPU and on a GPU, for tables: `{"cpu": "PyTorch", "cuda": "fla, own Triton"}`."""
    first = [next(backend.name for backend in op.backends if backend.automatic is True) for op in ops if op.backends]
    titles = dict.fromkeys(TITLES.get(name, name) for name in first)
    return {"cpu": "PyTorch", "cuda": ", ".join(titles) or "PyTorch"}
