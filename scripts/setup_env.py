"""Makes a virtual environment in which seqarch works, and prints what it does.

    python3 scripts/setup_env.py .venv
    python3 scripts/setup_env.py .venv parity         # also the extra `parity`
    python3 scripts/setup_env.py .venv --set lowest   # the lower bounds of pyproject.toml

Needs Python >= 3.11 with venv and pip, nothing else. With an NVIDIA GPU it installs the newest versions and the `gpu`
extra. Without a GPU it installs the tested versions, which `constraints.txt` lists.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECK = "import lightning, torch; print(torch.__version__)"


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  an older Python is just what this line is for
        sys.exit(f"setup: seqarch needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    folder, asked, versions = arguments()
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if output(python, "import pip") is None:
        make_environment(folder)
    gpu = shutil.which("nvidia-smi") is not None
    extras = ["test", *(["gpu"] if gpu else []), *asked]
    pins = constraints(versions or ("newest" if gpu else "tested"), extras)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "constraints.txt")
        file.write_text("\n".join(pins))
        if output(python, "import torch; print(torch.__version__)") is None:
            say(f"installing torch ({'NVIDIA GPU found' if gpu else 'no NVIDIA GPU found'})")
            pip(python, "torch", "-c", str(file))
        torch = output(python, "import torch; print(torch.__version__.split('+')[0])")
        say(f"installing seqarch and what it needs in addition to torch {torch}")
        others = [pin for pin in pins if not pin.startswith("torch==")]
        file.write_text("\n".join([*others, f"torch=={torch}"]))  # no dependency may exchange torch for another build
        pip(python, "-e", f"{ROOT}[{','.join(extras)}]", "-e", f"{ROOT}/plugins/seqarch-recall", "-c", str(file))
    version = output(python, CHECK)
    if version is None:
        subprocess.run([python, "-c", CHECK], check=False)
        sys.exit("setup: lightning and torch do not import together; the error stands above")
    say(f"ready: torch {version}, {'GPU' if gpu else 'CPU'}")


def project() -> dict:
    import tomllib  # Python 3.11 has it; `main` has told users of an older one

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def constraints(versions: str, extras: list[str]) -> list[str]:
    """What pip may install: the tested versions, the lower bounds of all direct dependencies, or anything."""
    if versions == "tested":
        return (ROOT / "constraints.txt").read_text().splitlines()
    if versions == "newest":
        return []
    optional = project()["optional-dependencies"]
    needed = [*project()["dependencies"], *(package for extra in extras for package in optional[extra])]
    demands = [package.partition(";")[0] for package in needed]  # without the condition, which may contain ==
    bounds: dict[str, str] = {}
    for package in [package for package in demands if "==" not in package]:
        name, bound = re.fullmatch(r"([\w-]+)(?:\[.*\])?>=([\d.]+).*", package).groups()  # pyright: ignore[reportOptionalMemberAccess]
        bounds[name] = max(bound, bounds.get(name, bound), key=lambda version: [*map(int, version.split("."))])
    if "gpu" in extras:
        del bounds["torch"]  # each torch demands one Triton, so the lowest Triton for GPUs says which torch
    return [f"{name}=={bound}" for name, bound in bounds.items()]


def arguments() -> tuple[Path, list[str], str | None]:
    """The folder of the environment, the extras that are asked for, and which versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".venv"), help=".venv if not given")
    known = sorted(project()["optional-dependencies"])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=", ".join(known))
    parser.add_argument("--set", choices=("tested", "newest", "lowest"), help="which versions")
    args = parser.parse_intermixed_args()
    if unknown := [each for each in args.extras if each not in known]:
        sys.exit(f"setup: there is no extra {unknown[0]!r}; the extras are {', '.join(known)}")
    return args.folder, args.extras, args.set


def make_environment(folder: Path) -> None:
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"setup: {folder} is not a virtual environment, and its files would be lost; name another folder")
    say(f"making a virtual environment in {folder}")
    try:
        venv.create(folder, with_pip=True, clear=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder)
        sys.exit("setup: this Python cannot make virtual environments with pip; on Debian: apt install python3-venv")


def pip(python: Path, *packages: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    if subprocess.run(command, check=False).returncode:
        what = next(package for package in packages if package != "-e")
        sys.exit(f"setup: pip could not install {what}")


def output(python: Path, code: str) -> str | None:
    """What the code prints, or `None` if it fails."""
    if not python.exists():
        return None
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    main()
