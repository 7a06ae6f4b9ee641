"""Cubins are read right, and those that would corrupt a running kernel are refused before they are loaded.

The bad modules are real ones, built the way that each gate is about; what a gate says is compared with pyelftools.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.errors import CorruptState, Refused
from outlast.core.jit import include_dir
from outlast.executor.backends import cubin, gates, nvrtc

HEAD = '#include "outlast/dialect.h"\nstruct words { uint64_t v[8]; };\n'


def body(text: str) -> str:
    """An operator `op` with this body."""
    return f"OL_OPERATOR(op, words, a) {{ {text} }}\n"


GOOD = body("const_cast<words *>(a)->v[1] = a->v[0]; return OL_OK;")
ARCHITECTURE = 90


class Workshop:
    """Builds modules, good ones and bad ones."""

    def __init__(self, toolkit: nvrtc.Toolkit) -> None:
        self.toolkit = toolkit
        self.kernel = self.linked(nvrtc.kernel_source(), head="", name="persistent")
        self.good = self.linked(GOOD)
        self.limits = gates.kernel_limits(cubin.read(self.kernel))

    def object(self, source: str, options: Sequence[str] | None = None, head: str = HEAD, name: str = "op") -> bytes:
        flags = list(options if options is not None else nvrtc.options(ARCHITECTURE))
        compiled = self.toolkit.compile(head + source, [*flags, f"-I{include_dir()}"], name=name)
        assert compiled.image, compiled.log
        return compiled.image

    def linked(self, source: str, options: Sequence[str] | None = None, head: str = HEAD, name: str = "op") -> bytes:
        return self.toolkit.link(self.object(source, options, head, name), ARCHITECTURE, name=name)

    def check(self, image: bytes) -> dict[str, str]:
        return gates.check_operator(cubin.read(image), "op", self.limits)


@pytest.fixture(scope="module")
def workshop(toolkit: nvrtc.Toolkit) -> Workshop:
    return Workshop(toolkit)


def without(option: str) -> list[str]:
    """The usual options but one."""
    return [one for one in nvrtc.options(ARCHITECTURE) if not one.startswith(option)]


def test_the_kernel_reserves_the_registers_that_operators_may_use(workshop: Workshop) -> None:
    assert workshop.limits == gates.Limits(ARCHITECTURE, gates.REGISTER_CAP, workshop.limits.stack_bytes)
    assert workshop.limits.stack_bytes > 500


def test_a_kernel_without_its_ballast_is_refused(workshop: Workshop) -> None:
    slim = workshop.linked(nvrtc.kernel_source().replace(f"OL_BALLAST {nvrtc.BALLAST}", "OL_BALLAST 1"), head="")
    with pytest.raises(Refused, match="ballast does not fit"):
        gates.kernel_limits(cubin.read(slim))


def test_a_kernel_whose_calls_are_relative_to_itself_is_refused(workshop: Workshop) -> None:
    """What a build without -rdc makes of the same source: it links, and reaches no other module."""
    whole = cubin.read(workshop.object(nvrtc.kernel_source(), without("-rdc"), head=""))
    assert cubin.OPCODE_CALL_RELATIVE in whole.functions[gates.KERNEL].opcodes()
    with pytest.raises(Refused, match="relative to itself"):
        gates.kernel_limits(whole)


def test_a_good_operator_passes_and_shows_its_entry(workshop: Workshop) -> None:
    image = workshop.object(GOOD)
    gates.check_object(cubin.read(image), "op")
    assert workshop.check(workshop.toolkit.link(image, ARCHITECTURE, name="op")) == {"op": "ol_entry_op"}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (body('asm volatile("bar.sync 3, 64;" ::: "memory"); return OL_OK;'), "named barrier"),
        (body('asm volatile("bar.sync %0;" ::"r"((int)a->v[0])); return OL_OK;'), "named barrier"),
        ("__constant__ uint64_t c[3] = {1, 2, 3};\n" + body("return c[a->v[0]];"), "constant memory"),
        (
            body("volatile char b[8192]; for (int i = 0; i < 8192; ++i) b[i] = a->v[0]; return b[a->v[1]];"),
            r"8\d\d\d of \d+ bytes of stack",
        ),
        ('extern "C" __device__ int32_t op(const ol_task *, ol_env *) { return 1; }', "shows no operator"),
        (f'{GOOD} extern "C" __global__ void rogue() {{}}', "rogue is a kernel"),
        ('extern "C" __device__ ol_op_fn ol_entry_op = nullptr;', "not filled with the address"),
    ],
)
def test_operators_that_do_not_fit_are_refused(workshop: Workshop, source: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        workshop.check(workshop.linked(source))


def test_an_operator_that_needs_more_registers_than_the_kernel_has_is_refused(workshop: Workshop) -> None:
    source = """OL_OPERATOR(op, words, a) {
        volatile uint64_t *in = reinterpret_cast<volatile uint64_t *>(a->v[0]);
        uint64_t held[110];
        #pragma unroll
        for (int i = 0; i < 110; ++i) held[i] = in[i];
        #pragma unroll
        for (int i = 0; i < 110; ++i) in[i] = held[109 - i] * held[i];
        return OL_OK;
    }"""
    fat = workshop.linked(source, without("-maxrregcount"))
    with pytest.raises(Refused, match=r"needs 2\d\d of 128 registers"):
        workshop.check(fat)
    workshop.check(workshop.linked(source))  # the cap makes it fit


@pytest.mark.parametrize("declaration", ["__shared__ uint64_t s[64];", "extern __shared__ uint64_t s[];"])
def test_shared_variables_are_refused_before_the_linker_drops_them(workshop: Workshop, declaration: str) -> None:
    source = f"""OL_OPERATOR(op, words, a) {{
        {declaration}
        s[threadIdx.x % 64] = a->v[0];
        __syncthreads();
        const_cast<words *>(a)->v[1] = s[(threadIdx.x + 1) % 64];
        return OL_OK;
    }}"""
    image = workshop.object(source)
    with pytest.raises(Refused, match="shared memory"):
        gates.check_object(cubin.read(image), "op")
    # Why there: the linked module shows nothing of it any more.
    assert not cubin.read(workshop.toolkit.link(image, ARCHITECTURE, name="op")).shared


def test_whole_program_code_is_refused_before_it_is_linked(workshop: Workshop) -> None:
    with pytest.raises(Refused, match="not relocatable"):
        gates.check_object(cubin.read(workshop.object(GOOD, without("-rdc"))), "op")


def test_a_module_for_another_device_is_refused(workshop: Workshop) -> None:
    options = [one.replace("sm_90", "sm_80") for one in nvrtc.options(ARCHITECTURE)]
    other = workshop.toolkit.link(workshop.object(GOOD, options), 80, name="op")
    with pytest.raises(Refused, match="sm_80, and the kernel runs on sm_90"):
        workshop.check(other)


def test_all_reasons_are_told_at_once(workshop: Workshop) -> None:
    narrow = dataclasses.replace(workshop.limits, registers=8, architecture=100)
    with pytest.raises(Refused, match=r"sm_90, .*sm_100.*registers"):
        gates.check_operator(cubin.read(workshop.linked(GOOD)), "op", narrow)


def test_what_is_read_agrees_with_pyelftools(workshop: Workshop) -> None:
    elffile = pytest.importorskip("elftools.elf.elffile")
    for image in (workshop.kernel, workshop.linked(GOOD), workshop.object(GOOD)):
        file: Any = elffile.ELFFile(io.BytesIO(image))
        symbols = file.get_section_by_name(".symtab")
        mine = cubin.read(image)
        for symbol in symbols.iter_symbols():
            if symbol["st_info"]["type"] == "STT_FUNC" and isinstance(symbol["st_shndx"], int):
                code = file.get_section(symbol["st_shndx"]).data()
                assert mine.functions[symbol.name].code == code[symbol["st_value"] :][: symbol["st_size"]]
        assert mine.executable == (file["e_type"] == "ET_EXEC")
        if not mine.executable:
            continue  # an object's entries are filled by the linker, which marks them in another way
        for name in [section.name for section in file.iter_sections() if section.name.startswith(".rela.nv.global")]:
            section = file.get_section_by_name(name)
            for relocation in section.iter_relocations():
                target = symbols.get_symbol(relocation["r_info_sym"]).name
                assert target in mine.pointers.values()


@given(st.data())
def test_damaged_cubins_are_refused_and_nothing_else_happens(workshop: Workshop, data: st.DataObject) -> None:
    image = bytearray(workshop.good)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(image) - 1))
        image[at] = data.draw(st.integers(0, 255))
    cut = bytes(image[: data.draw(st.integers(0, len(image)))]) if data.draw(st.booleans()) else bytes(image)
    with contextlib.suppress(CorruptState, Refused):  # anything else fails the test
        workshop.check(cut)


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"PK\x03\x04" * 40, b"\x7fELF\x02\x01\x01" + bytes(80)])
def test_what_is_no_cubin_is_named(image: bytes) -> None:
    with pytest.raises(CorruptState, match="cubin"):
        cubin.read(image)
