"""Packages of other people's kernels: whether they are installed, and which versions are wrong."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from seqarch.errors import UserError, refused

INSTALL = {
    "fla": 'pip install "fla-core" "triton>=3.7.1"',
    "mamba_ssm": "pip install mamba-ssm --no-build-isolation",
    "triton": "pip install triton",
}
"""How to install what a backend needs, by the name of its package."""

FOUND = {package: importlib.util.find_spec(package) is not None for package in (*INSTALL, "tilelang")}
"""The installed ones, and tilelang, which fla uses if Triton is wrong. Searched once: a search takes
0.1 ms, and each step of decoding would search in each layer."""


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


def check_gated_gradients(device: torch.device) -> None:
    """Refuse the Triton versions with which fla's kernels with one decay per head have wrong gradients on Hopper.

    fla also raises an error for them, but only in the backward pass.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    if hopper and (3, 4) <= version < (3, 7, 1) and not FOUND["tilelang"]:
        raise UserError(
            f"Triton {triton.__version__} computes wrong gradients for gated recurrences on Hopper GPUs: "
            f"{INSTALL['fla']}"
        )
