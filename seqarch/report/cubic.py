"""A monotone cubic through points: PCHIP (Fritsch and Butland 1984, end slopes as in Moler 2004, section 3.6)."""

import numpy as np


def monotone_cubic(nodes: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The curves through `values [n, d]` over rising `nodes [n]`, at `at [m]`: `[m, d]`; nan outside of the nodes.

    Between two points no curve leaves their range. Two points are joined by a line.
    """
    inside = ((at >= nodes[0]) & (at <= nodes[-1]))[:, None]
    if len(nodes) == 1:
        return np.where(inside, values, np.nan)
    widths = np.diff(nodes)[:, None]
    rises = np.diff(values, axis=0) / widths
    slopes = _slopes(widths, rises)
    left = np.clip(np.searchsorted(nodes, at) - 1, 0, len(nodes) - 2)
    t = (at - nodes[left])[:, None] / widths[left]
    ends = (1 + 2 * t) * (1 - t) ** 2 * values[left] + t**2 * (3 - 2 * t) * values[left + 1]
    bends = t * (1 - t) ** 2 * slopes[left] - t**2 * (1 - t) * slopes[left + 1]
    return np.where(inside, ends + widths[left] * bends, np.nan)


def _slopes(widths: np.ndarray, rises: np.ndarray) -> np.ndarray:
    """The slope at each node: inside the weighted harmonic mean of the two next to it, 0 at a turn."""
    if len(rises) == 1:
        return np.repeat(rises, 2, axis=0)
    one, other = rises[:-1], rises[1:]
    near, far = 2 * widths[1:] + widths[:-1], widths[1:] + 2 * widths[:-1]
    same = one * other > 0
    means = (near + far) / (near / np.where(same, one, 1) + far / np.where(same, other, 1))
    first, last = _end(*widths[:2], *rises[:2]), _end(*widths[:-3:-1], *rises[:-3:-1])
    return np.stack([first, *np.where(same, means, 0), last])


def _end(width: np.ndarray, next_width: np.ndarray, rise: np.ndarray, next_rise: np.ndarray) -> np.ndarray:
    """The slope at an end, of the parabola through three points, cut so that the curve stays monotone."""
    slope = ((2 * width + next_width) * rise - width * next_rise) / (width + next_width)
    slope = np.where((rise * next_rise <= 0) & (np.abs(slope) > 3 * np.abs(rise)), 3 * rise, slope)
    return np.where(slope * rise <= 0, 0, slope)
