"""TTTMLP keeps the contract and equals gradient descent as the paper writes it, by autograd and token by token."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from parameters import moved
from seqarch_zoo.ttt_linear import gradient as inner_gradient
from seqarch_zoo.ttt_mlp import TTTMLP

from seqarch.testing import MixerSuite


class TestTTTMLP(MixerSuite):
    mixer = TTTMLP
    options: ClassVar = [{"n_heads": 4, "mini_batch": 8}]
    compile_options: ClassVar = {"backend": "aot_eager"}  # the recurrence itself is not compiled


def test_equals_gradient_descent():
    """Equations 4 to 7 of each layer: gradients by autograd at the model before the mini-batch.

    The hidden layer of a query is that of the model as its own token leaves it, as in the authors' primal form.
    """
    torch.manual_seed(0)
    mixer = moved(TTTMLP(8, 0, 2, n_heads=1, mini_batch=4).double())
    q, k, v = torch.randn(3, 11, 8, dtype=torch.float64)
    rates = torch.rand(11, dtype=torch.float64)
    gain, shift = mixer.norm_weight[0, 0], mixer.norm_bias[0, 0]

    def run(model, x):
        hidden = F.gelu(x @ model[0] + model[1], approximate="tanh")
        return F.layer_norm(hidden @ model[2] + model[3], (8,), gain, shift, 1e-6)

    model = [parameter[0].detach().squeeze(0) for parameter in mixer.inner()]
    outputs = []
    for t in range(11):
        place = t % 4
        decay = max(1 / (place + 1) + mixer.places[place].item(), 0)
        leaves = [each.clone().requires_grad_() for each in model]
        seen = range(t - place, t + 1)
        loss: Any = sum(0.5 * rates[s] * (run(leaves, k[s]) - (v[s] - k[s])).square().sum() for s in seen)
        now = [each - decay * grad for each, grad in zip(model, torch.autograd.grad(loss, leaves), strict=True)]
        outputs.append(q[t] + run(now, q[t]))
        if place == 3:
            model = now
    q, k, v = (t[None, :, None] for t in (q, k, v))
    o = mixer._train(q, k, v, rates[None, :, None, None], mixer.init_state(1, 11, "cpu", torch.float64))
    torch.testing.assert_close(o[0, :, 0], torch.stack(outputs), rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_equals_the_authors_dual_form():
    """github.com/test-time-training/ttt-lm-pytorch, ttt.py, TTTMLP without a cache, from q, k and v on."""
    torch.manual_seed(0)
    mixer = moved(TTTMLP(16, 0, 2, n_heads=2, mini_batch=4).double())
    q, k, v = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64)
    rates = torch.rand(2, 2, 1, 12, dtype=torch.float64)
    decays = (1 / torch.arange(1.0, 5.0).double() + mixer.places).clamp_min(0)
    (W1, b1, W2, b2), norm, outputs = mixer.inner(), (mixer.norm_weight, mixer.norm_bias), []
    for query, key, value, rate in zip(*(t.split(4, dim=2) for t in (q, k, v)), rates.split(4, dim=3), strict=True):
        eta = decays[:, None] * rate
        z1 = (key @ W1 + b1).requires_grad_()
        with torch.enable_grad():
            x2 = F.gelu(z1, approximate="tanh")
            by_2 = inner_gradient(x2 @ W2 + b2, value - key, *norm)  # equal to autograd's in the test above
            by_1 = torch.autograd.grad(x2, z1, (by_2 @ W2.mT).detach())[0]
        x2, by_2 = x2.detach(), by_2.detach()
        z1_bar = query @ W1 - (eta * (query @ key.mT).tril()) @ by_1 + b1 - eta.tril() @ by_1
        x2_bar = F.gelu(z1_bar, approximate="tanh")
        z2_bar = x2_bar @ W2 - (eta * (x2_bar @ x2.mT).tril()) @ by_2 + b2 - eta.tril() @ by_2
        outputs.append(query + norm[0] * F.layer_norm(z2_bar, (8,), eps=1e-6) + norm[1])
        last = eta[:, :, -1, :, None]
        W1, b1 = W1 - (last * key).mT @ by_1, b1 - (last * by_1).sum(dim=-2, keepdim=True)
        W2, b2 = W2 - (last * x2).mT @ by_2, b2 - (last * by_2).sum(dim=-2, keepdim=True)
    q, k, v, rates = (t.transpose(1, 2) for t in (q, k, v, rates.mT))
    o = mixer._train(q, k, v, rates, mixer.init_state(2, 12, "cpu", torch.float64))
    torch.testing.assert_close(o, torch.cat(outputs, dim=2).transpose(1, 2), rtol=1e-10, atol=1e-11)
