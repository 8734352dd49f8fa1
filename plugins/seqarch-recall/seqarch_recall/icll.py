"""In-context language learning (RegBench, arXiv 2401.12973; github.com/berlino/seq_icl, dfa.py and ngram.py)."""

import zlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from seqarch_recall.examples import IGNORED, Examples

Automaton = tuple[tuple[tuple[int, int], ...], ...]
"""For each state its edges, a symbol and the next state each; the first state is the start."""
FEWEST, MOST = 4, 12
"""States of an automaton before it is minimised."""
EDGES = 3
STRINGS, SYMBOLS = (10, 19), (1, 49)
"""Strings of an example and symbols of a string, the fewest and the most."""
TEST = 11
"""One in `TEST` automata is for the test. Its transitions decide this, so no automaton is in both splits."""


def drawn(rng: np.random.Generator, symbols: int = 18) -> Automaton:
    """A random automaton as it is drawn: a state has 1 to 3 edges with different symbols to different other states."""
    states = int(rng.integers(FEWEST, MOST + 1))
    alphabet = rng.choice(symbols, int(rng.integers(FEWEST, symbols + 1)), replace=False)
    edges = []
    for state in range(states):
        count = int(rng.integers(1, EDGES + 1))
        taken = rng.choice(alphabet, count, replace=False)
        others = np.delete(np.arange(states), state)
        edges.append(tuple(zip(taken.tolist(), rng.choice(others, count, replace=False).tolist(), strict=True)))
    return tuple(edges)


def minimised(edges: Automaton) -> Automaton:
    """The least automaton with these strings, its states in the order in which they are reached.

    All states accept, so two states merge if they have the same symbols to states that merge. The same strings thus
    give the same value. Uniform choices along the edges give each string the probability that it had.
    """
    kinds = [0] * len(edges)
    while True:
        seen = [tuple(sorted((symbol, kinds[to]) for symbol, to in each)) for each in edges]
        ranks = {kind: rank for rank, kind in enumerate(dict.fromkeys(zip(kinds, seen, strict=True)))}
        finer = [ranks[kind] for kind in zip(kinds, seen, strict=True)]
        if len(ranks) == len(set(kinds)):
            break
        kinds = finer
    order, result = {kinds[0]: 0}, []
    waiting = [0]
    for state in waiting:
        for _, to in sorted(edges[state]):
            if kinds[to] not in order:
                order[kinds[to]] = len(order)
                waiting.append(to)
        result.append(tuple((symbol, order[kinds[to]]) for symbol, to in sorted(edges[state])))
    return tuple(result)


def split_of(edges: Automaton) -> Literal["train", "test"]:
    """The split that an automaton belongs to."""
    return "test" if zlib.crc32(repr(edges).encode()) % TEST == 0 else "train"


def examples(seed: int, n: int, *, symbols: int = 18, split: Literal["train", "test"] = "train") -> Examples:
    """Each example has strings of one random automaton, `a b c | a d ...`. Each next symbol, but not `|`, is an answer.

    Args:
        seed: of all random draws.
        n: examples, each of another automaton.
        symbols: S; the separator is token S, padding S + 1.
        split: the automata; those of "train" and "test" differ. Only "test" has `truth`.

    Returns:
        examples padded to the longest, grouped by the number of strings.
    """
    rng = np.random.default_rng(seed)
    found: dict[Automaton, tuple[NDArray[np.int64], int]] = {}
    while len(found) < n:
        edges = minimised(drawn(rng, symbols))
        if edges not in found and split_of(edges) == split:
            strings = int(rng.integers(STRINGS[0], STRINGS[1] + 1))
            found[edges] = (_walk(rng, edges, strings, symbols), strings)
    longest = max(len(walk) for walk, _ in found.values()) - 1
    inputs = np.full((n, longest), symbols + 1)
    targets = np.full((n, longest), IGNORED)
    truth = np.zeros((n, longest, symbols), dtype=np.float32) if split == "test" else None
    for row, (edges, (walk, _)) in enumerate(found.items()):
        (tokens, states), end = walk.T, len(walk) - 1
        inputs[row, :end] = tokens[:-1]
        targets[row, :end] = np.where(tokens[1:] == symbols, IGNORED, tokens[1:])
        if truth is not None:
            chances = np.zeros((len(edges), symbols), dtype=np.float32)
            for state, each in enumerate(edges):
                chances[state, [symbol for symbol, _ in each]] = 1 / len(each)
            truth[row, :end] = chances[states[1:]]
    return Examples(inputs, targets, np.array([strings for _, strings in found.values()]), truth)


def _walk(rng: np.random.Generator, edges: Automaton, strings: int, separator: int) -> NDArray[np.int64]:
    """The tokens of strings joined by separators, each with the state that it was drawn in, `[n, 2]`."""
    walk: list[tuple[int, int]] = []
    for string in range(strings):
        if string:
            walk.append((separator, 0))
        state = 0
        for _ in range(int(rng.integers(SYMBOLS[0], SYMBOLS[1] + 1))):
            symbol, to = edges[state][rng.integers(len(edges[state]))]
            walk.append((symbol, state))
            state = to
    return np.array(walk)
