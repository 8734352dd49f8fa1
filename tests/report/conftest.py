import pytest


@pytest.fixture
def unpainted(monkeypatch):
    """Make the pictures of a report empty files: drawing them takes most of its time."""

    def write(figure, stem):
        written = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        for path in written:
            path.touch()
        return written

    monkeypatch.setattr("seqarch.report.panels.write", write)


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the figures out of reports, for tests of their words and numbers."""
    monkeypatch.setattr("seqarch.report.Comparison.figures", lambda *_: {})
