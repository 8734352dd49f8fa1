import os

import torch

from seqarch.kernels.fla_tuning import fla_module
from seqarch.kernels.packages import is_installed


def pytest_runtest_setup(item):
    """Draw the same random numbers in each run, and let fla's kernels choose between two settings.

    A test that imports fla itself would give them all settings, and most of its time would go into the choice.
    """
    if item.get_closest_marker("gpu") and torch.cuda.is_available() and is_installed("fla"):
        fla_module("fla.layers", spread=2)
    torch.manual_seed(int(os.environ.get("SEQARCH_TEST_SEED", "0")))
