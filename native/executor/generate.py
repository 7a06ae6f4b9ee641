"""Write one C++ file per family of shipped operators: generate.py FOLDER [--list].

Run by the build, before the package can be imported: it loads outlast.executor.kernels, which needs the standard
library only, by its path.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "src" / "outlast" / "executor" / "kernels"


def kernels():
    """The module outlast.executor.kernels, under the name `kernels`."""
    spec = importlib.util.spec_from_file_location(
        "kernels", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernels"] = module
    spec.loader.exec_module(module)
    return module


def source(module, family: str) -> str:
    """The C++ file of one family: its headers, its operators, and a table of them for this instruction set."""
    own = importlib.import_module(f"kernels.{family}").KERNELS
    lines = [
        f"// Written by native/executor/generate.py from outlast.executor.kernels.{family}.",
        "#define OL_PREBUILT 1",
    ]
    lines += [f'#include "outlast/ops/{header}"' for header in dict.fromkeys(kernel.header for kernel in own)]
    lines += ['#include "operators.hpp"', ""]
    lines += [kernel.source for kernel in own]
    lines += ["static const outlast::ShippedOperator table[] = {"]
    lines += [f'    {{"{kernel.name}", &{kernel.name}}},' for kernel in own]
    lines += ["    {nullptr, nullptr}};", f"OL_TABLE({family}, table)", ""]
    return "\n".join(lines)


def main() -> None:
    """Write what changed, so that nothing else is compiled again."""
    folder = Path(sys.argv[1])
    module = kernels()
    for family in module.FAMILIES:
        path, text = folder / f"{family}.inc", source(module, family)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
