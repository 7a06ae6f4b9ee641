"""What a cubin must fulfil before it is loaded beside a running kernel.

Code of a module that is loaded later runs with the registers, stack, barriers and shared memory that the persistent
kernel was launched with; the driver checks none of it, and what does not fit corrupts other threads silently. So it is
checked here, on the bytes that will be loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.core.errors import Refused
from outlast.executor.backends.cubin import OPCODE_CALL_ABSOLUTE, OPCODE_CALL_RELATIVE, Cubin

KERNEL = "outlast_persistent"
ENTRY_PREFIX = "ol_entry_"  #: OL_ENTRY of outlast/dialect.h

#: -maxrregcount of operators and kernel. At 256 threads a block then takes half of an SM's 65,536 registers.
REGISTER_CAP = 128
#: bytes per thread, set before the launch; the driver reserves them for every thread that the device can hold: some
#: 690 MB on 132 SMs. Attention in float64 needs 2,200, in float32 1,112, all other shipped operators up to 300.
STACK_BYTES = 2560
BARRIERS = 1  #: __syncthreads() is barrier 0; others could meet those of other operators


@dataclass(frozen=True, slots=True)
class Limits:
    """What the persistent kernel offers to each operator."""

    architecture: int  #: 90 for sm_90
    registers: int
    stack_bytes: int
    barriers: int = BARRIERS


def kernel_limits(kernel: Cubin, *, cap: int = REGISTER_CAP, stack_bytes: int = STACK_BYTES) -> Limits:
    """What operators may need under this kernel. Raises `Refused` if it can not run operators of other modules."""
    found = kernel.functions.get(KERNEL)
    if found is None or not found.kernel:
        raise Refused("the persistent kernel was not loaded", why=f"the cubin has no kernel {KERNEL}")
    problems = _calls(kernel, [KERNEL, "sequence"])
    # ptxas rounds to pairs: with a cap of 128 the kernel and the fattest operator may both end at 126.
    if not cap - 4 <= found.registers <= cap:
        problems.append(f"it reserves {found.registers} registers and not {cap}: its ballast does not fit")
    if found.barriers > BARRIERS:
        problems.append(f"it uses {found.barriers} barriers")
    if not kernel.executable:
        problems.append("it is not linked")
    own = found.frame_bytes + _frame(kernel, "sequence")  # an operator may be called through `sequence`
    if own >= stack_bytes:
        problems.append(f"it needs {own} of {stack_bytes} bytes of stack itself")
    problems += _entries(kernel, ["sequence"])
    if problems:
        raise Refused("the persistent kernel was not loaded", why="; ".join(problems))
    return Limits(kernel.architecture, found.registers, stack_bytes - own)


def check_object(cubin: Cubin, name: str) -> None:
    """Check an operator before it is linked: the linker drops shared variables of functions without a word."""
    problems = []
    if cubin.executable:
        problems.append("it is whole-program code and not relocatable: build it with -rdc=true")
    if cubin.shared:
        problems.append(f"it has variables in shared memory ({', '.join(cubin.shared)})")
    if problems:
        raise Refused(f"operator {name} was not linked", why="; ".join(problems), do="See docs: CUDA backend, gates.")


def check_operator(cubin: Cubin, name: str, limits: Limits) -> dict[str, str]:
    """Check a linked module of operators; returns entry variable by operator. Raises `Refused` with all reasons."""
    problems = []
    if not cubin.executable:
        problems.append("it is not linked")
    if cubin.architecture != limits.architecture:
        problems.append(f"it is for sm_{cubin.architecture}, and the kernel runs on sm_{limits.architecture}")
    entries = {
        variable.removeprefix(ENTRY_PREFIX): variable
        for variable in cubin.pointers
        if variable.startswith(ENTRY_PREFIX)
    }
    if not entries:
        problems.append("it shows no operator (OL_OPERATOR or OL_INSTANCE)")
    if cubin.shared:
        problems.append(f"it has variables in shared memory ({', '.join(cubin.shared)})")
    if cubin.constants:  # bank 3 and the like are set at a launch, for the module of the launched kernel only
        problems.append(f"it has constant memory of its own ({', '.join(cubin.constants)})")
    problems += _calls(cubin, list(cubin.functions)) + _entries(cubin, list(entries))
    below = sum(f.frame_bytes for n, f in cubin.functions.items() if n not in entries)  # whatever they call
    for function in cubin.functions.values():
        if function.kernel:
            problems.append(f"{function.name} is a kernel")
        if function.registers == 0:
            problems.append(f"{function.name} does not say how many registers it needs")
        if function.registers > limits.registers:
            problems.append(f"{function.name} needs {function.registers} of {limits.registers} registers")
        if function.barriers > limits.barriers:
            problems.append(f"{function.name} uses a named barrier above {limits.barriers - 1}")
        stack = function.frame_bytes + (below if function.name in entries else 0)
        if stack > limits.stack_bytes:
            problems.append(f"{function.name} needs {stack} of {limits.stack_bytes} bytes of stack")
    if problems:
        raise Refused(f"operator {name} was not loaded", why="; ".join(problems), do="See docs: CUDA backend, gates.")
    return entries


def _calls(cubin: Cubin, names: list[str]) -> list[str]:
    """Calls through pointers that would be relative to the caller's own code."""
    problems = []
    for name in names:
        function = cubin.functions.get(name)
        if function is not None and OPCODE_CALL_RELATIVE in function.opcodes():
            problems.append(f"{name} calls through pointers relative to itself: link it relocatable, without LTO")
        elif name == KERNEL and function is not None and OPCODE_CALL_ABSOLUTE not in function.opcodes():
            problems.append(f"{name} calls through no pointer")
    return problems


def _entries(cubin: Cubin, names: list[str]) -> list[str]:
    """Entry variables that the loader will not fill with the address of existing code."""
    problems = []
    for name in names:
        target = cubin.pointers.get(ENTRY_PREFIX + name)
        if target != name:
            problems.append(f"{ENTRY_PREFIX}{name} is not filled with the address of {name}")
        elif target not in cubin.functions or not cubin.functions[target].code:
            problems.append(f"{name} has no code")
    return problems


def _frame(cubin: Cubin, name: str) -> int:
    function = cubin.functions.get(name)
    return function.frame_bytes if function is not None else 0
