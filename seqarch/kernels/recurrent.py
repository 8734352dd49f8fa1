"""What the recurrent ops share: the checks of their arguments, the choice of a backend, and packed documents."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError, one_line
from seqarch.kernels.common import all_documents, check_choice

INSTALL = {
    "fla": 'pip install "fla-core" "triton>=3.7.1"',
    "mamba_ssm": "pip install mamba-ssm --no-build-isolation",
    "triton": "pip install triton",
}
"""How to install what a backend needs, by the name of its package."""

FOUND = {package: importlib.util.find_spec(package) is not None for package in (*INSTALL, "tilelang")}
"""Which of them are installed, and tilelang, which fla uses where Triton is wrong. Searched once: a search takes
0.1 ms, and each step of decoding would search in each layer."""


def check_sequences(keys: dict[str, Tensor], v: Tensor, activations: tuple[str, ...], logs: tuple[str, ...]) -> None:
    """Refuse anything but `keys` of one shape `[B, T, H, K]` with `v [B, T, H, V]`, T at least 1, in fitting dtypes.

    Args:
        keys: tensors as wide as the keys, by name.
        v: the values.
        activations: which of them share the floating-point dtype of `v`.
        logs: which of them are logarithms, float32 or, for float64 values, float64.
    """
    shape = keys["k"].shape
    if v.dim() != 4 or any(t.shape != shape for t in keys.values()) or v.shape[:3] != shape[:3]:
        names = ", ".join(keys)
        shapes = [tuple(t.shape) for t in (*keys.values(), v)]
        raise UserError(f"{names} must have one shape [B, T, H, K] and v [B, T, H, V], not {shapes}")
    if shape[1] < 1:
        raise UserError("the sequence is empty: T must be at least 1")
    if not v.is_floating_point() or any(keys[name].dtype != v.dtype for name in activations):
        dtypes = [keys[name].dtype for name in activations]
        raise UserError(f"{', '.join(activations)} and v must share one floating-point dtype, not {dtypes}, {v.dtype}")
    wide = torch.promote_types(v.dtype, torch.float32)
    for name in logs:
        if keys[name].dtype != wide:
            raise UserError(f"{name} must be {wide} for values of {v.dtype}, not {keys[name].dtype}")
    if any(t.device != v.device for t in keys.values()):
        raise UserError(f"{', '.join(keys)} and v must be on one device")


def check_initial_state(state: Tensor | None, k: Tensor, cu_seqlens: Tensor | None, sizes: dict[str, int]) -> None:
    """Refuse a state that is not `[N, H, ...]`, N being the batch size or the number of documents.

    Args:
        state: the state, or None.
        k: `[B, T, H, K]`.
        cu_seqlens: `[N + 1]` borders of packed documents.
        sizes: of the dimensions after the heads, by what they are.
    """
    if state is None:
        return
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expected = [N, k.shape[2], *sizes.values()]
    if list(state.shape) != expected:
        names = ", ".join(("N", "H", *sizes))
        raise UserError(f"initial_state must have shape [{names}] = {expected}, not {list(state.shape)}")


def choose_backend(
    requested: str, device: torch.device, packages: dict[str, str], *, order: Sequence[str], interpreted: bool = False
) -> str:
    """The backend that runs: the requested one, or with "auto" the first of `order` on CUDA, "reference" elsewhere.

    Args:
        requested: "auto", "reference" or a key of `packages`.
        device: of the tensors.
        packages: for each backend that needs CUDA the package it needs.
        order: these backends, best first; "auto" takes the first whose package is installed.
        interpreted: whether Triton's interpreter runs, which takes tensors on the CPU to the backend "triton".

    Raises:
        UserError: for an unknown backend, one that is not installed, and one that cannot run on the device; for "auto"
            on CUDA when none of `order` is installed, since the reference there would be slow without a word.
    """
    check_choice("backend", requested, ("auto", "reference", *packages))
    if requested == "reference" or (requested == "auto" and device.type != "cuda"):
        return "reference"
    if requested == "auto":
        for name in order:
            if is_installed(packages[name]):
                return name
        ways = "; or ".join(INSTALL[packages[name]] for name in order)
        raise UserError(f"no backend for CUDA is installed: {ways} (or choose backend 'reference', which is slow)")
    package = packages[requested]
    if not is_installed(package):
        raise UserError(f"backend '{requested}' is not installed: {INSTALL[package]}")
    if device.type != "cuda" and not (requested == "triton" and interpreted):
        raise UserError(f"backend '{requested}' needs tensors on a CUDA device, not on {device.type}: use 'reference'")
    return requested


def is_installed(package: str) -> bool:
    """Whether the package of a backend was found when seqarch was imported; nothing is imported for it."""
    return FOUND[package]


@functools.cache
def mamba_ssm_function(module: str, name: str) -> Callable[..., Any]:
    """A function of `mamba_ssm.ops`, for instance `selective_scan_fn` of `selective_scan_interface`.

    Raises:
        UserError: the package cannot be imported. It imports selective_scan_cuda, an extension that is compiled for one
            version of torch.
    """
    try:
        return getattr(importlib.import_module(f"mamba_ssm.ops.{module}"), name)
    except ImportError as error:
        raise UserError(
            f"backend 'mamba_ssm' is installed but cannot be imported ({one_line(error)}): its CUDA extension must be "
            f"built for this version of torch ({INSTALL['mamba_ssm']}); or use backend 'triton'"
        ) from error


def check_gated_gradients(device: torch.device) -> None:
    """Refuse the Triton versions with which fla's kernels for a decay a head have wrong gradients on Hopper.

    fla raises for them too, but from within the backward pass.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    if hopper and (3, 4) <= version < (3, 7, 1) and not FOUND["tilelang"]:
        raise UserError(
            f"Triton {triton.__version__} computes wrong gradients for gated recurrences on Hopper GPUs: "
            f"{INSTALL['fla']}"
        )


Recurrence = Callable[..., tuple[Tensor, Tensor]]
"""`op(*tensors, initial_state) -> (outputs [B, T, ...], final state [B, ...])`."""


def each_document(
    op: Recurrence, tensors: Sequence[Tensor | None], initial_state: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply a recurrence to each document of `tensors [1, T, ...]`; reads `cu_seqlens` on the host.

    Args:
        op: the recurrence, for one row.
        tensors: its arguments along T.
        initial_state: `[N, ...]`, a state for each document, or None for zeros.
        cu_seqlens: `[N + 1]` borders of the documents; an empty document keeps its initial state.

    Returns:
        Outputs `[1, T, ...]` and final states `[N, ...]`.
    """
    length = next(t.shape[1] for t in tensors if t is not None)
    outputs: list[Tensor] = []
    states: dict[int, Tensor] = {}
    for index, (start, stop) in enumerate(all_documents(cu_seqlens, length)):
        if start == stop:
            continue
        pieces = (None if t is None else t[:, start:stop] for t in tensors)
        state = None if initial_state is None else initial_state[index : index + 1]
        output, states[index] = op(*pieces, state)
        outputs.append(output)
    zero = torch.zeros_like(next(iter(states.values())))
    kept = [zero if initial_state is None else initial_state[n : n + 1] for n in range(cu_seqlens.shape[0] - 1)]
    return torch.cat(outputs, dim=1), torch.cat([states.get(index, state) for index, state in enumerate(kept)])
