"""The transformers engine: the tokens of transformers, the bits of itself, whatever happens to the process before."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path
from typing import Any

import log_damage
import pytest

from outlast.checkpoint.geometry import gather
from outlast.core.errors import Refused
from outlast.core.log import KV_ROWS, Log, LogOwner
from outlast.core.memory import Memory
from outlast.engines.native.gguf import ModelFileError, UnsupportedModel
from outlast.engines.native.sequences import Sequence
from outlast.engines.protocol import EngineRequest, JournalEntry, SamplingParams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from outlast.engines.hf.engine import HfEngine  # noqa: E402  needs torch

pytestmark = pytest.mark.torch

GREEDY = SamplingParams(temperature=0.0)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=11, top_logprobs=2),
    SamplingParams(temperature=0.9, seed=5, top_p=0.8, presence_penalty=0.7, frequency_penalty=0.2),
]
TOKENS = 30


def requests() -> list[EngineRequest]:
    """Prompts of one chunk, of several, and of whole chunks exactly."""
    lengths = (10, 61, 48)
    return [
        EngineRequest(key + 1, tuple(range(3 + key, 3 + key + lengths[key])), TOKENS, params=p)
        for key, p in enumerate(PARAMS)
    ]


def engine(folder: Path, owner: LogOwner | None = None, **more: Any) -> HfEngine:
    options: dict[str, Any] = {"kv_tokens": 1024, "block_tokens": 16, "prefill_chunk": 24, "digest": "d", **more}
    return HfEngine(folder, log=None if owner is None else owner.spec(), **options)


def log() -> LogOwner:
    return LogOwner.in_memory(1 << 22, segment_bytes=1 << 20)


def rows(e: HfEngine, key: int, count: int | None = None) -> bytes:
    """KV rows of the first `count` positions, by the reference of the gather handler."""
    pool = memoryview((ctypes.c_char * e.geometry.pool_bytes).from_address(e.pool)).cast("B")
    return gather(e.geometry, pool, e._sequences[key].blocks, 0, e.computed(key) if count is None else count)


class Client:
    """What the supervisor knows: tokens by request, each of which must be the same whenever it is reported again."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Any]] = {}
        self.rows: dict[int, tuple[int, bytes]] = {}

    def step(self, e: HfEngine) -> None:
        computed = {key: (e.computed(key), rows(e, key)) for key in e._active}
        for emission in e.step():
            value = (emission.token, emission.logprob, emission.top)
            known = self.seen.setdefault(emission.key, [])
            assert emission.index <= len(known)
            if emission.index < len(known):
                assert known[emission.index] == value
            else:
                known.append(value)
        self.rows.update(computed)
        assert e.failures() == []

    def run(self, e: HfEngine) -> None:
        while e.busy():
            self.step(e)

    def journal(self, asked: list[EngineRequest]) -> list[JournalEntry]:
        return [JournalEntry(r, tuple(t for t, _, _ in self.seen.get(r.key, []))) for r in asked]


@pytest.fixture(scope="module")
def undisturbed(tiny_folder: Path) -> Client:
    client = Client()
    e = engine(tiny_folder)
    e.recover(1, [])
    for r in requests():
        e.submit(r)
    client.run(e)
    assert all(len(tokens) == TOKENS for tokens in client.seen.values())
    return client


def assert_same(client: Client, undisturbed: Client) -> None:
    assert client.seen == undisturbed.seen
    for key, (count, data) in undisturbed.rows.items():
        if client.rows[key][0] == count:
            assert client.rows[key][1] == data, f"KV rows of request {key} differ"


