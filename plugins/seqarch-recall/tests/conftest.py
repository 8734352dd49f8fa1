import tomllib
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def installed(tmp_path_factory):
    """Declares the command of this package, as `pip install` does."""
    place = tmp_path_factory.mktemp("site")
    info = place / "seqarch_recall-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seqarch-recall\nVersion: 1\n")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    ((group, points),) = project["entry-points"].items()
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        yield
