"""Laws of the loss over size and tokens, and what a mixer saves by them.

The law of each mixer m is that of Hoffmann et al. 2022 (arXiv 2203.15556, equation 2), with one `E` for all mixers:

    L_m(N, D) = E + A_m N^-a_m + B_m D^-b_m

with N parameters and D training tokens. It is fitted by least squares of the relative errors to all finished models.

**Noise.** The finished models of one run share its seed, so their errors are alike. The share of the variance that
lies between runs has a restricted likelihood at the fit.

**Intervals** are a parametric bootstrap: each draw adds noise of both kinds, a new one for each rung and seed, to the
fitted losses and fits the laws again. It takes the share from its likelihood, and scales the noise by the uncertainty
of its variance, which gives the intervals the width of Student's t.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import least_squares

from seqarch.errors import UserError
from seqarch.scale.losses import Point

DRAWS = 400
STEEPEST = 3.0
"""The largest exponent."""
WIDEST = 30
"""The losses of runs that diverged, more times the lowest, fit no law."""
SHARES = np.linspace(0.0, 0.95, 20)
"""Shares of the noise's variance that may lie between runs."""
SPARE = 3
"""The fewest finished models beyond the number of parameters."""


@dataclass(frozen=True)
class Saving:
    """What a model needs to come to the reference's last loss, as a multiple of the reference's tokens or time.

    The interval covers 95 %. A value is infinite if the law never comes to this loss.
    """

    ratio: float
    low: float
    high: float

    def times(self, factor: float) -> "Saving":
        """The same in another unit."""
        return Saving(self.ratio * factor, self.low * factor, self.high * factor)


