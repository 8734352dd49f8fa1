"""Packages of other people's kernels: whether they are installed, and which versions are wrong."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from seqarch.errors import UserError, refused

INSTALL = {
    "fla": 'pip install "fla-core" "triton>=3.7.1"',
    "flash-attn-4": 'pip install "seqarch[fa4]"',
    "mamba_ssm": "pip install mamba-ssm --no-build-isolation",
    "triton": "pip install triton",
}
"""How to install what a backend needs, by the name of its package."""

MODULES = {**{package: package for package in INSTALL}, "flash-attn-4": "flash_attn.cute", "tilelang": "tilelang"}
"""What each of them is imported as, and tilelang, which fla uses if Triton is wrong."""


def _is_found(module: str) -> bool:
    # A search for a.b would import a, and flash_attn may be another version of FlashAttention, which is slow to import.
    parent, _, child = module.partition(".")
    spec = importlib.util.find_spec(parent)
    folders = (spec and spec.submodule_search_locations) or ()
    return spec is not None and (not child or any((Path(folder) / child).is_dir() for folder in folders))


FOUND = {package: _is_found(module) for package, module in MODULES.items()}
"""Which are installed. Searched once: a search takes 0.1 ms, and each step of decoding would search in each layer."""


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
    message = (
        "backend 'mamba_ssm' is installed but cannot be imported: its CUDA extension must be built for this version of "
        f"torch ({INSTALL['mamba_ssm']}); or use backend 'triton'"
    )
    with refused(message, ImportError, why=True):
        return getattr(importlib.import_module(f"mamba_ssm.ops.{module}"), name)


def is_hopper(device: torch.device) -> bool:
    """Whether a GPU is an H100, H200 or another one of compute capability 9."""
    return torch.cuda.get_device_capability(device)[0] == 9


is_hopper._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] - see kernels/op.py


def check_gated_gradients(device: torch.device) -> None:
    """Refuse the Triton versions with which fla's kernels with one decay per head have wrong gradients on Hopper.

    fla also raises an error for them, but only in the backward pass.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    if is_hopper(device) and (3, 4) <= version < (3, 7, 1) and not FOUND["tilelang"]:
        raise UserError(f"Triton {triton.__version__} computes wrong gradients of gates on Hopper: {INSTALL['fla']}")
