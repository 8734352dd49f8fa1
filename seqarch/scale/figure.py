"""The figure of a summary: the losses of finished models over their training tokens, with the fitted laws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from seqarch.report.panels import Picture, log_axis, own_style, panels
from seqarch.report.styles import styles

if TYPE_CHECKING:
    from seqarch.scale.summary import Summary


def scale_figure(summary: Summary) -> Picture:
    """A panel for each rung, a colour for each model; lines are the laws."""
    sizes = dict.fromkeys(point.rung for point in sorted(summary.points, key=lambda point: point.parameters))
    laws = None if isinstance(summary.laws, str) else summary.laws
    looks = styles({model: model for model in summary.models})
    with own_style():
        figure, grid = panels(len(sizes), sharey=True)
        for axes, rung in zip(grid, sizes, strict=True):
            axes.set_title(rung)
            for model in summary.models:
                own = [point for point in summary.points if (point.model, point.rung) == (model, rung)]
                own.sort(key=lambda point: point.tokens)
                tokens = np.array([point.tokens for point in own])
                losses = [point.loss for point in own]
                style = looks[model].line(label=model)
                has_law = laws is not None and model in laws.models and own
                figure.plot(axes, model, tokens, losses, **style | ({"linestyle": "none"} if has_law else {}))
                if has_law and laws is not None:
                    at = np.geomspace(tokens.min(), tokens.max(), 50)
                    law = [laws.loss(model, own[0].parameters, each) for each in at]
                    axes.plot(at, law, color=style["color"], linestyle=style["linestyle"], linewidth=1.0)
        log_axis(grid[0])
        figure.supxlabel("training tokens")
        figure.supylabel(summary.label)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=8)
    return figure
