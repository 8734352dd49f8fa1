"""Integer tables of packed documents, in Triton's interpreter and on a GPU."""

import itertools

import numpy as np
import pytest
import torch

MANY = np.random.default_rng(0).integers(0, 5, 300).cumsum().tolist()
"""More documents than a program reads at once, some of them empty."""
BORDERS = [[0, 100], [0, 1, 17, 17, 60, 100], [0, 0, 100, 100], [0, 32, 64, 96], [0, *MANY], [0, 5000]]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("size", [16, 32, 1000])
def test_pieces_and_places(size: int) -> None:
    for borders in BORDERS:
        check(borders, size, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 64, 1000])
def test_pieces_and_places_on_a_gpu(size: int) -> None:
    for borders in [*BORDERS, list(range(0, 300_000, 3))]:
        check(borders, size, "cuda")


def check(borders: list[int], size: int, device: str) -> None:
    """Compare the tables with lists made in Python."""
    from seqarch.kernels.triton_documents import cut_into_pieces, pieces_of_tokens, positions_in_documents

    length, cu_seqlens = borders[-1], torch.tensor(borders, dtype=torch.int32, device=device)
    pieces = cut_into_pieces(cu_seqlens, size, length, more=2)
    wanted, first, positions, firsts = [], [], [], []
    for document, (a, b) in enumerate(itertools.pairwise(borders)):
        first.append(len(wanted))
        wanted += [(begin, min(begin + size, b), document) for begin in range(a, b, size)]
        positions += range(b - a)
        firsts += [first[-1]] * (b - a)
    found = list(zip(*(table.tolist() for table in pieces[:3]), strict=True))
    assert pieces.first.tolist() == [*first, len(wanted)]
    assert found == wanted + [(length, length, len(borders) - 2)] * (len(found) - len(wanted))
    assert len(found) - len(wanted) >= 2
    assert positions_in_documents(cu_seqlens, length).tolist() == positions
    own, of_document = pieces_of_tokens(cu_seqlens, pieces, size, length)
    assert of_document.tolist() == firsts
    assert own.tolist() == [n + position // size for n, position in zip(firsts, positions, strict=True)]
