"""Tokens to reach a loss."""

import numpy as np
import pytest

from seqarch.report.draft import convergence, tokens_to_reach
from seqarch.report.runs import Evaluations


def course(speed=1.0, points=24):
    tokens = np.arange(1, points + 1) * 1000.0
    return Evaluations(tokens, 5 - 0.5 * np.log(speed * tokens), {"code": tokens})


def test_tokens_lie_on_the_line_between_two_evaluations():
    losses = np.array([5 - 0.5 * np.log(2500), -1.0, 2.0])
    assert tokens_to_reach(course(), losses) == pytest.approx([2500, np.inf, 1000])


def test_the_first_time_counts():
    run = Evaluations(np.array([1, 2, 3, 4]), np.array([3.0, 2.0, 2.5, 1.0]), {})
    assert tokens_to_reach(run, np.array([2.0, 2.25, 1.5])) == pytest.approx([2, 2**0.75, 8**0.5])


def test_a_run_twice_as_fast_needs_half_the_tokens():
    levels = convergence([course(2.0)], [course()])
    assert [level.ratio for level in levels] == pytest.approx([0.5] * 4)
    assert levels[-1].loss == pytest.approx(course().in_domain.min())
    assert levels[-1].reference == pytest.approx(24000)


def test_a_run_against_itself_has_ratio_one():
    assert [level.ratio for level in convergence([course(), course(1.5)], [course(), course(1.5)])] == pytest.approx(
        [1] * 4
    )


def test_no_common_loss_gives_nothing():
    far = course()
    assert convergence([Evaluations(far.tokens, far.in_domain + 10, far.losses)], [course()]) == []
