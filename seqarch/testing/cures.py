"""What usually cures a mixer that fails a test of `MixerSuite`."""

import functools
from collections.abc import Callable
from typing import Any

WIDEN = (
    "compute sums, exponentials, logarithms and norms in float32. seqarch.kernels.tensors.at_least_float32(t) widens "
    "bfloat16 and leaves float64, in which the suite compares, as it is; .float() would round it"
)
NARROW = "return the output in the dtype of the input: y.to(x.dtype)"
PIECES = (
    "keep in the state all that later tokens read: sums, last inputs of a convolution, the position. forward begins "
    "with the state's fields and sets them"
)

CURES = {
    "test_shape_and_dtype": (NARROW, WIDEN, "return a new tensor of the shape of x, and write to no input"),
    "test_causality": (
        "let output t depend on inputs 0 to t only: pad convolutions on the left, mask scores of later keys",
        "take no mean, maximum or norm along the sequence",
    ),
    "test_batch_permutation": ("take no mean, maximum or norm over the batch",),
    "test_train_and_eval_agree": ("leave out dropout and noise", "compute the same whatever self.training is"),
    "test_pieces_with_gradients": (PIECES, "do not detach what the state keeps", WIDEN),
    "test_pieces_without_gradients": (PIECES, WIDEN),
    "test_two_processes_share_a_sequence": (
        "let a split state (MixerState.split) ask its piece for earlier tokens: piece.before, seen, carried",
        "or do not define split: one process then waits for the state of the other",
        PIECES,
    ),
    "test_processes_share_packed_documents": (
        "with a piece, cu_seqlens has the borders of the whole row: piece.borders makes those in the piece of them; "
        "piece.entering, leaving and carried pass states only within a document",
        "or do not define split: training with documents in pieces is then refused",
    ),
    "test_packed_documents": (
        "start anew at each border: seqarch.kernels.packed.each_document runs a recurrence on each document; "
        "ShortConvolution and the kernels take cu_seqlens",
        "or take 'packed' out of capabilities and cu_seqlens out of forward",
    ),
    "test_compile": (
        "branch on no value of a tensor, and call no .item() or .tolist()",
        "or set compiles = False in your test class, and model.compile: false in recipes",
    ),
    "test_activation_checkpointing": ("compute the same in a second pass: keep no tensor of a pass on self",),
    "test_float32": (
        "subtract the maximum before exp; use logsumexp, logaddexp or softplus for the logarithm of a sum",
        "take no differences of large numbers, such as sums over the whole sequence",
    ),
    "test_gradients_are_derivatives": (
        "look for detach(), no_grad() and a backward of your own",
        WIDEN,
        "for a straight-through estimator set differentiable = False in your test class",
    ),
    "test_bfloat16": (WIDEN, NARROW),
    "test_bfloat16_state": ("keep sums in the state in float32: seqarch.kernels.tensors.at_least_float32",),
    "test_uninitialised_memory": ("use torch.zeros, or write all of torch.empty, its padding too, before you read it",),
    "test_state_bytes": (
        "clone() a slice that the state keeps: a view keeps its whole tensor",
        "define state_bytes(seq_len, dtype): the bytes that the state keeps of one sequence after seq_len tokens",
    ),
    "test_flops": ("count 2 per weight of a linear layer, and three times as much in training", "or do not define it"),
    "test_states_are_independent": (
        "make new tensors in init_state, and keep no tensor of a sequence on self",
        "clone() inputs that the state keeps",
    ),
    "test_refusals": (
        "claim in capabilities what forward can do: 'decode' with a parameter state, 'packed' with cu_seqlens",
        "otherwise drop the parameter: calls with it are then refused for you",
    ),
    "test_carry": ("write tensors [B, T, ...] into carry in the first layer, and only read them in later ones",),
    "test_losses": ("write the weighted mean over the tokens of the call: 0-d, with a gradient",),
    "test_every_parameter_has_a_gradient": ("use the parameter in forward, or make it a buffer",),
    "test_reset_parameters": (
        "set every parameter and buffer in reset_parameters; submodules have their own reset_parameters()",
        "call it last in the constructor",
    ),
    "test_entropy": ("return nats per head, [B, T, H]", "or take 'entropy' out of capabilities"),
}
"""By the name of the test, most likely first."""


def with_cures(suite: type) -> type:
    """Let each test of a suite that fails print its cures as well."""
    for name in [name for name in vars(suite) if name.startswith("test_")]:
        setattr(suite, name, _cured(vars(suite)[name], CURES[name]))
    return suite


def _cured(test: Callable[..., None], cures: tuple[str, ...]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        try:
            test(*args, **options)
        except Exception as error:
            error.add_note("\n".join(("usual cures:", *(f"* {cure}" for cure in cures))))
            raise

    return run
