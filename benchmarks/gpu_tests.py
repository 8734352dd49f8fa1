"""What passed on a GPU: a row from pytest's JUnit files, and the sentence of the kernel log.

    pytest -m gpu --junitxml build/gpu_tests.xml ...
    python -m benchmarks.gpu_tests build/gpu_tests.xml --csv benchmarks/gpu_tests.csv

The second command writes the CSV file, on the machine that ran the tests, and prints its sentence. It takes several
files, if several commands ran the tests.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from seqarch.tables import read_csv, write_csv
from seqarch.versions import commit, version

Row = dict[str, Any]
FOLDER = Path(__file__).parent
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def counts(junit: list[Path]) -> Row:
    """Tests that passed, were skipped and failed, where a test with an error failed, and the seconds of all of them."""
    roots = [ElementTree.parse(each).getroot() for each in junit]
    kinds = [{each.tag for each in case} for root in roots for case in root.iter("testcase")]
    failed = sum(bool(kind & {"failure", "error"}) for kind in kinds)
    skipped = sum("skipped" in kind and not kind & {"failure", "error"} for kind in kinds)
    seconds = sum(float(suite.attrib["time"]) for root in roots for suite in root.iter("testsuite"))
    return {"passed": len(kinds) - failed - skipped, "skipped": skipped, "failed": failed, "seconds": seconds}


def machine() -> Row:
    """GPUs and versions of this machine."""
    import torch

    gpus = {"gpus": torch.cuda.device_count(), "gpu": torch.cuda.get_device_name()}
    return {**gpus, "torch": torch.__version__, "triton": version("triton"), "fla": version("fla-core")}


def of_tests(row: Row) -> str:
    """The sentence about the tests."""
    number, name = int(row["gpus"]), row["gpu"].split()[1]
    versions = f"torch {short(row['torch'])}, Triton {row['triton']}, fla {row['fla']}"
    if int(row["failed"]):
        raise ValueError(f"{row['failed']} tests failed")
    return (
        f"All of these tests passed at commit {code(row)}: {row['passed']} passed and {row['skipped']} were skipped, "
        f"in {float(row['seconds']):.0f} s. The machine had {COUNTS[number]} {name}{'s' * (number > 1)} "
        f"({versions})"
    )


def code(row: Row) -> str:
    """The commit, of unchanged code, in seven digits."""
    if not row["commit"] or "dirty" in row["commit"]:
        raise ValueError(f"no commit holds the code that ran: {row['commit'] or 'unknown'}")
    return row["commit"][:7]


def short(torch: str) -> str:
    """`2.11.0+cu130` as 2.11."""
    return ".".join(torch.split(".")[:2])


def sentence() -> str:
    """What docs/kernels_log.md has to say."""
    (tests,) = read_csv(FOLDER / "gpu_tests.csv")
    return of_tests(tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("junit", type=Path, nargs="+")
    parser.add_argument("--csv", type=Path, default=FOLDER / "gpu_tests.csv")
    parser.add_argument("--commit", default=commit(), help="of the code that ran, for a copy without its history")
    given = parser.parse_args()
    row = {**machine(), "commit": given.commit, **counts(given.junit)}
    write_csv(given.csv, list(row), [list(row.values())])
    print(of_tests(row))


if __name__ == "__main__":
    main()
