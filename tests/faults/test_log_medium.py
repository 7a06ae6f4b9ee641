"""What a log in a folder does about its medium: it flushes before it says so, and a full disk costs no epoch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.core.errors import DurabilityLost
from outlast.core.jit import Compiler
from outlast.core.log import REQUEST, Log, LogOwner, Manifest, verify

pytestmark = pytest.mark.faults

SEGMENT = 16384
MANIFEST = Manifest(model="m")


def row(key: int, payload: bytes = b"x") -> tuple[int, int, int, int, int, int, bytes]:
    return (REQUEST, 2, 1, key, 0, 0, payload)


def keys(owner: LogOwner) -> list[int]:
    return [r.key for r in Log.open(owner.spec(), MANIFEST).records()]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few segments."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={12 * SEGMENT}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system: {mounted.stderr.strip()} (mounting one needs privileges)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_costs_no_epoch_and_heals(small_disk: Path) -> None:
    owner = LogOwner.in_directory(small_disk / "log", 40 * SEGMENT, segment_bytes=SEGMENT)
    writer = Log.open(owner.spec(), MANIFEST).start(owner.fence(), MANIFEST)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(4 * SEGMENT))
    written = []
    with pytest.raises(DurabilityLost, match="allocate"):  # noqa: PT012  how many fit is what is counted
        for key in range(1000):
            writer.write([row(key, bytes(1000))])
            written.append(key)
    for _ in range(3):
        with pytest.raises(DurabilityLost):
            writer.write([row(5000, bytes(1000))])
    assert keys(owner) == written
    report = verify(small_disk / "log")
    assert (report["ok"], report["epochs"]) == (True, len(written))
    filler.unlink()
    for key in range(2000, 2020):
        writer.write([row(key, bytes(1000))])
    assert keys(owner) == [*written, *range(2000, 2020)]
    again = Log.open(owner.spec(), MANIFEST).start(owner.fence(), MANIFEST)
    again.write([row(3000)])
    assert keys(owner)[-1] == 3000
    del writer, again
    owner.close()


def test_an_append_to_an_allocated_segment_needs_no_disk(small_disk: Path) -> None:
    """A store into a mapped file that has no room would be SIGBUS, not an error."""
    owner = LogOwner.in_directory(small_disk / "log", 40 * SEGMENT, segment_bytes=SEGMENT)
    writer = Log.open(owner.spec(), MANIFEST).start(owner.fence(), MANIFEST)
    writer.write([row(0)])
    left = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(left.f_bavail * left.f_frsize))
    for key in range(1, 9):
        writer.write([row(key, bytes(1000))])
    assert keys(owner) == list(range(9))
    del writer
    owner.close()


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Records what is flushed, and fails a flush when the file named by SHIM_FAIL exists. */
static void note(const char *what, unsigned long from, unsigned long bytes) {
    FILE *f = fopen(getenv("SHIM_TRACE"), "a");
    fprintf(f, "%s %lx %lu\n", what, from, bytes);
    fclose(f);
}

static int fails(void) { return access(getenv("SHIM_FAIL"), F_OK) == 0; }

int msync(void *p, size_t n, int flags) {
    note(flags & MS_SYNC ? "msync" : "msync-async", (unsigned long)p, n);
    if (fails()) { errno = EIO; return -1; }
    return ((int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "msync"))(p, n, flags);
}

int fsync(int fd) {
    char link[64], path[256] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) > 0) {
        const char *name = strrchr(path, '/');
        note(name ? name + 1 : "?", 0, 0);
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""

CHILD = r"""
import os, sys
from pathlib import Path
from outlast.core.errors import DurabilityLost
from outlast.core.log import REQUEST, Log, LogOwner, Manifest

folder, durable, trace, fail = Path(sys.argv[1]), sys.argv[2] == "True", Path(sys.argv[3]), Path(sys.argv[4])
row = lambda key: (REQUEST, 2, 1, key, 0, 0, bytes(3000))
manifest = Manifest(model="m")

def flushed(act):
    trace.write_text("")
    act()
    return trace.read_text().splitlines()

owner = LogOwner.in_directory(folder, 8 * 16384, segment_bytes=16384, durable=durable)
print("create", flushed(lambda: None) or trace.read_text().splitlines())
print("fence", flushed(owner.fence))
writer = Log.open(owner.spec(), manifest).start(owner.writer_epoch, manifest)
print("first", flushed(lambda: writer.write([row(1)])))
address, _ = 0, 0
writer.native.begin(3000, 1)
address, handle = writer.native.reserve(*row(2)[:6], 3000)
writer.native.seal(handle)
print("staged", [hex(address)[2:]])
print("commit", flushed(writer.native.commit))
fail.write_text("")
try:
    writer.write([row(3)])
    print("lost", ["no"])
except DurabilityLost as error:
    print("lost", ["yes"])
fail.unlink()
print("next", flushed(lambda: writer.write([row(4)])))
print("keys", [r.key for r in Log.open(owner.spec(), manifest).records()])
writer.native.roll()
writer.write([row(5)])
print("release", flushed(lambda: writer.native.release_before(2)))
"""


@pytest.mark.parametrize("durable", [True, False])
def test_durable_commits_flush_before_they_return(compiler: Compiler, tmp_path: Path, durable: bool) -> None:
    (tmp_path / "shim.c").write_text(SHIM)
    build = [
        *compiler.command,
        "-x",
        "c",
        "-shared",
        "-fPIC",
        str(tmp_path / "shim.c"),
        "-o",
        str(tmp_path / "shim.so"),
    ]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    trace, fail = tmp_path / "trace", tmp_path / "fail"
    trace.write_text("")
    environment = {
        **os.environ, "LD_PRELOAD": str(tmp_path / "shim.so"), "SHIM_TRACE": str(trace), "SHIM_FAIL": str(fail),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    command = [sys.executable, "-c", CHILD, str(tmp_path / "log"), str(durable), str(trace), str(fail)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = {
        name: ast.literal_eval(rest) for name, _, rest in (line.partition(" ") for line in done.stdout.splitlines())
    }
    assert said["keys"] == ([1, 2, 4] if durable else [1, 2, 3, 4])
    if not durable:
        assert not any("msync" in line for name in ("first", "commit", "next", "release") for line in said[name])
        assert said["lost"] == ["no"]
        return
    assert [line.split()[0] for line in said["fence"]] == ["control"]
    first = [line.split()[0] for line in said["first"]]
    assert first[:2] == ["segment-0000000000000001.ologs", "log"]  # the new file, and the folder that names it
    assert first[2:] == ["msync", "msync"]  # superblock; epoch
    (flush,) = said["commit"]
    _, start, size = flush.split()
    staged = int(said["staged"][0], 16)
    assert int(start, 16) <= staged
    assert staged + 3000 + 128 <= int(start, 16) + int(size)  # the payload and COMMIT behind it
    assert int(start, 16) % 4096 == 0
    assert said["lost"] == ["yes"]
    assert [line.split()[0] for line in said["next"]] == ["msync"]
    assert [line.split()[0] for line in said["release"]] == ["msync"]  # the control page, before segments go
