"""The control page: signs of life and the names of suspects reach the supervisor, also from a dead worker."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest

from outlast.core.errors import OutlastError
from outlast.serve.control import MAX_KEYS, ControlPage, FaultAction, InjectedFault, State


def test_suspects_survive_the_death_of_the_process_that_named_them() -> None:
    page = ControlPage.create()
    pid = os.fork()
    if pid == 0:
        worker = ControlPage.attach(page.fd)
        worker.begin_step([3, 2**63 + 1])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert page.state is State.STEPPING
    assert page.suspects() == (3, 2**63 + 1)
    page.close()


def test_between_steps_nobody_is_suspect() -> None:
    page = ControlPage.create()
    page.begin_step([1, 2])
    page.end_step()
    assert page.suspects() == ()
    assert page.steps == 1
    page.close()


def test_an_engine_narrows_the_suspects_and_the_next_step_widens_them_again() -> None:
    page = ControlPage.create()
    page.begin_step([1, 2, 3])
    assert not page.exact
    page.mark([2])
    assert page.exact
    assert page.suspects() == (2,)
    page.begin_step([1, 2, 3])
    assert not page.exact
    assert page.suspects() == (1, 2, 3)
    page.close()


def test_more_keys_than_the_page_holds_are_cut_not_written_past_the_end() -> None:
    page = ControlPage.create()
    page.arm(7, FaultAction.RAISE)
    page.begin_step(range(1, 2 * MAX_KEYS))
    assert len(page.suspects()) == MAX_KEYS
    with pytest.raises(InjectedFault):  # the fault words behind the list are untouched
        page.fault(7)
    page.close()


def test_native_code_beats_through_the_address() -> None:
    page = ControlPage.create()
    ctypes.c_uint64.from_address(page.heartbeat_address).value += 5
    page.beat()
    assert page.heartbeat == 6
    page.close()


def test_a_fault_fires_once_at_its_point_after_the_passes_let_through() -> None:
    page = ControlPage.create()
    page.arm(9, FaultAction.RAISE, skip=2)
    page.fault(8)
    page.fault(9)
    page.fault(9)
    with pytest.raises(InjectedFault):
        page.fault(9)
    page.fault(9)
    page.close()


def test_something_else_behind_the_descriptor_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(OutlastError, match="magic"):
        ControlPage.attach(fd)
    os.close(fd)
