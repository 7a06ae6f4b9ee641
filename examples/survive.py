"""Ask a running server (`outlast serve`) for a story, kill its engine in the middle, and read on.

Run it in another terminal: python examples/survive.py
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request

import openai

URL = "http://127.0.0.1:8321"


def engine() -> int:
    """Pid of the engine that is computing now."""
    with urllib.request.urlopen(f"{URL}/health") as answer:
        engines = json.load(answer)["engines"]
    return int(next(e["pid"] for e in engines if e["role"] == "active"))


def main() -> None:
    """Stream, kill, stream."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Tell me a story about a lighthouse."}],
        max_tokens=120,
        stream=True,
    )
    for number, chunk in enumerate(stream):
        if number == 40:
            pid = engine()
            print(f"\n--- killing engine {pid} ---")
            os.kill(pid, signal.SIGKILL)
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print(f"\n--- done, by engine {engine()} ---")


if __name__ == "__main__":
    main()
