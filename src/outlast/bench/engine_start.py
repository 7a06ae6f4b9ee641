"""Time from the start of a process to its first token, each side in processes of its own.

The program of a side is given to a fresh Python; it gets a prompt of token ids and writes the first generated one. What
is timed runs from before the process is made until its answer is read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from outlast.bench.report import say
from outlast.core.errors import OutlastError

_QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}

_NATIVE = """
import json, os, sys
from outlast.engines.native.engine import create
from outlast.engines.protocol import EngineRequest, SamplingParams
orders = json.loads(sys.argv[1])
engine = create(orders["options"])
engine.recover(1, [])
engine.submit(EngineRequest(1, tuple(orders["prompt"]), 8, params=SamplingParams(temperature=0.0)))
emitted = []
while not emitted:
    emitted = engine.step()
print(emitted[0].token, flush=True)
os._exit(0)
"""

_TRANSFORMERS = """
import json, sys
import torch
from transformers import LlamaForCausalLM
orders = json.loads(sys.argv[1])
torch.set_num_threads(orders["threads"])
model = LlamaForCausalLM.from_pretrained(orders["folder"], dtype=torch.float32)
with torch.inference_mode():
    print(int(model(torch.tensor([orders["prompt"]]), logits_to_keep=1).logits[0, -1].argmax()), flush=True)
"""


def native(
    path: Path, prompt: Sequence[int], *, threads: int, rounds: int, weights_fd: int | None = None
) -> tuple[list[float], int]:
    """Seconds of each start of this engine from a model file, and the token. `weights_fd`: weights already repacked."""
    options: dict[str, object] = {"model": str(path), "kv_tokens": 2048, "threads": threads}
    if weights_fd is not None:
        options["weights_fd"] = weights_fd
    orders = {"prompt": list(prompt), "options": options}
    return _starts(_NATIVE, orders, rounds, fds=() if weights_fd is None else (weights_fd,))


def transformers(folder: Path, prompt: Sequence[int], *, threads: int, rounds: int) -> tuple[list[float], int]:
    """The same of transformers, from a folder that `save_pretrained` made of the fp32 model."""
    return _starts(
        _TRANSFORMERS, {"prompt": list(prompt), "folder": str(folder), "threads": threads}, rounds, quiet=True
    )


def _starts(
    program: str, orders: Mapping[str, object], rounds: int, *, fds: Sequence[int] = (), quiet: bool = False
) -> tuple[list[float], int]:
    """The first start brings files into the page cache and does not count."""
    seconds, token = [], -1
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_QUIET}
    for number in range(rounds + 1):
        started = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(orders)], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if quiet else None, env=environment, pass_fds=fds,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            line = child.stdout.readline()
            took = time.perf_counter() - started
            why = child.communicate()[1]  # how long it takes to end is no part of it
        if child.returncode != 0:
            raise OutlastError(
                f"a start ended with status {child.returncode}", why=(why or b"").decode(errors="replace")[-500:]
            )
        token = int(line)
        if number > 0:
            seconds.append(took)
    say(f"  {min(seconds):.3f} to {max(seconds):.3f} s")
    return seconds, token
