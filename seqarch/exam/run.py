"""An exam from beginning to end: check every model, train, judge, print the verdicts."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from seqarch.data.corpus import find_root
from seqarch.data.datamodule import TextDataModule
from seqarch.data.files import READ
from seqarch.data.manifest import SPLITS
from seqarch.data.prepare import prepare
from seqarch.data.shards import MANIFEST, open_domain
from seqarch.data.tokenizers import ByteTokenizer, MixtralTokenizer
from seqarch.errors import UserError, absent, say
from seqarch.exam.derive import Recipe, Size, find_models, load_size, measure
from seqarch.exam.plan import Entrant, Exam, code_digest
from seqarch.exam.pool import Pool, share_gpus
from seqarch.exam.request import LIMITS, Request
from seqarch.exam.train import check_all_finished, train
from seqarch.exam.verdict import compared, judge, verdict_text
from seqarch.report import Comparison
from seqarch.runs.files import check_folder

HOLDOUT = {"train": 0.02, "ood": 0.5}
"""Share of the documents in the hold-out; only the hold-out of an OOD domain is used."""


def run_exam(request: Request) -> None:
    """Make the exam and print the verdicts.

    Raises:
        UserError: what is wrong, before anything is trained; or which runs failed, after the others are judged.
    """
    exam = make_plan(request)
    gpus = share_gpus(exam.reference.recipe["trainer"], request.workers, len(exam.entrants) * exam.seeds)
    for entrant in exam.entrants:
        share = "no known decoding state" if (part := entrant.state_share) is None else f"state {part:.1%} of the cache"
        say(f"{entrant.name}: {entrant.parameters:,} parameters, {share}")
    with Pool(gpus) as pool:
        exam, failed = train(exam, pool)
    findings = compared(exam)
    for verdict in [judge(exam, candidate, failed, findings) for candidate in exam.candidates]:
        figures = ", index.html, scatter.png" if verdict.conclusion else ""
        say(f"\n{verdict_text(verdict)}\n\nwrote {verdict.folder}/verdict.md, verdict.json{figures}")
    if findings is not None and len(findings.groups) > 2:
        names = [entrant.name for entrant in exam.entrants]
        page, *_ = Comparison(findings.only(names)).write(exam.folder / "report")
        say(f"\nall models together: {page}")
    check_all_finished(failed)


def make_plan(request: Request) -> Exam:
    """The exam that a user asks for, with every model built once without memory and every domain opened.

    Raises:
        UserError: what is wrong in a name, an option, a recipe or the data.
    """
    size = load_size(request.size, request.options, request.length)
    if request.options or request.length:
        # models are derived from numbers that it gives
        measure(f"size {request.size}", size.recipe, request.allow_code)
    models = find_models(size, request)
    return plan_of(request, size, models)


def plan_of(request: Request, size: Size, models: Sequence[tuple[str, Recipe]]) -> Exam:
    """The exam of some models at a size, the reference first. Their recipes get the folder and window of the data.

    Raises:
        UserError: what is wrong in a recipe or the data.
    """
    ladder = _has_ladder(request, size)
    measured = {name: measure(name, recipe, request.allow_code) for name, recipe in models}
    opened, sums = _open_data(request, size, measured[models[0][0]].data)
    entrants = []
    for name, recipe in models:
        recipe["data"] = {**recipe["data"], **opened}
        facts = measured[name]
        share = facts.state and facts.state / size.cache
        entrants.append(Entrant(name, recipe, facts.parameters, code_digest(facts.packages), share))
    return Exam(
        folder=Path(request.out) / (request.size if request.length is None else f"{request.size}-{request.length}"),
        size=request.size,
        reference=dataclasses.replace(entrants[0], remembered=True),
        candidates=entrants[1:],
        seeds=request.seeds,
        checksums=sums,
        allow_code=tuple(request.allow_code),
        ladder=ladder,
    )


def _has_ladder(request: Request, size: Size) -> bool:
    budgets = (size.recipe.get("branches") or {}).get("at")
    ladder = bool(budgets) and request.size not in LIMITS if request.ladder is None else request.ladder
    if ladder and not budgets:
        raise UserError("--ladder needs branches: set --branches.at '[0.125, 0.25, 0.5]' --model.decay_share 0.2")
    return ladder


def _open_data(request: Request, size: Size, data: TextDataModule) -> tuple[Recipe, dict[str, str]]:
    """The options of the shards, which text files become first: folder and window. And the checksums of the domains."""
    train, ood = list(size.recipe["data"]["train"]), list(size.recipe["data"]["ood"])
    if len(train) == 1 and not ood:
        raise UserError(f"only {train[0]} leaves nothing to compare: name more with --data.ood or --data.train")
    if request.data is not None:
        few = size.model["vocab_size"] < MixtralTokenizer.vocab_size
        tokenizer = ByteTokenizer.name if few else MixtralTokenizer.name
        data.root = str(find_shards(Path(request.data), train, ood, tokenizer, Path(request.out) / "shards"))
    data.prepare_data()
    data.setup("fit")
    data.evaluation_sets()
    data.tokenizer.check_fits(size.model["vocab_size"])
    if request.length is not None:
        _say_long(data.root, [*train, *ood], request.length)
    return {"root": data.root, **({"shuffle_window": data.window} if data.window else {})}, data.checksums()


def _say_long(root: str, names: Sequence[str], length: int) -> None:
    """Print how many documents of each domain fill a sequence."""
    for name in names:
        domain = open_domain(find_root(root), name)
        found = {split: domain.rows(split)[:, 2] >= length for split in SPLITS}
        counts = ", ".join(f"{long.sum():,} of {len(long):,} ({split})" for split, long in found.items())
        say(f"{name}: documents of at least {length:,} tokens: {counts}")


def find_shards(folder: Path, train: Sequence[str], ood: Sequence[str], tokenizer: str, prepared: Path) -> Path:
    """The folder with all domains prepared: `folder` itself, or `prepared`, made of text files in `folder`.

    A domain's text is in files with its name: `web.jsonl.zst`, or `web-0.parquet` and `web-1.parquet`.

    Args:
        folder: shards or text files.
        train: the training domains.
        ood: the OOD domains.
        tokenizer: what text files are prepared with.
        prepared: where their shards go.

    Raises:
        UserError: there is no such folder, a domain is neither there as shards nor as text, or `prepared` holds shards
            of other text or of another tokenizer.
    """
    if not folder.is_dir():
        raise absent("folder", folder, "--data names one")
    names, known = [*train, *ood], sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    if {*names} <= {*known}:
        return folder
    files = {name: text_files(folder, name, names) for name in names}
    if missing := [name for name in names if not files[name]]:
        lacks = f"neither shards nor text of {', '.join(missing)} (such as {missing[0]}.jsonl.zst)"
        there = f"its prepared domains are {', '.join(known) or 'none'}"
        raise UserError(f"--data {folder} has {lacks}; {there}: name others with --data.train and --data.ood")
    check_folder(prepared, prepared.parent)
    for name in names:
        if not (prepared / name).exists():
            say(f"preparing {name} from {', '.join(path.name for path in files[name])} into {prepared}")
        prepare(files[name], prepared, name, tokenizer, holdout=HOLDOUT["train" if name in train else "ood"])
    return prepared


def text_files(folder: Path, domain: str, domains: Sequence[str]) -> list[Path]:
    """The files of a domain's text, sorted. A file belongs to the longest of the names in `domains` that fit it."""

    def domain_of(path: Path) -> str:
        fitting = (each for each in domains if path.name.startswith((f"{each}.", f"{each}-")))
        return max(fitting, key=len, default="")

    return sorted(each for each in folder.iterdir() if each.name.endswith(READ) and domain_of(each) == domain)
