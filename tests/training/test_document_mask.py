"""With `data.document_mask` every document trains as if it were alone: each mixer, in each way of running."""

import copy
import functools
import inspect
import itertools
import json
import string

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from seqarch.data.datamodule import TextDataModule
from seqarch.data.packing import as_documents
from seqarch.data.prepare import prepare
from seqarch.errors import UserError
from seqarch.mixers import Mixer
from seqarch.mixers.registry import load_mixer, mixer_entries
from seqarch.model import SequenceLM
from seqarch.model.feed_forward import RWKVChannelMix
from seqarch.training import LanguageModel, fsdp

MIXERS = sorted(entry.name for entry in mixer_entries() if entry.package == "seqarch")
T = 37
ROWS = [[38], [9, 1, 20, 8], [30, 8]]
"""Tokens of the documents in rows of T + 1."""
FILLED = 5
"""Tokens at the end of the last row that only fill it up."""
SHORT = {"chunk_size": 4, "window": 3}
"""Options of mixers, so that documents are longer."""


def model(name, n_layers=2, d_model=32, options=SHORT, positions=T, vocab_size=50):
    mixer = load_mixer(name)
    known = {"n_heads": 2, **options}
    chosen = {key: value for key, value in known.items() if key in inspect.signature(mixer).parameters}
    torch.manual_seed(0)
    layers = {"mixer": functools.partial(mixer, **chosen)}
    lm = SequenceLM(vocab_size, d_model, n_layers, layers, feed_forward=RWKVChannelMix, learned_positions=positions)
    for parameter in lm.blocks.parameters():  # no output starts at zero, so all parameters have gradients
        parameter.data += 0.05 * torch.randn_like(parameter)
    return lm.double()


@pytest.fixture(scope="module")
def rows():
    """Tokens and segments, `[3, T + 1]`."""
    tokens = torch.randint(50, (len(ROWS), T + 1), generator=torch.Generator().manual_seed(1))
    segments = torch.stack([torch.arange(1, len(row) + 1).repeat_interleave(torch.tensor(row)) for row in ROWS]).int()
    segments[2, -FILLED:] = 0
    return tokens, segments


def alone(tokens, segments):
    """Each document as a batch of its own."""
    return [
        row[inside == number][None]
        for row, inside in zip(tokens, segments, strict=True)
        for number in range(1, int(inside.max()) + 1)
    ]


def gradients(lm):
    whole = {name: parameter.grad for name, parameter in lm.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in whole.items()}


def expected(lm, documents):
    """The mean loss over the targets of all documents, and its gradients."""
    losses = [lm(each[:, :-1], each[:, 1:], reduction="sum") for each in documents if each.shape[1] > 1]
    loss = torch.stack(losses).sum() / sum(each.shape[1] - 1 for each in documents)
    loss.backward()
    return loss.detach(), gradients(lm)


def masked(lm, rows):
    module = LanguageModel(vocab_size=50)
    module.lm = lm
    loss = module.loss({"tokens": rows[0], **as_documents(*rows, count=16)})
    loss.backward()
    return loss.detach(), gradients(lm)


@pytest.fixture(scope="module")
def of_documents(rows):
    """The loss and gradients of a mixer, document by document."""
    return functools.cache(lambda name: expected(model(name), alone(*rows)))


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    dist.destroy_process_group()


WAYS = [*((name, False) for name in MIXERS), *((name, True) for name in ("Attention", "Based", "RWKV7"))]
"""Each mixer, and kinds of mixers whose blocks are checkpointed and sharded."""


@pytest.mark.parametrize(("name", "sharded"), WAYS)
def test_documents_train_as_if_alone(name, sharded, rows, of_documents, mesh):
    lm = model(name)
    if sharded:
        lm.checkpoint_activations()
        fsdp.shard(lm, mesh, torch.float64)
    torch.testing.assert_close(masked(lm, rows), of_documents(name), rtol=1e-6, atol=1e-8)


BY_FLA = {"Based", "DeltaNet", "GatedDeltaNet", "GatedDeltaNet2", "RWKV5", "RWKV6", "RWKV7", "TaylorLinearAttention"}
SOME = [name if name == "GatedConvolution" else pytest.param(name, marks=pytest.mark.slow) for name in MIXERS]
"""The mixer with the smallest graph: those of attention take ten seconds."""


