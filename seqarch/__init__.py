"""seqarch: what a sequence mixer does to a language model's base capabilities."""

TYPE_CHECKING = False  # nothing is imported here: the command has not left the current folder yet
if TYPE_CHECKING:
    from seqarch.experiment.experiment import Experiment
    from seqarch.experiment.load import generate_text, load
    from seqarch.report.comparison import compare
    from seqarch.report.runs import load_run

__version__ = "0.2.0"
__all__ = ["Experiment", "__version__", "compare", "generate_text", "load", "load_run"]

_HOMES = {
    "Experiment": "seqarch.experiment.experiment",
    "compare": "seqarch.report.comparison",
    "generate_text": "seqarch.experiment.load",
    "load": "seqarch.experiment.load",
    "load_run": "seqarch.report.runs",
}
"""Where the names are that take long to import."""


def __getattr__(name: str) -> object:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'seqarch' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__  # what TAB shows
