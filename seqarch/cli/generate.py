"""`seqarch generate`: text from a checkpoint, for one prompt or many."""

import json
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from seqarch.arguments import Count
from seqarch.errors import UserError, say
from seqarch.plugins import ALLOW_CODE, FLAG
from seqarch.runs.files import check_file, parse_json, read_text


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, help="a checkpoint, or a run folder: its newest")
    parser.add_argument("--prompt", type=str | None, help="text to continue")
    parser.add_argument(
        "--prompts",
        type=Path | None,
        help="file of prompts, one per line, or of JSON lines (.jsonl) with a field prompt; prints JSON lines",
    )
    parser.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)
    parser.add_argument("--max_new_tokens", type=Count, default=200, help="how many tokens to draw")
    parser.add_argument("--temperature", type=float, default=0.8, help="divides the logits; 0: the most likely token")
    parser.add_argument("--top_k", type=Count | None, help="draw among the k most likely tokens")
    parser.add_argument("--top_p", type=float | None, help="draw among the top of this probability")
    parser.add_argument("--stop", action="append", default=[], help="text before which to stop; may be repeated")
    parser.add_argument("--seed", type=int | None, help="seed of the draw; 0 if not given")
    parser.add_argument("--prefill_chunk", type=Count, default=8192, help="tokens of a prompt that one pass reads")
    many = parser.add_argument_group("with --prompts")
    many.add_argument("--batch_size", type=Count | None, help="prompts at once; by default all")
    parser.add_argument("--compiled", action="store_true", help="compile passes and steps: slow to start, then faster")


def run(args: Namespace) -> None:
    from seqarch.experiment.load import generate_text, generate_texts, load
    from seqarch.model import with_bf16_weights

    options = dict(vars(args))
    prompt, file = options.pop("prompt"), options.pop("prompts")
    if (prompt is None) == (file is None):
        raise UserError("give --prompt with a text, or --prompts with a file of texts")
    prompts = None if file is None else read_prompts(file)
    lm, tokenizer = load(options.pop("checkpoint"), options.pop("allow_code"))
    if lm.embedding.weight.is_cuda:
        with_bf16_weights(lm)
    if prompts is None:
        for piece in generate_text(lm, tokenizer, prompt, **options):
            print(piece, end="", flush=True)  # noqa: T201 - what the model writes stays as it is
        say("")
        return
    texts = [""] * len(prompts)
    for row, piece in generate_texts(lm, tokenizer, prompts, **options):
        if piece is None:
            found = {"index": row, "prompt": prompts[row], "text": texts[row]}
            print(json.dumps(found, ensure_ascii=False), flush=True)  # noqa: T201
        else:
            texts[row] += piece


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file: its lines or, where its name ends in .jsonl, the field `prompt` of each line.

    Raises:
        UserError: there is no such file, it is not UTF-8, a line is not as it should be, or there is none.
    """
    check_file(file)
    lines = read_text(file).removeprefix("\ufeff").removesuffix("\n").split("\n")
    if file.suffix == ".jsonl":
        lines = [line and _prompt_of(file, number, line) for number, line in enumerate(lines, 1)]
    if "" in lines:
        raise UserError(f"--prompts {file}: line {lines.index('') + 1} is empty: give a prompt on every line")
    return lines


def _prompt_of(file: Path, number: int, line: str) -> str:
    row = parse_json(line, file, number)
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise UserError(f'--prompts {file}: line {number} must be an object with a text, such as {{"prompt": "Once"}}')
    return prompt
