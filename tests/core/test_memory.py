"""Shared memory regions."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.core import memory
from outlast.core.errors import CorruptState, NotPossibleHere, OutlastError, Refused, UsageError
from outlast.core.memory import Memory


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_anonymous_memory_is_zeroed_writable_and_seen_through_its_address() -> None:
    with Memory.anonymous(10_000) as region:
        assert region.kind == "anonymous"
        assert region.size == len(region.buffer) == 10_000
        assert bytes(region.buffer) == bytes(10_000)
        region.view(5, 3)[:] = b"abc"
        assert ctypes.string_at(region.address_of(5, 3), 3) == b"abc"


def test_memory_that_this_process_may_not_map_is_named() -> None:
    program = """
import resource
from outlast.core.errors import NotPossibleHere
from outlast.core.memory import Memory
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    Memory.anonymous(2 << 30, name="pool")
except NotPossibleHere as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cannot map 2147483648 bytes of memory (pool): Cannot allocate memory. Ask for less")


def test_another_process_sees_writes_through_the_descriptor() -> None:
    script = (
        "import sys; from outlast.core.memory import Memory\n"
        "m = Memory.from_fd(int(sys.argv[1]), size=4096); assert m.kind == 'anonymous' and m.sealed\n"
        "assert bytes(m.view(0, 5)) == b'hello'; m.view(100, 5)[:] = b'world'"
    )
    with Memory.anonymous(4096) as region:
        region.view(0, 5)[:] = b"hello"
        subprocess.run([sys.executable, "-c", script, str(region.fd)], pass_fds=[region.fd], check=True)
        assert bytes(region.view(100, 5)) == b"world"


def test_descriptor_does_not_leak_into_programs_unless_asked() -> None:
    with Memory.anonymous(4096) as region:
        assert not os.get_inheritable(region.fd)
        assert os.get_inheritable(region.inherit())
        assert not os.get_inheritable(region.inherit(False))


def test_a_peer_cannot_shrink_the_memory() -> None:
    with Memory.anonymous(8192) as region:
        assert region.sealed
        for size in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 4097), (4096, 1), (1, -1), (2**63, 1)])
def test_access_outside_is_refused(offset: int, length: int) -> None:
    with Memory.anonymous(4096) as region:
        with pytest.raises(UsageError, match=r"holds \[0, 4096\)"):
            region.view(offset, length)
        with pytest.raises(UsageError):
            region.address_of(offset, length)
        assert len(region.view(4096, 0)) == 0


def test_close_twice_releases_descriptor_and_map_and_refuses_further_use() -> None:
    before = open_descriptors()
    region = Memory.anonymous(1 << 20, name="close-test")
    assert "close-test" in Path("/proc/self/maps").read_text()
    region.close()
    region.close()
    assert region.closed
    assert open_descriptors() == before
    assert "close-test" not in Path("/proc/self/maps").read_text()
    for use in (lambda: region.fd, lambda: region.address, lambda: region.buffer, lambda: region.view(0, 1)):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_a_view_that_is_still_held_survives_close() -> None:
    region = Memory.anonymous(4096, name="held-view")
    view = region.view(0, 4)
    region.close()
    view[:] = b"safe"
    assert bytes(view) == b"safe"
    del view
    assert "held-view" not in Path("/proc/self/maps").read_text()


def test_file_memory_is_private_to_its_owner_and_persists(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with Memory.create(path, 12_345) as region:
        assert region.kind == "file"
        assert not region.sealed
        region.view(0, 3)[:] = b"abc"
    info = path.stat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_blocks * 512 >= 12_345  # space is reserved
    with Memory.open(path) as region:
        assert region.size == 12_345
        assert bytes(region.view(0, 3)) == b"abc"


def test_create_never_takes_over_an_existing_file_or_link(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="exists"):
        Memory.create(path, 4096)
    with pytest.raises(UsageError, match="exists"):
        Memory.create(tmp_path / "link", 4096)
    assert path.read_bytes() == b"mine"
    assert not (tmp_path / "elsewhere").exists()


def test_open_follows_no_link_and_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(bytes(100))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OutlastError, match="link"):
        Memory.open(tmp_path / "link")
    with pytest.raises(OutlastError, match="nowhere"):
        Memory.open(tmp_path / "nowhere")


