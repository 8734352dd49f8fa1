"""The results of `seqarch eval` of several run folders as one CSV file.

    python benchmarks/capability_table.py OUT.csv RUN [RUN ...]

`seqarch report` refuses a run that never measured its losses by domain, and this script takes it. The columns are those
of the report's `capabilities.csv`. Differences are those to the first run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from seqarch.report import Findings, Group
from seqarch.report.runs import load_run
from seqarch.report.tables import capabilities
from seqarch.tables import write_csv

if __name__ == "__main__":
    out, *folders = map(Path, sys.argv[1:])
    groups = [Group(run.name, [run]) for run in map(load_run, folders)]
    write_csv(out, *capabilities(Findings(groups, groups[0])))
