"""Every shipped operator compiles for a device from the source that the CPU runs, links, and passes the gates.

One translation unit for each header keeps it to a few compilations. Nothing is run: there is no device here.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from outlast.executor import kernels
from outlast.executor.backends import cubin, gates, nvrtc

ARCHITECTURE = 90


def by_header() -> dict[str, list[kernels.Kernel]]:
    """Shipped kernels by the header that they stand in."""
    found: dict[str, list[kernels.Kernel]] = defaultdict(list)
    for kernel in kernels.shipped().values():
        found[kernel.header].append(kernel)
    return dict(found)


@pytest.fixture(scope="module")
def limits(cubins: nvrtc.CubinCache) -> gates.Limits:
    image = cubins.cubin(nvrtc.kernel_source(), name="persistent", architecture=ARCHITECTURE, operators=False)
    return gates.kernel_limits(cubin.read(image))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("header", sorted(by_header()))
def test_every_shipped_operator_compiles_links_and_passes_the_gates(
    header: str, cubins: nvrtc.CubinCache, limits: gates.Limits
) -> None:
    own = by_header()[header]
    source = f'#include "outlast/ops/{header}"\n' + "".join(kernel.source for kernel in own) + "OL_UNIT;\n"
    image = cubins.cubin(source, name=header.removesuffix(".h"), architecture=ARCHITECTURE)
    found = cubin.read(image)
    entries = gates.check_operator(found, header, limits)
    assert set(entries) == {kernel.name for kernel in own}
    for kernel in own:
        assert len(found.functions[kernel.name].code) > 128, f"{kernel.name} is an empty body"


def test_the_handlers_of_checkpoints_compile_for_a_device_too(cubins: nvrtc.CubinCache, limits: gates.Limits) -> None:
    source = '#include "outlast/ops/kv.h"\n#include "outlast/ops/bytes.h"\nOL_UNIT;\n'
    image = cubins.cubin(source, name="handlers", architecture=ARCHITECTURE)
    entries = gates.check_operator(cubin.read(image), "handlers", limits)
    assert set(entries) == {"kv_delta", "kv_apply", "bytes_delta", "bytes_apply"}


def test_the_kernel_is_built_for_every_device_that_the_compiler_knows(toolkit: nvrtc.Toolkit) -> None:
    """sm_75 to sm_121: a device that is met later needs no other source."""
    from outlast.core.jit import include_dir

    for architecture in toolkit.architectures():
        options = [*nvrtc.options(architecture), f"-I{include_dir()}"]
        compiled = toolkit.compile(nvrtc.kernel_source(), options, name="persistent")
        assert compiled.image, compiled.log
        linked = cubin.read(toolkit.link(compiled.image, architecture, name="persistent"))
        assert gates.kernel_limits(linked).architecture == architecture