def test_full_disk_is_an_error_at_creation_and_leaves_nothing(tmp_path: Path) -> None:
    before = open_descriptors()
    too_much = 1 << 50  # a pebibyte: past any file system this runs on
    with pytest.raises(Refused, match="cannot reserve"):
        Memory.create(tmp_path / "state", too_much)
    assert not (tmp_path / "state").exists()
    assert open_descriptors() == before


def test_full_file_system_is_found_at_creation_or_by_prefault(small_tmpfs: Path) -> None:
    with pytest.raises(Refused, match="cannot reserve"):
        Memory.create(small_tmpfs / "reserved", 4 << 20)
    with Memory.create(small_tmpfs / "sparse", 4 << 20, preallocate=False) as region, pytest.raises(Refused):
        region.prefault()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "outlast-test", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_prefault_brings_pages_in_and_keeps_contents() -> None:
    size = 1 << 20
    with Memory.anonymous(size) as region:
        region.view(5000, 4)[:] = b"keep"
        assert os.fstat(region.fd).st_blocks * 512 < size
        region.prefault()
        assert os.fstat(region.fd).st_blocks * 512 >= size
        assert bytes(region.view(5000, 4)) == b"keep"


def test_prefault_on_an_old_kernel_falls_back_to_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 99)  # EINVAL, as before Linux 5.14
    with Memory.anonymous(1 << 20) as region:
        region.prefault()
        assert os.fstat(region.fd).st_blocks * 512 >= region.size


def test_preallocated_anonymous_memory_has_its_pages() -> None:
    with Memory.anonymous(1 << 20, preallocate=True) as region:
        assert os.fstat(region.fd).st_blocks * 512 >= region.size


def test_huge_pages_are_given_or_the_error_names_the_setting() -> None:
    page = memory.huge_page_bytes()
    if int(Path("/proc/sys/vm/nr_hugepages").read_text()) < 2:
        with pytest.raises(NotPossibleHere, match=r"nr_hugepages is [01]"):
            Memory.hugetlb(page + 1)
        return
    with Memory.hugetlb(page + 1) as region:
        assert region.kind == "hugetlb"
        assert region.size == 2 * page
        region.view(page, 1)[:] = b"x"


def test_more_huge_pages_than_there_are_is_not_possible_here() -> None:
    before = open_descriptors()
    with pytest.raises(NotPossibleHere, match="nr_hugepages"):
        Memory.hugetlb(1 << 46)
    assert open_descriptors() == before


@pytest.mark.parametrize("size", [0, -1])
def test_empty_memory_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one byte"):
        Memory.anonymous(size)
    with pytest.raises(UsageError):
        Memory.create(tmp_path / "empty", size)
    assert not (tmp_path / "empty").exists()


def test_from_fd_refuses_what_is_too_small_or_no_memory_and_closes_it() -> None:
    before = open_descriptors()
    small = os.memfd_create("small")
    os.ftruncate(small, 100)
    with pytest.raises(CorruptState, match="too small"):
        Memory.from_fd(small, size=101)
    with pytest.raises(CorruptState):
        Memory.from_fd(os.memfd_create("empty"))
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(UsageError, match="neither"):
        Memory.from_fd(reader)
    assert open_descriptors() == before


def test_from_fd_maps_the_whole_object_or_the_part_asked_for() -> None:
    with Memory.anonymous(8192) as region:
        with Memory.from_fd(os.dup(region.fd)) as whole:
            assert whole.size == 8192
        with Memory.from_fd(os.dup(region.fd), size=100) as part:
            assert part.size == 100
