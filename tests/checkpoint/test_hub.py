"""Hub access against a server on localhost: good, slow, truncating, refusing, ignoring ranges."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hadron.checkpoint.facts import read_facts
from hadron.checkpoint.fetch import Fetcher
from hadron.checkpoint.hub import Hub, parse_hub_id
from hadron.errors import CheckpointError, ConfigError, HubError
from hostile.build import GOOD_CONFIG, checkpoint, entry, good_shard, index, shard
from hostile.server import COMMIT, REPO, Handler, HubServer

ROWS = 500_000
S1, S2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A two-shard checkpoint with a megabyte of data in each."""
    big = {"a.weight": entry("BF16", [ROWS], 0, 2 * ROWS)}
    folder = checkpoint(
        tmp_path / "served",
        **{
            S1.replace(".", "__"): shard(json.dumps(big).encode(), bytes(2 * ROWS)),
            S2.replace(".", "__"): good_shard("b.weight"),
            "model__safetensors__index__json": index(a__weight=S1, b__weight=S2),
            "generation_config__json": b'{"temperature": 0.5}',
            "logo__png": b"png",
        },
    )
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(good_shard("c.weight"))
    return folder


@pytest.fixture
def server(served: Path) -> Iterator[HubServer]:
    hub = HubServer(served)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join()


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(server.url, tmp_path / "cache", Fetcher(token=False, timeout=2.0, retries=2, backoff=0.01))


def test_headers_come_by_ranges(hub: Hub, server: HubServer) -> None:
    events: list[tuple[str, int, int]] = []
    facts = read_facts(REPO, hub=hub, progress=lambda *event: events.append(event))
    assert facts.problems == []
    assert facts.model == REPO
    assert facts.root is None
    assert {name: (t.dtype, t.shape) for name, t in facts.tensors.items()} == {
        "a.weight": ("BF16", (ROWS,)),
        "b.weight": ("F32", (2,)),
    }
    assert [(one.name, one.path, one.mtime_ns) for one in facts.shards] == [(S1, None, 0), (S2, None, 0)]
    assert facts.shards[0].size == (server.folder / S1).stat().st_size
    assert facts.generation_config == {"temperature": 0.5}
    assert server.ranges(S1) == ["bytes=0-262143"]
    assert server.sent < 300_000, "a quarter of a shard of a megabyte, not the shard"
    assert ("headers", 2, 2) in events
    assert not hub.cache_dir.exists(), "nothing is written"


def test_long_headers_take_a_second_request(hub: Hub, server: HubServer) -> None:
    names = [f"layers.{i}.a.long.name.of.a.tensor.weight" for i in range(5000)]
    (server.folder / S2).write_bytes(good_shard("b.weight", *names))
    facts = read_facts(REPO, hub=hub)
    first, second = server.ranges(S2)
    assert first == "bytes=0-262143"
    assert second is not None
    assert second.startswith("bytes=262144-")
    assert [problem.code for problem in facts.problems] == ["HC107"]
    assert len(facts.problems[0].tensors) == 5000


def test_faults_in_remote_headers_are_problems(hub: Hub, server: HubServer) -> None:
    (server.folder / S2).write_bytes(good_shard("b.weight")[:-3])
    facts = read_facts(REPO, hub=hub)
    assert [problem.code for problem in facts.problems] == ["HC105"]
    assert f"{S2} is truncated" in facts.problems[0].message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "a file of 0 bytes"),
        ((2**40).to_bytes(8, "little") + bytes(100), f"{2**40} bytes"),
        (b"version https://git-lfs", "a Git LFS pointer"),
    ],
)
def test_remote_file_that_is_no_shard(content: bytes, says: str, hub: Hub, server: HubServer) -> None:
    (server.folder / S2).write_bytes(content)
    facts = read_facts(REPO, hub=hub)
    assert [problem.code for problem in facts.problems] == ["HC101"]
    assert says in facts.problems[0].message
    assert len(server.ranges(S2)) == 1, "a header over 100 MB is refused before it is fetched"


