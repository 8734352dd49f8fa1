"""What kernels and decoding steps fall short of, next to a floor that was measured or follows from measured rates."""

from __future__ import annotations

from benchmarks.tables import kernels, speed
from benchmarks.tables.kernels import LARGE, SMALL, Rows, digits
from seqarch.training.callbacks.throughput import PEAK_TFLOPS

Table = list[list[str]]
ATTEND_ROWS = 25
"""Rows of D elements per query and head that attention to a selection moves, forward and backward."""
CHUNK, LAYERS = 128, 12
BEFORE, NOW = "keys by addresses", "keys by descriptors"
"""The kernel that the profiles of shells ran, and the present one."""


def _rate(name: str) -> float:
    """A measured rate, per second."""
    (row,) = (row for row in kernels.read() if row["step"] == "limits" and row["name"].startswith(name))
    return float(row["p50"]) * 1e12


def _products(shape: tuple[str, str, str]) -> float:
    """Milliseconds of the products of all queries with all earlier keys."""
    T, H, D = map(int, shape)
    return 1e3 * T * T * H * D / _rate("bf16 product")


def _approx_floor(shape: tuple[str, str, str]) -> float:
    """Products with the mean keys, high and low part, and the bytes of attention."""
    T, H, D = map(int, shape)
    return 2 * _products(shape) / CHUNK + 1e3 * ATTEND_ROWS * 2 * T * H * D / _rate("copy")


def _exact_floor(shape: tuple[str, str, str]) -> float:
    """All products, and attention to the choice as it is."""
    return _products(shape) + Rows(kernels.read(), "time").of("attend fwd+bwd", shape)


def _both(of: Rows, name: str) -> str:
    return " / ".join(digits(of.of(name, shape)) for shape in (SMALL, LARGE))


def one_step(variant: str, column: str = "step_ms") -> str:
    """A number of a decoding step of RWKV-7 at batch 1."""
    (row,) = (row for row in speed.read("steps") if row["variant"] == variant)
    number = float(row[column])
    return digits(number) if column.endswith("_ms") else f"{number:.0f}"


def _shell() -> list[str]:
    """The shell with exact chunks against softmax, as measured and with a selection of the time of its products."""
    rows = [row for row in speed.read("shell") if row["activation_checkpointing"] == "false"]
    ms = {(row["recipe"], row["kind"]): float(row["step_ms"]) for row in rows}
    exact, softmax = "rwkv7_shell_top1_chunk_100k", "rwkv7_shell_softmax_100k"
    selection = ms[exact, "selection"]
    least = selection * _products(SMALL) / Rows(kernels.read(), "sharp").of(f"exact select, {BEFORE}", ("1", *SMALL))
    whole = ms[exact, "(step)"]
    return [speed.keeps_long("top1_chunk"), f"{ms[softmax, '(step)'] / (whole - selection + least):.1f}"]


def _compiled(name: str) -> dict[str, str]:
    *_, row = (row for row in speed.read("generation") if (row["name"], row["mode"]) == (name, "compiled"))
    return row


def compiled_prompts(name: str) -> str:
    """Tokens per second of prompts in compiled passes."""
    return speed.rounded(_compiled(name)["prefill_tokens_per_s"])


def _prompts(name: str) -> list[str]:
    """`compiled_prompts`, and those of one product of all queries and keys and the products with weights."""
    row = _compiled(name)
    batch, length = int(row["batch_size"]), int(row["prompt"])
    attention = LAYERS * batch * _products((str(length), *SMALL[1:])) / 1e3
    weights = 2 * int(row["parameters"]) * batch * length / _rate("bf16 product")
    return [compiled_prompts(name), speed.rounded(str(batch * length / (attention + weights)))]


def _training(name: str) -> list[str]:
    """The fastest step of a recipe: tokens per second, and those of its own operations at the rate of `limits`."""
    rows = (row for row in speed.read("aims") if (row["name"], row["products"]) == (name, "bf16"))
    row = max(rows, key=lambda row: float(row["tokens_per_s"]))
    operations = float(row["mfu"]) * PEAK_TFLOPS["H200"] * 1e12  # per second
    return [speed.rate(row), speed.hundreds(float(row["tokens_per_s"]) * _rate("bf16 product") / operations)]


def left() -> Table:
    """Each aim that was missed: what was measured, its floor, what was tried and what is left."""
    time, sharp = Rows(kernels.read(), "time"), Rows(kernels.read(), "sharp")
    floors = {of: " / ".join(digits(of(shape)) for shape in (SMALL, LARGE)) for of in (_approx_floor, _exact_floor)}
    exact = " / ".join(digits(sharp.of(f"exact fwd+bwd, {NOW}", ("1", *shape))) for shape in (SMALL, LARGE))
    joined = one_step("reductions, joined launches", "busy_ms")
    around = "norms, gates, the loss, the optimizer"
    registers = "dk, dv and scores fill the registers, so one program of 128 dims runs at a time"
    return [
        ["work", "aim", "measured", "floor", "tried", "what is left"],
        [
            *("approximate chunks, 102,400 tokens, ms", "2.5 / 5.5", _both(time, "approx fwd+bwd")),
            *(floors[_approx_floor], "prefetch, larger tiles, dv in a kernel of its own", registers),
        ],
        [
            *("exact chunks, scale `sqrt(D)`, ms", "17 / 40", exact, floors[_exact_floor]),
            *("fewer powers, halves of chunks, Gluon", "warps that take turns with products and powers"),
        ],
        ["100k shell, exact chunks over softmax", "3.8", *_shell(), "the same", "the same"],
        [
            *("a step of `rwkv7_110m` at batch 1, ms", "0.5", one_step("reductions"), joined),
            *("joined launches", "gaps between kernels, and products with a bias"),
        ],
        [
            *("16 prompts of 51,200 tokens, exact chunks, tokens/s", "600,000", *_prompts("top1_chunk_110m")),
            *("keys by descriptors, compiled passes, fewer covariances", "exponentials of the selection"),
        ],
        [
            *("`transformer_pp_110m` in training, tokens/s", "590,000", *_training("transformer_pp_110m")),
            *("FlashAttention-4, 64 sequences", around),
        ],
        [
            *("`transformer_pp_1b`, the same", "66,000", *_training("transformer_pp_1b")),
            *("FlashAttention-4, FP8", "the same"),
        ],
        [
            *("`rwkv7_110m` in training (25 % MFU), tokens/s", "352,000", *_training("rwkv7_110m")),
            *("mixes of tokens in one kernel, fla's TileLang", "reads and writes around fla's kernels"),
        ],
    ]
