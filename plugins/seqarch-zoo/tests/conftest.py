import os

import torch


def pytest_runtest_setup(item):
    """Draw the same random numbers in each run."""
    torch.manual_seed(int(os.environ.get("SEQARCH_TEST_SEED", "0")))
