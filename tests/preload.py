"""What all processes of `tests.processes` share: what they change, the parser of `seqarch fit`, and a small run.

Python and PyTorch take a second when they first meet the types of a training. The run takes it once, in the server. On
a CPU it leaves no thread, which a fork would lose.
"""

import contextlib
import functools
import io
import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch

from seqarch import cli, versions
from seqarch.data.prepare import prepare
from seqarch.evaluation import recall
from seqarch.exam import pool
from seqarch.experiment import run
from seqarch.training import run_folder
from tests.conftest import MODEL, TINY, flags
from tests.processes import SAMPLE
from tests.texts import code, prose

recall.SAMPLE = SAMPLE
run_folder.commit = functools.cache(versions.commit)
pool.START = "fork"  # a spawned process would import PyTorch again
run.report = lambda runs, out: [out / "index.html"]  # pyright: ignore - figures take longer than the run
torch.set_num_threads(1)
with (
    tempfile.TemporaryDirectory() as made,
    contextlib.redirect_stdout(io.StringIO()) as out,
    contextlib.redirect_stderr(out),
):
    folder = Path(made)
    with patch("seqarch.data.verified.memory_folder", lambda: folder):
        for domain, texts in {"docs": prose(20), "code": code(5)}.items():
            file = folder / f"{domain}.jsonl"
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            prepare([file], folder, domain, "byte", holdout=0.3, workers=1)
        cli.run(["fit", *flags(**{**TINY, **MODEL, "data.root": folder, "run_dir": folder / "run"})])
