"""A GGUF model as a Hugging Face folder: dequantized once, kept in the user's cache, named by the file's digest.

`python -m outlast.engines.hf.convert FILE` converts and prints the folder: `converted` runs it as a process of its own,
so that a server need not load what only this takes (numpy, gguf, safetensors) and gets the memory back.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from outlast.core.errors import NotPossibleHere, OutlastError
from outlast.core.paths import cache_dir, make_private
from outlast.engines.hf.folder import digest_of
from outlast.engines.native.gguf import F32, Gguf, ModelFileError, Tensor, UnsupportedModel

#: Raised whenever the same GGUF gives other bytes than before.
VERSION = 1
_RECORD = "outlast.json"
_LIMIT_S = 3600.0  # dequantizing is bound by one core: some 50 MB/s
_PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip


def folder_for(digest: str) -> Path:
    """Where the conversion of the GGUF with this SHA-256 lies."""
    return cache_dir() / "converted" / f"{digest}-v{VERSION}"


def converted(path: Path, digest: str) -> tuple[Path, str]:
    """The folder of a converted GGUF, and the digest of its files. Converts first if that was not done yet (about 10 s
    for 100 MB).

    `digest`: SHA-256 of the file. Several processes may do this at once: each works beside and renames.
    Raises `UnsupportedModel` for what cannot be converted, by name.
    """
    folder = folder_for(digest)
    found = _record(folder)
    if found is None:
        command = [sys.executable, "-m", "outlast.engines.hf.convert", str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_LIMIT_S,
            env=environment,
        )  # fmt: skip
        found = _record(folder)
        if done.returncode != 0 or found is None:
            last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
            raise ModelFileError(f"cannot convert {path}", why=last.removeprefix("error: "))
    return folder, found


def convert(path: Path) -> Path:
    """Convert in this process; returns the folder. A folder that is there already is left alone."""
    with Gguf(path) as gguf:
        folder = folder_for(gguf.digest())
        if _record(folder) is not None:
            return folder
        make_private(folder.parent)
        work = Path(tempfile.mkdtemp(prefix=".convert-", dir=folder.parent))
        try:
            write_folder(gguf, work)
            files = {file.name: file.stat().st_size for file in work.iterdir()}
            (work / _RECORD).write_text(json.dumps({"digest": digest_of(work), "files": files}))
            if folder.exists() and _record(folder) is None:
                shutil.rmtree(folder)  # somebody took a file out of it
            try:
                work.rename(folder)
            except OSError:
                if _record(folder) is None:  # else another process was quicker
                    raise
        except OSError as error:
            raise OutlastError(
                f"cannot store the conversion of {path}", why=str(error),
                do="Free some space, or set OUTLAST_CACHE_DIR to another folder.",
            ) from error  # fmt: skip
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def write_folder(gguf: Gguf, folder: Path) -> None:
    """Write config.json and model.safetensors of a model into an existing folder."""
    config = _config(gguf)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_weights(gguf, config, folder / "model.safetensors")


def _record(folder: Path) -> str | None:
    """Digest of a whole conversion; None if there is none. Files are trusted by their sizes, as a fetched model is."""
    try:
        record = json.loads((folder / _RECORD).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in record["files"].items())
        return str(record["digest"]) if whole else None
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _config(gguf: Gguf) -> dict[str, Any]:
    """config.json of the model. Raises `UnsupportedModel` by name for what transformers would compute differently."""
    architecture = gguf.text("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(
            f"{gguf.path} is a model of architecture {architecture!r}",
            why="only llama is converted",
            do="Serve the model's Hugging Face folder instead of a GGUF.",
        )
    for key, neutral in (("llama.rope.scaling.type", "none"), ("llama.expert_count", 0)):
        if gguf.metadata.get(key, neutral) != neutral:
            raise UnsupportedModel(f"{gguf.path} has {key} = {gguf.metadata[key]}", why="that is not converted")
    if "rope_freqs.weight" in gguf.tensors:
        raise UnsupportedModel(f"{gguf.path} has scaled rotary frequencies", why="they are not converted")
    hidden, heads = gguf.integer("llama.embedding_length"), gguf.integer("llama.attention.head_count")
    rope = gguf.number("llama.rope.freq_base", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": gguf.tensors["token_embd.weight"].shape[1],
        "hidden_size": hidden,
        "intermediate_size": gguf.integer("llama.feed_forward_length"),
        "num_hidden_layers": gguf.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.integer("llama.attention.head_count_kv", heads),
        "head_dim": gguf.integer("llama.attention.key_length", hidden // max(1, heads)),
        "max_position_embeddings": gguf.integer("llama.context_length"),
        "rms_norm_eps": gguf.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.integer("tokenizer.ggml.bos_token_id", 1),
        "eos_token_id": gguf.integer("tokenizer.ggml.eos_token_id", 2),
        "dtype": "float32",
    }


def _write_weights(gguf: Gguf, config: dict[str, Any], target: Path) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise NotPossibleHere(
            "a GGUF cannot be converted here", why=str(error), do="Run: pip install 'outlast[hf]'"
        ) from error
    tensors = {}
    for name, tensor in gguf.tensors.items():
        values = _dequantize(gguf, tensor)
        if name in _WHOLE:
            tensors[_WHOLE[name]] = values
            continue
        block, _, rest = name.removeprefix("blk.").partition(".")
        part, _, kind = rest.partition(".")
        if not name.startswith("blk.") or part not in _PARTS or kind != "weight":
            raise UnsupportedModel(f"{gguf.path} has a tensor {name}", why="its place in the model is not known")
        if part in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            values = _rotary_halves(values, heads)
        tensors[f"model.layers.{block}.{_PARTS[part]}.weight"] = values
    save_file(tensors, target, metadata={"format": "pt"})


def _dequantize(gguf: Gguf, tensor: Tensor) -> Any:
    """The tensor as contiguous float32, rows first."""
    import numpy as np

    shape = tuple(reversed(tensor.shape))
    if tensor.type == F32:
        raw = gguf.data[tensor.offset : tensor.offset + 4 * math.prod(shape)]
        return np.frombuffer(raw, "<f4").reshape(shape).copy()
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise NotPossibleHere(
            "a GGUF cannot be converted here", why=str(error), do="Run: pip install 'outlast[hf]'"
        ) from error
    try:
        kind = GGMLQuantizationType(tensor.type)
        columns, size = GGML_QUANT_SIZES[kind]
        count = math.prod(shape)
        if shape[-1] % columns or tensor.offset + count // columns * size > gguf.size:
            raise ModelFileError(f"{gguf.path}: tensor {tensor.name} does not lie whole in the file")
        packed = np.frombuffer(gguf.data[tensor.offset : tensor.offset + count // columns * size], np.uint8)
        values = dequantize(packed.reshape(*shape[:-1], shape[-1] // columns * size), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedModel(f"{gguf.path}: tensor {tensor.name} is {tensor.type_name}", why=str(error)) from error
    return np.ascontiguousarray(values.reshape(shape), np.float32)


def _rotary_halves(matrix: Any, heads: int) -> Any:
    """Rows of rotary pairs that lie side by side (GGUF) to first halves, then second halves (transformers)."""
    import numpy as np

    rows, columns = matrix.shape
    if rows % (2 * heads):
        raise ModelFileError(f"{rows} rows do not divide into {heads} heads of pairs")
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def main() -> int:
    """See the module."""
    try:
        print(convert(Path(sys.argv[1])))
    except OutlastError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
