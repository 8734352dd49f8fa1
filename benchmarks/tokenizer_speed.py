"""Tokens per second of `seqarch data prepare` with a tokenizer.json, next to the package tokenizers, on one core.

python -m benchmarks.tokenizer_speed --megabytes 10
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from seqarch.data.corpus import find_root
from seqarch.data.prepare import prepare


def trained(texts: list[str], entries: int) -> Tokenizer:
    """A byte-level BPE of these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=entries, special_tokens=["<|endoftext|>"]))
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10, help="text of the embedded corpus")
    parser.add_argument("--entries", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    lines, size = [], 0.0
    with (find_root("embedded") / "texts/docs.jsonl").open(encoding="utf-8") as file:
        while size < 1e6 * options.megabytes and (line := file.readline()):
            lines.append(line)
            size += len(line.encode())
    texts = [json.loads(line)["text"] for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        text, path = Path(folder, "texts.jsonl"), Path(folder, "tokenizer.json")
        text.write_text("".join(lines), encoding="utf-8")
        library = trained(texts, options.entries)
        library.save(str(path))
        for repeat in range(options.repeats):
            start = time.process_time()
            alone = sum(len(each.ids) for each in library.encode_batch_fast(texts, add_special_tokens=False))
            middle = time.process_time()
            manifest = prepare(
                [text], Path(folder, f"out-{repeat}"), "docs", str(path), eos_token="<|endoftext|>", workers=1
            )
            end = time.process_time()
            ours = sum(split.tokens - split.documents for split in manifest.splits.values())
            assert ours == alone
            print(
                f"{alone:,} tokens, in millions per second of CPU time: tokenizers "
                f"{1e-6 * alone / (middle - start):.3f}, seqarch data prepare {1e-6 * alone / (end - middle):.3f}"
            )


if __name__ == "__main__":
    main()
