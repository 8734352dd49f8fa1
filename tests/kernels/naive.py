"""The definitions of the ops, dense in T x T and in float64, and the inputs and comparison that the tests share."""

import torch

from tests.kernels import inputs


def draw(*sizes, **options):
    """Random q, k and v that ask for gradients."""
    return list(inputs.attention(*sizes, **options).values())


def assert_close(actual, expected, ratio=1e-10, name="output"):
    """Relative error by norm; NaN never passes."""
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    error = (actual.double() - expected.double()).norm()
    bound = ratio * max(expected.double().norm().item(), 0.1)
    assert error <= bound, f"{name}: error {error:.3e} above {bound:.3e}"


def gradients(results, tensors):
    """Of all `tensors` that are not None, for one random gradient of each result."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device) for t in results]
    losses = [(t.double() * weight).sum() for t, weight in zip(results, weights, strict=True)]
    return torch.autograd.grad(losses, [t for t in tensors if t is not None])


def assert_same(actual, expected, ratio=1e-10):
    """Each result by itself."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_close(a, b, ratio, f"result {index}")


def assert_same_gradients(actual, expected, inputs, ratio=1e-10, seed=1):
    """Equal outputs, and equal gradients of all `inputs` for one random gradient of the output."""
    assert_close(actual, expected, ratio)
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    pairs = zip(
        torch.autograd.grad(actual, inputs, do.to(actual.dtype)),
        torch.autograd.grad(expected, inputs, do.to(expected.dtype)),
        strict=True,
    )
    for index, (got, wanted) in enumerate(pairs):
        assert_close(got, wanted, ratio, name=f"gradient {index}")


def scores(q, k, scale=None):
    """`[B, H, Tq, Tk]`, with positions of queries `[Tq, 1]` and keys `[1, Tk]`."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    i = torch.arange(k.shape[1] - q.shape[1], k.shape[1]).unsqueeze(1)
    return s, i, torch.arange(k.shape[1]).unsqueeze(0)


def weighted(p, v):
    v = v.repeat_interleave(p.shape[1] // v.shape[2], dim=2)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def probabilities(q, k, *, scale=None, window=None, alibi_slopes=None):
    """Causal softmax `[B, H, Tq, Tk]`."""
    s, i, j = scores(q, k, scale)
    hidden = j > i
    if window is not None:
        hidden = hidden | (i - j >= window)
    if alibi_slopes is not None:
        s = s - alibi_slopes.view(-1, 1, 1) * (i - j)
    return torch.softmax(s.masked_fill(hidden, float("-inf")), -1)


def softmax_attention(q, k, v, **options):
    return weighted(probabilities(q, k, **options), v)


def chunk_masses(q, k, chunk_size, selection="exact", scale=None):
    """What selection maximises, `[B, H, Tq, N]`, with -inf for the chunks that a query may not choose."""
    s, i, _ = scores(q, k, scale)
    columns = []
    for start in range(0, k.shape[1] - chunk_size + 1, chunk_size):
        inside = s[..., start : start + chunk_size]
        mass = inside.exp().sum(-1) if selection == "exact" else inside.mean(-1)
        columns.append(mass.masked_fill(i[:, 0] < start + chunk_size, float("-inf")))
    columns = columns or [torch.full(s.shape[:3], float("-inf"), dtype=s.dtype)]
    return torch.stack(columns, -1)


def select_chunks(q, k, *, chunk_size, selection="exact", scale=None, remote_chunks=1):
    mass = chunk_masses(q, k, chunk_size, selection, scale)
    best = mass.sort(dim=-1, descending=True, stable=True)
    chunks = torch.where(best.values == float("-inf"), -1, best.indices)[..., :remote_chunks]
    chunks = torch.nn.functional.pad(chunks, (0, remote_chunks - chunks.shape[-1]), value=-1)
    return (chunks if remote_chunks > 1 else chunks.squeeze(-1)).transpose(1, 2).to(torch.int32)


def top1_chunk_probabilities(q, k, chunks, *, chunk_size, scale=None):
    s, i, j = scores(q, k, scale)
    several = chunks if chunks.dim() == 4 else chunks.unsqueeze(-1)
    remote = (j.unsqueeze(-1) // chunk_size == several.transpose(1, 2).unsqueeze(-2)).any(-1)
    local = (j // chunk_size == i // chunk_size) & (j <= i)
    return torch.softmax(s.masked_fill(~(local | remote), float("-inf")), -1)


def top1_chunk_attention(q, k, v, *, chunk_size, selection="exact", scale=None, remote_chunks=1):
    options = {"chunk_size": chunk_size, "scale": scale}
    chunks = select_chunks(q, k, selection=selection, remote_chunks=remote_chunks, **options)
    return weighted(top1_chunk_probabilities(q, k, chunks, **options), v)


class StraightThrough(torch.autograd.Function):
    """One-hot of the largest probability; its gradient goes to the probabilities unchanged."""

    @staticmethod
    def forward(ctx, p):
        return torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype)

    @staticmethod
    def backward(ctx, dp):
        return dp


def top1_element_attention(q, k, v, *, scale=None):
    return weighted(StraightThrough.apply(probabilities(q, k, scale=scale)), v)


def entropy(p):
    return -torch.where(p > 0, p * p.clamp_min(1e-300).log(), 0.0).sum(-1).transpose(1, 2)
