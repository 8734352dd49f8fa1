"""Domains in object storage: a local server, through a proxy that counts requests, drops and delays them."""

import collections
import http.client
import http.server
import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from seqarch import cli
from seqarch.data import cache, remote, verified
from seqarch.data.datamodule import TextDataModule
from seqarch.data.prepare import Preparation, prepare
from seqarch.data.shards import open_domain
from seqarch.data.show import check, show
from seqarch.errors import UserError
from seqarch.experiment.evaluate import evaluate_checkpoint
from tests import processes
from tests.conftest import MODEL, TINY, flags, wait_for
from tests.data.conftest import WORDS, make_texts, write_jsonl

pytest.importorskip("moto")
pytest.importorskip("flask_cors")

pytestmark = pytest.mark.commands

URL = "s3://bucket/shards"
T = 32
PER_SHARD = 12


class Proxy(http.server.BaseHTTPRequestHandler):
    """Hands requests on to the server. `drops` of the shards it sends break off; each answer waits for `delay`."""

    server: Any
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        if self.command == "GET":
            self.server.fetched[name] += 1
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection(*self.server.target)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        time.sleep(self.server.delay)
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(key, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.server.drops and self.command == "GET" and name.startswith("chunk"):
            self.server.drops -= 1
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def moto() -> Iterator[tuple[str, int]]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def storage(moto: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The proxy. Its bucket holds `web` and `far`, and this machine has read nothing of either."""
    proxy: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.target, proxy.fetched, proxy.drops, proxy.delay = moto, collections.Counter(), 0, 0.0
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "the-key-of-a-user",
        "AWS_SECRET_ACCESS_KEY": "the-secret-of-a-user",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "_clients", {})
    monkeypatch.setattr("seqarch.data.assemble.CHUNK_TOKENS", PER_SHARD * (T + 1))
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "preparing"))
    monkeypatch.setattr(verified, "memory_folder", lambda: verified.cache_folder() / "verified")
    remote._client().create_bucket(Bucket="bucket")
    for seed, domain in enumerate(("web", "far")):
        file = write_jsonl(tmp_path / f"{domain}.jsonl", make_texts(50, seed))
        for root in (URL, tmp_path / "local"):
            prepare([file], root, domain, "byte", holdout=0.2, workers=1)
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "cache"))
    proxy.fetched.clear()
    yield proxy
    proxy.shutdown()
    proxy.server_close()


def data(root: str | Path, **options: Any) -> TextDataModule:
    defaults: dict[str, Any] = {
        "train": {"web": 1.0},
        "ood": ["far"],
        "sequence_length": T,
        "sequences_per_step": 6,
        "eval_tokens": 10 * T,
        "shuffle_window": 2,
    }
    module = TextDataModule(str(root), **{**defaults, **options})
    module.setup("fit")
    return module


def batches(module: TextDataModule) -> list[tuple[list, list]]:
    return [(batch["tokens"].tolist(), batch["sample"].tolist()) for batch in module.train_dataloader()]


def remove(prefix: str) -> None:
    for each in remote._client().list_objects_v2(Bucket="bucket", Prefix=prefix)["Contents"]:
        remote._client().delete_object(Bucket="bucket", Key=each["Key"])


def shards_on_disk(root: Path) -> list[Path]:
    return [path for path in root.rglob("chunk-*.bin") if path.parent.name == "train"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_and_hold_outs_are_those_of_local_files(storage: Any, tmp_path: Path, num_workers: int) -> None:
    """Each shard is fetched once per pass, ahead of use. A pass leaves at most three windows on disk."""
    local, there = data(tmp_path / "local"), data(URL, num_workers=num_workers)
    assert batches(there) == batches(local)
    n_shards = len(shards_on_disk(tmp_path / "local" / "web"))
    assert n_shards > 12
    fetched = {name: n for name, n in storage.fetched.items() if name.startswith("chunk")}
    assert fetched.keys() == {path.name for path in shards_on_disk(tmp_path / "local" / "web")}
    # the first window of the next pass is fetched by then
    assert sum(fetched.values()) <= n_shards + 2
    assert len(shards_on_disk(tmp_path / "cache")) <= 3 * 2
    for one, other in zip(there.evaluation_sets(), local.evaluation_sets(), strict=True):
        assert (one.domain, one.documents.tolist()) == (other.domain, other.documents.tolist())
        assert one.tokens.tolist() == other.tokens.tolist()
    storage.fetched.clear()
    assert [len(each.tokens) for each in data(URL).evaluation_sets()] == [10, 10]
    assert not any(name.startswith("chunk") for name in storage.fetched)
    description = there.describe(next(iter(local.train_dataloader()))["sample"])
    assert description == local.describe(next(iter(local.train_dataloader()))["sample"])


def test_the_next_window_is_fetched_before_it_is_read(storage: Any) -> None:
    loader = iter(data(URL).train_dataloader())
    next(loader)
    wait_for(lambda: sum(name.startswith("chunk") for name in storage.fetched) == 4)
    assert sum(n for name, n in storage.fetched.items() if name.startswith("chunk")) == 4


def test_a_dropped_and_a_slow_connection(storage: Any, tmp_path: Path) -> None:
    storage.drops, storage.delay = 3, 0.05
    assert batches(data(URL)) == batches(data(tmp_path / "local"))
    assert storage.drops == 0
    assert max(storage.fetched.values()) > 1


def test_a_connection_that_never_comes(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(remote, "_clients", {})
    monkeypatch.setitem(remote._OPTIONS, "retries", {"max_attempts": 1})
    with pytest.raises(
        UserError, match=r"s3://bucket/shards/web/manifest.json cannot be read \(EndpointConnectionError"
    ):
        data(URL)


def test_a_damaged_shard(storage: Any, tmp_path: Path) -> None:
    client, key = remote._client(), "shards/web/train/chunk-0-3.bin"
    body = client.get_object(Bucket="bucket", Key=key)["Body"].read()
    client.put_object(Bucket="bucket", Key=key, Body=body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(UserError, match=r"s3://bucket/shards/web/train/chunk-0-3.bin is damaged"):
        batches(data(URL))
    with pytest.raises(UserError, match=r"chunk-0-3.bin is damaged"):
        check(URL)
    client.delete_object(Bucket="bucket", Key=key)
    with pytest.raises(UserError, match=r"s3://bucket/shards/web/train/chunk-0-3.bin is missing"):
        batches(data(URL))
    with pytest.raises(UserError, match=r"or remove s3://bucket/shards/web and prepare the domain again"):
        check(URL)
    remove("shards/web/")
    prepare([tmp_path / "web.jsonl"], URL, "web", "byte", holdout=0.2, workers=1)
    check(URL)


def test_the_cache_is_bounded(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = max(path.stat().st_size for path in shards_on_disk(tmp_path / "local" / "web"))
    with pytest.raises(
        UserError, match=r"data.cache_gb must be at least .*, which holds 3 of data.shuffle_window, not"
    ):
        data(URL, cache_gb=5 * size / 1e9).train_dataloader()
    for gigabytes in (-1.0, math.nan):
        with pytest.raises(UserError, match=f"data.cache_gb must be at least .*, not {gigabytes:g}"):
            data(URL, cache_gb=gigabytes).train_dataloader()
    with pytest.raises(UserError, match=r"data.cache_gb is for shards in object storage, and these lie on a disk"):
        data(str(tmp_path / "local"), cache_gb=8.5 * size / 1e9).train_dataloader()
    most = []
    fetch = cache._read_ahead

    def watched(*args: Any) -> None:
        fetch(*args)
        most.append(sum(path.stat().st_size for path in shards_on_disk(tmp_path / "cache")))

    monkeypatch.setattr(cache, "_read_ahead", watched)
    batches(data(URL, cache_gb=8.5 * size / 1e9))
    assert max(most) <= 8.5 * size


def test_show_check_and_prepare_again(storage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(URL).partition("\n\n")[0] == show(tmp_path / "local").partition("\n\n")[0]
    assert check(URL) == check(tmp_path / "local")
    assert not shards_on_disk(tmp_path / "cache")
    prepare([tmp_path / "web.jsonl"], URL, "web", "byte", holdout=0.2)
    assert "prepared already" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"unknown domain in s3://bucket/shards 'wbe': did you mean web"):
        open_domain(remote.mirror(URL), "wbe")


def test_a_tokenizer_and_added_documents_lie_there_too(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["</s>", "<unk>", *WORDS])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "words.json"))
    options: Any = {"tokenizer": str(tmp_path / "words.json"), "eos_token": "</s>", "holdout": 0.2, "workers": 1}
    for root in (URL, tmp_path / "local"):
        Preparation([tmp_path / "web.jsonl", tmp_path / "far.jsonl"], root, "words", **options).run()
        more = write_jsonl(tmp_path / "more.jsonl", make_texts(50, 7))
        Preparation([more], root, "words", append=True, workers=1).run()
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "elsewhere"))
    there, here = open_domain(remote.mirror(URL), "words"), open_domain(tmp_path / "local", "words")
    assert there.manifest == here.manifest
    assert there.tokenizer.encode("chunk") == here.tokenizer.encode("chunk") == [words["chunk"]]
    ours, theirs = here.sequences("train", T), there.sequences("train", T)
    assert all(map(torch.equal, ours, theirs))
    there.check("train")


def test_documents_are_added_from_a_machine_that_prepared_another_hold_out(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, web = "s3://bucket/other", tmp_path / "web.jsonl"
    prepare([web], url, "web", "byte", holdout=0.2, workers=1)
    check(url)
    remove("other/web/")
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "elsewhere"))
    prepare([web], url, "web", "byte", holdout=0.3, workers=1)
    with pytest.raises(UserError, match=r"^s3://bucket/other/web was prepared from other inputs"):
        prepare([web], url, "web", "byte", holdout=0.2)
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "cache"))
    more = write_jsonl(tmp_path / "more.jsonl", make_texts(50, 7))
    with pytest.raises(UserError, match=r"web.jsonl is in s3://bucket/other/web already"):
        Preparation([web, more], url, "web", append=True, workers=1).run()
    Preparation([more], url, "web", append=True, workers=1).run()
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "third"))
    assert "web, holdout" in check(url)
    listed = remote._client().list_objects_v2(Bucket="bucket", Prefix="other/")["Contents"]
    assert not [each["Key"] for each in listed if "/." in each["Key"]]


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/shards", "s3://bucket/shards?token=secret", "https://x/y"])
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="is not a URL of object storage: give s3://bucket/folder") as error:
        data(url)
    assert "secret" not in str(error.value)


def test_a_killed_run_goes_on_and_keeps_the_credentials_to_itself(storage: Any, tmp_path: Path) -> None:
    folders = {"remote": URL, "local": str(tmp_path / "local")}
    found = {}
    for name, root in folders.items():
        options = {
            **TINY,
            **MODEL,
            "data.root": root,
            "data.train": "{web: 1.0}",
            "data.ood": "[far]",
            "data.sequence_length": T,
            "data.shuffle_window": 2,
            "data.num_workers": 2,
            "run_dir": tmp_path / "runs" / name,
            "trainer.max_steps": 8,
            "trainer.callbacks": "[tests.training.interrupt.Interrupt]",
        }
        args = [*flags(**options), "--allow_code=tests"]
        if name == "remote":
            killed = processes.fit(args, tmp_path / "logs", {"INTERRUPT_STEP": "5", "INTERRUPT_SIGNAL": "SIGKILL"})
            assert killed.returncode == -9
        done = processes.fit(args, tmp_path / "logs")
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "runs" / name / "curves.csv").read_text().splitlines()
        measured = lines[0].split(",").index("throughput/tokens_per_second")
        found[name] = [[cell for i, cell in enumerate(line.split(",")) if i != measured] for line in lines]
    assert found["remote"] == found["local"]
    results = [evaluate_checkpoint(tmp_path / "runs" / name, "LossByDomain")[0] for name in folders]
    assert results[0].metrics == results[1].metrics
    for path in (path for folder in ("runs", "cache", "logs") for path in (tmp_path / folder).rglob("*")):
        if path.is_file():
            assert b"of-a-user" not in path.read_bytes(), path


def test_the_command_line_takes_urls(storage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_jsonl(tmp_path / "more.jsonl", make_texts(20, 5))
    cli.main(
        ["data", "prepare", str(file), "--out", URL, "--domain", "more", "--tokenizer", "byte", "--holdout", "0.3"]
    )
    cli.main(["data", "show", URL])
    assert "more" in capsys.readouterr().out
    assert not Path("s3:").exists()