def test_shard_that_the_repository_lacks(hub: Hub, server: HubServer) -> None:
    (server.folder / S2).unlink()
    facts = read_facts(REPO, hub=hub)
    assert [problem.code for problem in facts.problems] == ["HC106"]
    assert f"names {S2}, which is not there" in facts.problems[0].message


def test_revision(hub: Hub, server: HubServer) -> None:
    assert read_facts(f"{REPO}@v1/x", hub=hub).problems == []
    assert server.requests[0][1] == f"/api/models/{REPO}/revision/v1/x"
    assert f"/{REPO}/resolve/{COMMIT}/config.json" in {path for _, path, _ in server.requests}
    with pytest.raises(HubError, match="HTTP status 404"):
        read_facts(f"{REPO}@no-such", hub=hub)


def test_local_folder_wins(hub: Hub, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / REPO, model__safetensors=good_shard("local"))
    monkeypatch.chdir(tmp_path)
    assert list(read_facts(REPO, hub=hub).tensors) == ["local"]
    assert server.requests == []


@pytest.mark.parametrize(
    ("model", "parsed"),
    [
        ("zai-org/GLM-5.2", ("zai-org/GLM-5.2", "main")),
        ("amd/x_y.z@refs/pr/1", ("amd/x_y.z", "refs/pr/1")),
        ("a/b@" + COMMIT, ("a/b", COMMIT)),
    ],
)
def test_hub_ids(model: str, parsed: tuple[str, str]) -> None:
    assert parse_hub_id(model) == parsed


@pytest.mark.parametrize(
    "model", ["a", "a/b/c", "./a", "/a", "a/b@", "a//b", "a/../b", "a/b c", "é/b", "a/" + "b" * 200]
)
def test_what_is_no_hub_id(model: str) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        parse_hub_id(model)


def test_token_is_sent(hub: Hub, server: HubServer, tmp_path: Path) -> None:
    read_facts(REPO, hub=Hub(server.url, tmp_path / "cache", Fetcher(token="hf_abc")))
    assert server.tokens == {"Bearer hf_abc"}


def test_endpoint_of_the_environment(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
    assert Hub().url == server.url
    assert read_facts(REPO, hub=Hub(cache_dir=tmp_path)).problems == []


def refuses(server: HubServer, hub: Hub, part: str, misbehave: object) -> CheckpointError:
    """The error when every request for a path with `part` in it is answered by `misbehave`."""

    def some(handler: Handler, path: str, times: int) -> bool:
        if part not in path:
            return False
        return misbehave(handler, path, times) is not False  # type: ignore[operator]

    server.misbehave = some
    with pytest.raises(CheckpointError) as caught:
        read_facts(REPO, hub=hub)
    for words in ("where:", "found:", "accepted:", "try:"):
        assert words in str(caught.value)
    return caught.value


@pytest.mark.parametrize("part", ["/api/models/", "/config.json", S1])
@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "hf auth login"), (403, "licence"), (404, "check"), (429, "wait"), (500, "try again later"), (503, "later")],
)
def test_refusals(part: str, status: int, hint: str, server: HubServer, hub: Hub) -> None:
    error = refuses(server, hub, part, lambda handler, path, times: handler.answer(status, b"no"))
    if (part, status) == ("/config.json", 404):
        assert isinstance(error, ConfigError)
        assert "no such file" in error.found
        return
    assert isinstance(error, HubError)
    assert f"HTTP status {status}" in error.found
    assert hint in error.hint
    if part != "/api/models/":
        assert f"{REPO}/{part.strip('/')}" in error.where
    if status in (429, 500, 503):
        assert "3 times" in error.found
        assert sum(part in path for _, path, _ in server.requests) == 3


def test_gated_repository_names_the_reason(server: HubServer, hub: Hub) -> None:
    error = refuses(
        server, hub, "/api/", lambda handler, path, times: handler.answer(403, b"", {"X-Error-Code": "GatedRepo"})
    )
    assert "HTTP status 403 (GatedRepo)" in error.found


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_recovers_from_passing_trouble(status: int, server: HubServer, hub: Hub) -> None:
    def twice(handler: Handler, path: str, times: int) -> bool:
        if times < 2:
            handler.answer(status, b"", {"Retry-After": "0"})
        return times < 2

    server.misbehave = twice
    assert read_facts(REPO, hub=hub).problems == []