@pytest.mark.parametrize("name", SOME)
def test_compiled_blocks_train_documents_as_if_alone(name):
    """Two short ones: on a CPU each is a graph of its own, which takes seconds."""
    torch.compiler.reset()
    row = torch.arange(9)[None], torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 2]])
    lm = model(name, n_layers=1)
    lm.blocks[0].compile(backend="eager")
    torch.testing.assert_close(masked(lm, row), expected(model(name, n_layers=1), alone(*row)), rtol=1e-6, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXERS)
def test_documents_train_as_if_alone_in_bf16_on_a_gpu(name):
    """Gradients of packed documents are as near to those in float32 as the gradients of single ones."""
    lm = model(name, d_model=128, options={"chunk_size": 16, "window": 40}, positions=512).float().cuda()
    rows = drawn(1)
    documents = [document.cuda() for document in alone(*rows)]
    _, exact = expected(lm, documents)
    lm.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        _, rounded = expected(lm, documents)
    batch = {key: each.cuda() for key, each in {"tokens": rows[0], **as_documents(*rows, count=128)}.items()}
    lm.zero_grad()
    module = LanguageModel(vocab_size=50)
    module.lm = lm
    with torch.autocast("cuda", torch.bfloat16):
        loss = module.loss(batch)
    loss.backward()
    assert off(gradients(lm), exact) <= 1.5 * off(rounded, exact)


def off(gradients, exact):
    """The root of the mean square of the relative errors of all parameters. A vector of few has too few roundings."""
    errors = [(gradients[key] - each).norm() / each.norm() for key, each in exact.items()]
    return torch.stack(errors).square().mean().sqrt()


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXERS)
def test_batches_with_other_borders_need_no_new_code(name):
    """Compiled in bf16 on a GPU. Our kernels wait for nothing on the host; those of fla make tables there."""
    lm = model(name, d_model=128, options={"chunk_size": 16, "window": 40}, positions=512).float().cuda()
    compiled = LanguageModel(vocab_size=50)
    compiled.lm = copy.deepcopy(lm)
    compiled.lm.compile_parts()
    torch.compiler.reset()
    for seed in (1, 2, 3):
        rows = drawn(seed)
        batch = {"tokens": rows[0], **as_documents(*rows, count=128)}
        batch = {key: each.cuda() for key, each in batch.items()}
        torch.cuda.set_sync_debug_mode("error" if seed > 1 and name not in BY_FLA else "default")
        first = 2 if name == "Based" else 1  # its layers are of two kinds
        with torch.compiler.set_stance("fail_on_recompile" if seed > first else "default"):
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled.loss(batch)
            loss.backward()
        torch.cuda.set_sync_debug_mode("default")
        with torch.autocast("cuda", torch.bfloat16):
            alone_loss, _ = expected(lm, [document.cuda() for document in alone(*rows)])
        torch.testing.assert_close(loss.detach(), alone_loss, rtol=5e-3, atol=0)


def drawn(seed, rows=4, length=513):
    """Tokens and segments of documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (rows, length), generator=generator)
    begins = torch.rand(rows, length, generator=generator) < 0.01 * seed
    begins[:, 0] = True
    return tokens, begins.cumsum(1).int()


def test_two_micro_batches_have_the_gradient_of_one(tmp_path):
    """They have unequal numbers of targets; the trainer takes the mean of their losses."""
    documents = [string.printable[:length] for length in range(20, 100)]
    file = tmp_path / "docs.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepare([file], tmp_path, "docs", "byte", holdout=0.3, workers=1)
    found = []
    for size in (2, 4):
        data = TextDataModule(
            str(tmp_path),
            {"docs": 1.0},
            sequence_length=T,
            sequences_per_step=4,
            micro_batch_size=size,
            document_mask=True,
        )
        batches = list(itertools.islice(data.train_dataloader(), 4 // size))
        module = LanguageModel(vocab_size=257)
        module.lm = model("Attention", vocab_size=257)
        for batch in batches:
            (module.loss(batch) / len(batches)).backward()
        found.append((gradients(module.lm), [int((batch["targets"] >= 0).sum()) for batch in batches]))
    (halves, counts), (whole, count) = found
    assert counts[0] != counts[1]
    assert [sum(counts)] == count
    torch.testing.assert_close(halves, whole, rtol=1e-5, atol=1e-9)


def test_a_mixer_that_cannot_pack_is_refused_by_name():
    class Whole(Mixer):
        def forward(self, x):
            return x

    module = LanguageModel(vocab_size=50, d_model=8, n_layers=2, mixers={"whole": Whole})
    module.document_mask = True
    with pytest.raises(UserError, match=r"data\.document_mask needs 'packed', a capability that Whole lacks"):
        module.configure_model()