class Laws:
    """The laws of some models, fitted together.

    Args:
        points: the finished models of all of them.
        draws: fits of the bootstrap.

    Raises:
        UserError: a model has one size or one budget only, a loss is not above zero, or there are too few models.
    """

    def __init__(self, points: Sequence[Point], draws: int = DRAWS) -> None:
        self.points = list(points)
        self.draws = draws
        self.models = list(dict.fromkeys(point.model for point in points))
        for model in self.models:
            own = [point for point in points if point.model == model]
            for what, found in (("size", {each.rung for each in own}), ("budget", {each.tokens for each in own})):
                if len(found) < 2:
                    raise UserError(f"no law for {model}: it has finished models at one {what} only")
        losses = np.array([point.loss for point in points])
        if not 0 < losses.min() <= losses.max() < WIDEST * losses.min():
            raise UserError(f"no laws: they need losses above zero and below {WIDEST} times the lowest one")
        if len(points) < (least := 1 + 4 * len(self.models) + SPARE):
            raise UserError(f"no laws: they need {least} finished models, not {len(points)}: train more sizes or seeds")
        self._index = np.array([self.models.index(point.model) for point in points])
        self._sizes = np.log([point.parameters for point in points])
        self._tokens = np.log([point.tokens for point in points])
        self._unit = 10.0 ** np.floor(np.log10(losses.min()))  # the fit's limits are for losses from 1 to 10
        self._losses = losses / self._unit
        self._centre = self._sizes.mean(), self._tokens.mean()
        self._runs = np.unique([f"{each.model} {each.rung} {each.seed}" for each in points], return_inverse=True)[1]

    @cached_property
    def fit(self) -> np.ndarray:
        """The parameters: E, then log A, a, log B and b of each model, in units of the mean size, tokens and a loss."""
        lowest = self._losses.min()
        starts = [
            np.r_[share * lowest, np.tile([np.log((1 - share) * lowest / 2), slope, np.log(0.1), slope], self._n)]
            for share in (0.3, 0.6, 0.9)
            for slope in (0.2, 0.6)
        ]
        return min((self._solve(self._losses, start) for start in starts), key=lambda found: found[1])[0]

    @cached_property
    def refits(self) -> np.ndarray:
        """The parameters of each draw of the bootstrap, `[draws, parameters]`."""
        random = np.random.default_rng(0)
        fitted = self._predicted(self.fit)
        weights, variances, freedom = self._components
        fits = []
        for k in random.choice(len(SHARES), self.draws, p=weights):
            scale = np.sqrt(variances[k] * freedom / random.chisquare(freedom))
            between = np.sqrt(SHARES[k]) * random.normal(size=self._runs.max() + 1)[self._runs]
            noise = scale * (between + np.sqrt(1 - SHARES[k]) * random.normal(size=len(fitted)))
            with np.errstate(all="ignore"):  # a draw of much noise overflows
                fits.append(self._solve(fitted * np.exp(noise), self.fit)[0])
        return np.array(fits)

    @cached_property
    def noise(self) -> tuple[float, float]:
        """The likeliest relative deviation between runs and within runs."""
        weights, variances, _ = self._components
        best = int(np.argmax(weights))
        return float(np.sqrt(SHARES[best] * variances[best])), float(np.sqrt((1 - SHARES[best]) * variances[best]))

    @cached_property
    def _components(self) -> tuple[np.ndarray, np.ndarray, int]:
        """The likelihoods of `SHARES`, which sum to one, the variance with each, and the degrees of freedom."""
        slopes = self._slopes(self.fit) / self._losses[:, None]
        basis = np.linalg.svd(slopes, full_matrices=True)
        rank = int((basis[1] > 1e-9 * basis[1][0]).sum())
        free = basis[0][:, rank:].T  # contrasts of the errors that the fit leaves free
        errors = free @ (self._losses / self._predicted(self.fit) - 1)
        same = self._runs[:, None] == self._runs
        likelihoods, variances = np.empty((2, len(SHARES)))
        for k, share in enumerate(SHARES):
            covariance = free @ (share * same + (1 - share) * np.eye(len(same))) @ free.T
            variances[k] = errors @ np.linalg.solve(covariance, errors) / len(errors)
            likelihoods[k] = -0.5 * (len(errors) * np.log(variances[k]) + np.linalg.slogdet(covariance)[1])
        weights = np.exp(likelihoods - likelihoods.max())
        return weights / weights.sum(), variances, len(errors)

    @property
    def floor(self) -> float:
        """E, in the unit of the losses."""
        return float(self.fit[0] * self._unit)

    def loss(self, model: str, parameters: float, tokens: float) -> float:
        """The loss that a law gives, in the unit of the losses."""
        return float(self._loss(model, parameters, tokens, self.fit) * self._unit)

    def saving(self, model: str, reference: Point, parameters: float) -> Saving:
        """The tokens with which a model of this size has the loss of the reference's law at a point, over its own."""
        ratios = []
        for fit in (self.fit, self.refits):
            target = self._loss(reference.model, reference.parameters, reference.tokens, fit)
            floor, (log_b, b), at = self._parts(model, parameters, reference.tokens, fit)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                needed = (log_b - np.log(np.maximum(target - floor, 0.0))) / b
                ratios.append(np.exp(needed - at))
        low, high = np.quantile(ratios[1], (0.025, 0.975), method="nearest")
        return Saving(float(ratios[0]), float(low), float(high))

    @property
    def _n(self) -> int:
        return len(self.models)

    def _loss(self, model: str, parameters: float, tokens: float, fit: np.ndarray) -> np.ndarray:
        """The loss that a law gives, in units of the fit; for `refits` one for each draw, `[draws]`."""
        floor, (log_b, b), at = self._parts(model, parameters, tokens, fit)
        return floor + np.exp(log_b - b * at)

    def _parts(
        self, model: str, parameters: float, tokens: float, fit: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """The loss after endless tokens, the term of the tokens as (log B, b), and the tokens in its units."""
        first = 1 + 4 * self.models.index(model)
        log_a, a, log_b, b = np.moveaxis(fit[..., first : first + 4], -1, 0)
        size = np.log(parameters) - self._centre[0]
        return fit[..., 0] + np.exp(log_a - a * size), np.array([log_b, b]), np.log(tokens) - self._centre[1]

    def _terms(self, fit: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        own = fit[1:].reshape(-1, 4)[self._index]
        size, tokens = self._sizes - self._centre[0], self._tokens - self._centre[1]
        return np.exp(own[:, 0] - own[:, 1] * size), np.exp(own[:, 2] - own[:, 3] * tokens), size, tokens

    def _predicted(self, fit: np.ndarray) -> np.ndarray:
        of_size, of_tokens, *_ = self._terms(fit)
        return fit[0] + of_size + of_tokens

    def _slopes(self, fit: np.ndarray) -> np.ndarray:
        """The derivatives of the losses by the parameters, `[points, parameters]`."""
        of_size, of_tokens, size, tokens = self._terms(fit)
        table = np.zeros((len(self._losses), len(fit)))
        table[:, 0] = 1
        for k, column in enumerate((of_size, -of_size * size, of_tokens, -of_tokens * tokens)):
            table[np.arange(len(table)), 1 + 4 * self._index + k] = column
        return table

    def _solve(self, losses: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, float]:
        """The parameters with the least squares of the relative errors, and their sum."""
        low = np.r_[0.0, np.tile([-12.0, 0.0, -12.0, 0.01], self._n)]
        high = np.r_[losses.min(), np.tile([3.0, STEEPEST, 3.0, STEEPEST], self._n)]
        solution = least_squares(
            lambda fit: self._predicted(fit) / losses - 1,
            np.clip(start, low + 1e-6 * (high - low), high - 1e-6 * (high - low)),
            jac=lambda fit: self._slopes(fit) / losses[:, None],  # pyright: ignore[reportArgumentType]
            bounds=(low, high),
            max_nfev=200,
        )
        return solution.x, float(solution.cost)