def test_recovers_from_a_cut_answer(server: HubServer, hub: Hub) -> None:
    def once(handler: Handler, path: str, times: int) -> bool:
        if S1 not in path or times:
            return False
        handler.answer(206, bytes(262144), {"Content-Range": f"bytes 0-262143/{2 * ROWS + 100}"}, cut=1000)
        return True

    server.misbehave = once
    assert read_facts(REPO, hub=hub).problems == []
    assert len(server.ranges(S1)) == 2


def test_server_without_ranges(server: HubServer, hub: Hub) -> None:
    error = refuses(server, hub, S1, lambda handler, path, times: handler.answer(200, bytes(5_000_000)))
    assert "HTTP status 200: the server ignores byte ranges" in error.found
    assert "hf download" in error.hint
    assert server.ranges(S1) == ["bytes=0-262143"]


def test_server_that_cuts_every_answer(server: HubServer, hub: Hub) -> None:
    error = refuses(server, hub, "/config.json", lambda handler, path, times: handler.answer(200, GOOD_CONFIG, cut=10))
    assert "3 times" in error.found
    assert f"{REPO}/config.json" in error.where


def test_server_that_hangs_up(server: HubServer, hub: Hub) -> None:
    error = refuses(server, hub, S2, lambda handler, path, times: setattr(handler, "close_connection", True))
    assert "3 times" in error.found


def test_slow_server(server: HubServer, tmp_path: Path) -> None:
    fetcher = Fetcher(token=False, timeout=0.2, min_rate=1000, retries=1, backoff=0.01)
    hub = Hub(server.url, tmp_path / "cache", fetcher)
    error = refuses(
        server, hub, "/config.json", lambda handler, path, times: handler.answer(200, GOOD_CONFIG, pause=0.03)
    )
    assert "too slow to finish, 2 times" in error.found


def test_silent_server(server: HubServer, tmp_path: Path) -> None:
    silence = threading.Event()
    hub = Hub(server.url, tmp_path / "cache", Fetcher(token=False, timeout=0.2, retries=1, backoff=0.01))
    try:
        error = refuses(server, hub, S1, lambda handler, path, times: silence.wait(5))
    finally:
        silence.set()
    assert "Timeout" in error.found


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((206, {}), "with Content-Range ''"),
        ((206, {"Content-Range": "bytes 0-7/*"}), "'bytes 0-7/*'"),
        ((206, {"Content-Range": "bytes 8-15/1000"}), "other bytes (bytes 8-15/1000) than asked for"),
        ((206, {"Content-Range": "bytes 0-7/1000000"}), "other bytes"),
        ((416, {"Content-Range": "bytes */99"}), "HTTP status 416"),
        ((206, {"Content-Range": "bytes 0-3/4"}), "more bytes than the 4 asked for"),
    ],
)
def test_nonsense_ranges(answer: tuple[int, dict[str, str]], says: str, server: HubServer, hub: Hub) -> None:
    status, headers = answer
    error = refuses(server, hub, S1, lambda handler, path, times: handler.answer(status, bytes(8), headers))
    assert says in error.found


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"sha": 1, "siblings": []}', b'{"sha": "../x", "siblings": []}', b"<html>", b'{"sha": NaN}'],
)
def test_nonsense_description(body: bytes, server: HubServer, hub: Hub) -> None:
    error = refuses(server, hub, "/api/", lambda handler, path, times: handler.answer(200, body))
    assert "an answer that cannot be used" in error.found


def test_too_long_configuration(server: HubServer, hub: Hub) -> None:
    error = refuses(
        server, hub, "/config.json", lambda handler, path, times: handler.answer(200, b"{}" + b" " * (65 << 20))
    )
    assert "more than 67108864 bytes" in error.found


def test_no_server(tmp_path: Path) -> None:
    hub = Hub("http://127.0.0.1:9", tmp_path, Fetcher(token=False, timeout=0.5, retries=1, backoff=0.01))
    with pytest.raises(HubError) as caught:
        read_facts(REPO, hub=hub)
    assert "2 times" in caught.value.found
    assert "HF_ENDPOINT" in caught.value.hint


