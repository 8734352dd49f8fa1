"""S4D and DLR keep the contract and equal the recurrences of their papers, and scipy's simulation."""

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from seqarch_zoo.s4d import DLR, S4D

from seqarch.testing import MixerSuite

NO_SCIPY = "scipy is not installed: pip install scipy"


class TestS4D(MixerSuite):
    mixer = S4D
    options: ClassVar = [{"d_state": 6}]


class TestDLR(MixerSuite):
    mixer = DLR
    options: ClassVar = [{"d_state": 10}]


def finished(mixer: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.glu(mixer.out(F.gelu(y + mixer.D * x)), dim=-1)


def test_s4d_equals_scipys_simulation():
    """arXiv 2206.11893, equations 1 and 2: each channel is a linear system, held between samples."""
    signal = pytest.importorskip("scipy.signal", reason=NO_SCIPY)
    torch.manual_seed(0)
    mixer, x = S4D(4, 0, 2, d_state=3).double(), torch.randn(1, 50, 4, dtype=torch.float64)
    y = torch.empty_like(x)
    for channel in range(4):
        A = torch.complex(-mixer.log_A_real[channel].exp(), mixer.A_imag[channel]).detach()
        C = 2 * torch.view_as_complex(mixer.C[channel].detach())
        step = mixer.log_step[channel].exp().item()
        one = torch.ones(3, 1, dtype=torch.complex128)
        system = (torch.diag(A).numpy(), one.numpy(), C[None].numpy(), torch.zeros(1, 1).numpy())
        Ad, Bd, Cd, _, _ = (torch.as_tensor(part) for part in signal.cont2discrete(system, step, "zoh"))
        state = torch.zeros(3, 1, dtype=torch.complex128)
        for t in range(50):
            state = Ad @ state + Bd * x[0, t, channel]
            y[0, t, channel] = (Cd @ state).real.item()
    torch.testing.assert_close(mixer(x), finished(mixer, y, x), rtol=1e-8, atol=1e-10)


@torch.no_grad()
def test_dlr_equals_scipys_filters():
    """arXiv 2212.00768, section 2: `h_t = L h_{t-1} + x_t`, `y_t = Re(w h_t)`; each decay is a filter."""
    signal = pytest.importorskip("scipy.signal", reason=NO_SCIPY)
    torch.manual_seed(0)
    mixer, x = DLR(4, 0, 2, d_state=5).double(), torch.randn(2, 300, 4, dtype=torch.float64)
    W = torch.view_as_complex(mixer.W)
    y = torch.zeros_like(x)
    for n, decay in enumerate(torch.exp(torch.complex(-(mixer.roots**2), mixer.angles)).tolist()):
        state = torch.as_tensor(signal.lfilter([1], [1, -decay], x.numpy(), axis=1))
        y += (W[:, n] * state).real
    torch.testing.assert_close(mixer(x), finished(mixer, y, x), rtol=1e-9, atol=1e-11)


def test_dlr_equals_its_recurrence():
    """arXiv 2212.00768, section 2: `h_t = L h_{t-1} + x_t`, `y_t = Re(w h_t)`."""
    torch.manual_seed(0)
    mixer, x = DLR(4, 0, 2, d_state=5).double(), torch.randn(2, 30, 4, dtype=torch.float64)
    decays = torch.exp(torch.complex(-(mixer.roots**2), mixer.angles))
    state, outputs = torch.zeros(2, 4, 5, dtype=torch.complex128), []
    for t in range(30):
        state = decays * state + x[:, t, :, None]
        outputs.append((torch.view_as_complex(mixer.W) * state).sum(dim=-1).real)
    expected = finished(mixer, torch.stack(outputs, dim=1), x)
    torch.testing.assert_close(mixer(x), expected, rtol=1e-9, atol=1e-11)
