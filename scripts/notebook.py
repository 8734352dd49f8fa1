"""The notebook as a page of the site: its texts, its code and what it printed and drew."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST = 16
"""Lines of an output; the middle of a longer one is left out."""
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def code_cells(notebook: Path) -> list[str]:
    """The code of each cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def page(notebook: Path) -> str:
    """The notebook in Markdown. Pictures stand in the page itself."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [shown for output in cell.get("outputs", ()) for shown in _shown(output)]
    return "\n\n".join([*parts, f"[The notebook]({notebook.name}) itself"])


def _shown(output: dict[str, Any]) -> Iterator[str]:
    data = output.get("data", {})
    if "image/png" in data:
        yield f'<img alt="the figure of this cell" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    elif "text/html" in data:
        yield f"<div>{''.join(data['text/html'])}</div>"
    elif text := ESCAPES.sub("", "".join(output.get("text", data.get("text/plain", "")))).strip("\n"):
        lines = text.splitlines()
        if len(lines) > LONGEST:
            lines = [*lines[: LONGEST // 2], "...", *lines[-LONGEST // 2 :]]
        yield "\n".join(["```text", *lines, "```"])