def test_greedy_tokens_are_those_of_transformers(tiny_folder: Path, undisturbed: Client) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    first = requests()[0]
    made = model.generate(
        torch.tensor([first.prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert [t for t, _, _ in undisturbed.seen[1]] == made[0, len(first.prompt) :].tolist()
    assert len({t for t, _, _ in undisturbed.seen[2]}) > 15, "the model must have something to say"


def test_neighbours_and_the_log_change_no_bit(tiny_folder: Path, undisturbed: Client) -> None:
    owner = log()
    for r in requests():
        client = Client()
        e = engine(tiny_folder, owner)
        e.recover(owner.fence(), [])
        e.submit(r)
        client.run(e)
        assert client.seen[r.key] == undisturbed.seen[r.key]
        assert client.rows[r.key] == undisturbed.rows[r.key]


@pytest.mark.parametrize("steps", [1, 3, 5, 8, 41])
def test_what_is_recovered_goes_on_byte_for_byte(tiny_folder: Path, undisturbed: Client, steps: int) -> None:
    """The engine is left after so many steps, within prompts and within answers, and another takes over, twice."""
    owner = log()
    client = Client()
    e = engine(tiny_folder, owner)
    e.recover(owner.fence(), [])
    for r in requests():
        e.submit(r)
    restored = 0
    for _ in range(2):
        for _ in range(steps):
            client.step(e)
        before = {key: (e.computed(key), rows(e, key)) for key in e._active}
        e = engine(tiny_folder, owner)
        report = e.recover(owner.fence(), client.journal(requests()))
        assert report.reason == ""
        for key, (count, data) in before.items():
            if count:
                assert e.computed(key) == count
                assert rows(e, key) == data
                restored += 1
    client.run(e)
    assert restored
    assert e.stats()["verified"] > 0
    assert_same(client, undisturbed)


def test_rows_of_part_of_a_step_are_not_built_upon(tiny_folder: Path) -> None:
    """Within a prompt a restored context ends where a chunk does: another cut of the prompt has other bits."""
    e = engine(tiny_folder)
    s = Sequence(requests()[1])
    assert [e._whole_steps(s, n) for n in (0, 23, 24, 47, 48, 60, 61, 62)] == [0, 0, 24, 24, 48, 48, 61, 62]


def test_sequences_take_turns(tiny_folder: Path) -> None:
    e = engine(tiny_folder)
    e.recover(1, [])
    for r in requests():
        e.submit(r)
    for _ in range(7):  # prompts of one, two and three chunks
        e.step()
    turns = [e.step()[0].key for _ in range(9)]
    assert all(sorted(turns[i : i + 3]) == [1, 2, 3] for i in range(7))


@pytest.mark.parametrize("replay", ["exact", "fast"])
def test_a_lost_log_costs_time_only(tiny_folder: Path, undisturbed: Client, replay: str) -> None:
    """Rows computed anew by the steps of the first time are the same rows; "fast" promises delivered tokens only."""
    client = Client()
    e = engine(tiny_folder)
    e.recover(1, [])
    for r in requests():
        e.submit(r)
    for _ in range(40):
        client.step(e)
    delivered = {key: list(tokens) for key, tokens in client.seen.items()}
    owner = log()
    e = engine(tiny_folder, owner, replay=replay)
    report = e.recover(owner.fence(), client.journal(requests()))
    assert (report.restored, report.recomputed) == (0, 3)
    client.run(e)
    if replay == "exact":
        assert_same(client, undisturbed)
    for key, tokens in delivered.items():
        assert client.seen[key][: len(tokens)] == tokens


def test_rows_of_another_owner_of_the_pages_do_not_matter(tiny_folder: Path, undisturbed: Client) -> None:
    """A pool full of NaN gives the same bits: nothing past a sequence's length is read."""
    probe = engine(tiny_folder)
    pool = Memory.anonymous(probe.geometry.pool_bytes)
    torch.frombuffer(pool.buffer, dtype=torch.float32).fill_(float("nan"))
    client = Client()
    e = engine(tiny_folder, pool=pool)
    e.recover(1, [])
    for r in requests():
        e.submit(r)
    client.run(e)
    assert_same(client, undisturbed)


@pytest.mark.parametrize("which", ["in a sealed block", "in the last step"])
def test_damaged_rows_are_computed_anew(tiny_folder: Path, undisturbed: Client, which: str) -> None:
    """Wrong bytes under a right checksum: a block's digest finds them, or the step that is computed again."""
    owner = log()
    client = Client()
    e = engine(tiny_folder, owner)
    e.recover(owner.fence(), [])
    for r in requests():
        e.submit(r)
    while any(e.computed(r.key) % 16 == 0 or len(client.seen.get(r.key, ())) < 9 for r in requests()):
        client.step(e)
    scanned = Log.open(owner.spec(), None)
    found = [r for r in scanned.records() if r.type == KV_ROWS and r.key == 2]
    record = found[0] if which == "in a sealed block" else found[-1]
    (ctypes.c_uint8 * record.length).from_address(record.address)[5] ^= 16
    log_damage.reseal((ctypes.c_uint8 * 64).from_address(record.address - 64), record.address, record.length)
    log_damage.recommit(scanned, record.epoch)
    e = engine(tiny_folder, owner)
    report = e.recover(owner.fence(), client.journal(requests()))
    assert report.restored == (2 if which == "in a sealed block" else 3)
    client.step(e)
    while e.computed(2) == 0 or e._sequences[2].recheck:
        client.step(e)
    assert [e._sequences[r.key].generation for r in requests()] == [1, 2, 1]
    client.run(e)
    assert_same(client, undisturbed)


def test_a_log_of_other_bits_is_not_read(tiny_folder: Path) -> None:
    owner = log()
    e = engine(tiny_folder, owner)
    e.recover(owner.fence(), [])
    e.submit(requests()[0])
    e.step()
    for field, more in (
        ("chunk", {"prefill_chunk": 16}),
        ("threads", {"threads": 2}),
        ("max_length", {"kv_tokens": 512}),
        ("model", {"digest": "other"}),
        ("block_tokens", {"block_tokens": 32}),
    ):
        other = engine(tiny_folder, None, **more)
        assert Log.open(owner.spec(), other.manifest).differs(other.manifest).startswith(f"manifest field {field}")
    torch.set_num_threads(1)


def test_the_manifest_names_what_changes_bits(tiny_folder: Path) -> None:
    fields = engine(tiny_folder).manifest.fields
    assert fields["torch"] == torch.__version__
    assert fields["transformers"] == transformers.__version__
    assert fields["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert {"model", "kv_type", "threads", "cache", "max_length", "chunk", "batch", "attention"} <= set(fields)


def changed(folder: Path, target: Path, **fields: Any) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_attention"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_other_models_are_refused_by_name(
    tiny_folder: Path, tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        engine(changed(tiny_folder, tmp_path / "other", **fields))


def test_layers_that_config_does_not_announce_are_refused_by_their_class(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine looks at the cache that the model itself would make."""
    from outlast.engines.hf import model

    class Sliding(model.DynamicLayer):
        is_sliding = True

    cache = model.DynamicCache()
    cache.layers = [Sliding(), Sliding()]
    monkeypatch.setattr(model, "DynamicCache", lambda **_: cache)
    with pytest.raises(UnsupportedModel, match="Sliding"):
        engine(tiny_folder)


def test_a_folder_without_all_weights_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """transformers would go on with random ones."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "partial"
    shutil.copytree(tiny_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj"):
        engine(folder)


def test_a_shape_that_config_lies_about_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    from outlast.engines.hf.folder import Shape, read_shape
    from outlast.engines.hf.model import CausalModel

    s = read_shape(tiny_folder)
    with pytest.raises(UnsupportedModel, match="keys of layer 0"):
        CausalModel(tiny_folder, Shape(s.layers, s.kv_heads, s.head_dim * 2, s.vocab, s.context, s.dtype), 1)


def test_requests_that_can_never_fit_are_refused(tiny_folder: Path) -> None:
    e = engine(tiny_folder)
    e.recover(1, [])
    for bad in (EngineRequest(1, (3,), 1024), EngineRequest(2, (3,), 5000), EngineRequest(3, (100_000,), 5)):
        with pytest.raises(Refused):
            e.submit(bad)
    assert not e.busy()


def test_requests_wait_for_room_and_leave_none_behind(tiny_folder: Path) -> None:
    """More than the pool holds: all are served; cancelled ones free their room in every phase."""
    owner = log()
    e = engine(tiny_folder, owner)
    e.recover(owner.fence(), [])
    for key in range(1, 9):
        e.submit(EngineRequest(key, tuple(range(3, 60)), 300 if key > 4 else 20, params=GREEDY))
    done = set()
    for step in range(400):
        done |= {x.key for x in e.step() if x.finish}
        if step == 50:
            for key in (5, 6, 8):
                e.cancel(key)
                e.cancel(key)
        if step == 60:
            e.cancel(7)
    assert done == {1, 2, 3, 4}
    assert not e.busy()
    assert e.stats()["kv_blocks_used"] == 0


def test_answers_end_at_a_stop_token(tiny_folder: Path, undisturbed: Client) -> None:
    asked = requests()[0]
    stop = undisturbed.seen[1][7][0]
    first = next(i for i, (token, _, _) in enumerate(undisturbed.seen[1]) if token == stop)
    e = engine(tiny_folder)
    e.recover(1, [])
    e.submit(EngineRequest(1, asked.prompt, 20, stop_tokens=(stop,), params=GREEDY))
    out = []
    while e.busy():
        out += e.step()
    assert [x.finish for x in out] == [None] * first + ["stop"]