@pytest.mark.parametrize(
    "endpoint", ["nonsense", "ftp://x", "http://[::", "http://x:port", "http://x:0", "http://x\x01"]
)
def test_endpoint_that_is_no_address(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="HF_ENDPOINT"):
        read_facts(REPO, hub=Hub(endpoint, tmp_path, Fetcher(token=False, retries=0)))


def test_repository_without_weights(server: HubServer, hub: Hub) -> None:
    for name in (S1, S2):
        (server.folder / name).unlink()
    (server.folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        read_facts(REPO, hub=hub)


def snapshot(cache: Path, *names: str) -> Path:
    """A downloaded snapshot in huggingface_hub's layout, with some of the files."""
    root = cache / f"models--{REPO.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    folder = root / "snapshots" / COMMIT
    checkpoint(folder, **{"model__safetensors__index__json": index(**{"snap__weight": S1, "b__weight": S2})})
    for name in names:
        (folder / name).write_bytes(good_shard("snap.weight" if name == S1 else "b.weight"))
    return folder


def test_downloaded_snapshot_is_used(server: HubServer, hub: Hub) -> None:
    folder = snapshot(hub.cache_dir, S1, S2)
    facts = read_facts(REPO, hub=hub)
    assert facts.root == folder
    assert facts.model == REPO
    assert set(facts.tensors) == {"snap.weight", "b.weight"}
    assert hub.download(REPO) == folder
    assert server.requests == []


def test_partial_snapshot_is_not(server: HubServer, hub: Hub) -> None:
    snapshot(hub.cache_dir, S1)
    facts = read_facts(REPO, hub=hub)
    assert facts.root is None
    assert "a.weight" in facts.tensors


def test_snapshot_with_broken_links_is_not(hub: Hub) -> None:
    folder = snapshot(hub.cache_dir, S1, S2)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").symlink_to("gone")
    assert read_facts(REPO, hub=hub).root is None


def test_offline(server: HubServer, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set") as caught:
        read_facts(REPO, hub=hub)
    assert f"hf download {REPO}" in caught.value.hint
    snapshot(hub.cache_dir, S1)
    facts = read_facts(REPO, hub=hub)
    assert [problem.code for problem in facts.problems] == ["HC106"], "what is there is read, what is not is reported"
    assert server.requests == []


def test_download(server: HubServer, hub: Hub) -> None:
    events: list[tuple[str, int, int]] = []
    folder = hub.download(REPO, lambda *event: events.append(event))
    assert (folder / S1).read_bytes() == (server.folder / S1).read_bytes()
    assert not (folder / "logo.png").exists()
    assert events
    assert max(done for _, done, _ in events) == events[-1][2] > 2 * ROWS
    assert read_facts(REPO, hub=hub).root == folder


def test_download_resumes(server: HubServer, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)

    def cut_once(handler: Handler, path: str, times: int) -> bool:
        asked_before = len(server.ranges(S1))
        if handler.command != "GET" or S1 not in path or asked_before > 1:
            return False
        content = (server.folder / S1).read_bytes()
        handler.answer(200, content, {"ETag": f'"{hash(content):x}"', "X-Repo-Commit": COMMIT}, cut=ROWS)
        return True

    server.misbehave = cut_once
    assert (hub.download(REPO) / S1).read_bytes() == (server.folder / S1).read_bytes()
    assert server.ranges(S1)[1] == f"bytes={ROWS}-", "what came before the cut is kept"


def test_download_without_a_server(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="could not be downloaded") as caught:
        Hub("http://127.0.0.1:9", tmp_path, Fetcher(token=False)).download(REPO)
    assert "again to resume" in caught.value.hint


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_refused_download(status: int, server: HubServer, hub: Hub) -> None:
    server.misbehave = lambda handler, path, times: handler.answer(status, b"") is None
    with pytest.raises(HubError, match="could not be downloaded") as caught:
        hub.download(REPO)
    assert str(status) in caught.value.found
