"""Parameters of the mixers that tests compare."""

import torch


def moved(module):
    """The module with its parameters moved from their initial values, of which many are zero or one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module
