"""PagedCache in files: what is saved, loaded and refused."""

import contextlib
import fcntl
import json
import os
import pickle
import struct
import tracemalloc

import pytest
from hf_models import (
    BLOCK, WINDOW, dynamic, forward, left_padded, llama, logits, make_model, models, paged, pytestmark, say, tokens,
    torch,
)

import pagedkv
import pagedkv.hf as hf
from pagedkv import _safetensors
from saved_file import rewrite


@pytest.fixture
def saved(models, tmp_path):
    """A saved conversation of a model with windows, padding and a crop in its past; and how it goes on."""
    def make(name="gemma3", mode="q4", attn=hf.NAME):
        model, (ids, mask) = models(name), left_padded(17, 6)
        cache = paged(model, kv_quant=mode)
        logits(model, attn, cache, ids, mask=mask)
        cache.crop(-1)
        path = tmp_path / "rows.kv"
        cache.save(path)
        more = torch.cat([mask[:, :-1], torch.ones(2, 12, dtype=torch.long)], 1)
        return model, path, cache, lambda c: logits(model, attn, c, tokens(2, 12, seed=6), mask=more)

    return make


@pytest.mark.parametrize("attn", ("sdpa", hf.NAME))
@pytest.mark.parametrize("mode", ["f32", "f16", "bf16", "q8", "q6", "q4", "q8:q4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_a_loaded_cache_goes_on_as_if_it_had_never_been_saved(saved, name, mode, attn):
    # O-PERS-07, O-PERS-12 c: another block size is accepted.
    model, path, cache, go_on = saved(name, mode, attn)
    for block_size in (BLOCK, 16):
        loaded = hf.PagedCache.load(path, model.config, block_size=block_size)
        assert loaded.kv_quant == cache.kv_quant and loaded.get_seq_length() == 16
        for a, b in zip(loaded.layers, cache.layers):
            assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        loaded.verify()
        assert torch.equal(go_on(loaded), go_on(cache.fork()))
        loaded.verify()


def test_saving_is_of_stored_bytes_and_all_of_them(llama, tmp_path):
    # O-PERS-08: every block's rows are there; O-LIFE-09: nothing is quantized twice.
    cache = paged(llama, kv_quant="q4")
    forward(llama, tokens(1, 22), cache)
    cache.save(tmp_path / "a.kv")
    assert (tmp_path / "a.kv").stat().st_size > 22 * 3 * pagedkv.bytes_per_token("q4", 2, 16)
    for generation in range(3):
        cache = hf.PagedCache.load(tmp_path / "a.kv", llama.config)
        cache.save(tmp_path / "b.kv")
        assert (tmp_path / "a.kv").read_bytes() == (tmp_path / "b.kv").read_bytes()
        (tmp_path / "b.kv").replace(tmp_path / "a.kv")


def test_any_reader_of_safetensors_reads_the_file(saved):
    safetensors = pytest.importorskip("safetensors")
    _, path, cache, _ = saved("gemma3", "q8:q4")
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pagedkv.hf"
        assert len(file.keys()) == 2 * len(cache.layers) * 4
        found = [file.get_tensor(name) for name in ("1.2.keys", "1.2.values", "1.2.values.scales", "0.0.keys")]
    assert [t.dtype for t in found] == [torch.int8, torch.uint8, torch.float32, torch.int8]
    assert [tuple(t.shape) for t in found] == [(5, 2, 16), (5, 2, 8), (5, 2, 1), (WINDOW - 1, 2, 16)]


def test_text_goes_on_after_loading(models, tmp_path):
    model, ids = models("gemma3"), tokens(1, 19)
    expected = say(model, "sdpa", ids, dynamic(model), n=30)
    cache = paged(model)
    half = say(model, hf.NAME, ids, cache, n=15)
    cache.save(tmp_path / "half.kv")
    loaded = hf.PagedCache.load(tmp_path / "half.kv", model.config)
    assert torch.equal(say(model, hf.NAME, half, loaded, n=15), expected)


def test_a_long_text_is_loaded_piece_by_piece(models, tmp_path):
    # Longer than a window's pool has room for at once, and than what is written at a time.
    model, ids = models("gemma3"), tokens(1, 1300)
    cache = paged(model, kv_quant="q8", dynamic=True)
    logits(model, hf.NAME, cache, *ids.split(300, 1))
    cache.save(tmp_path / "long.kv")
    loaded = hf.PagedCache.load(tmp_path / "long.kv", model.config, num_blocks=400, dynamic=False)
    assert loaded.get_seq_length() == 1300
    assert torch.equal(logits(model, hf.NAME, loaded, tokens(1, 9)), logits(model, hf.NAME, cache, tokens(1, 9)))


def test_a_damaged_or_short_file_is_refused_wherever_it_is(saved):
    # O-PERS-01. Loading makes a new cache, so nothing can be left half restored.
    model, path, cache, go_on = saved()
    data = path.read_bytes()
    with pytest.raises(ValueError, match="is empty"):
        paged(model).save(path)
    assert path.read_bytes() == data
    for position in (0, 9, 13, 21, 200, len(data) // 2, len(data) - 40, len(data) - 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1:])
        with pytest.raises(ValueError, match="rows.kv"):
            hf.PagedCache.load(path, model.config)
    for size in (0, 1, 19, 20, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="rows.kv"):
            hf.PagedCache.load(path, model.config)
    path.write_bytes(data + b"x")
    with pytest.raises(ValueError, match=f"{len(data) + 1} bytes, its header says {len(data)}"):
        hf.PagedCache.load(path, model.config)
    path.write_bytes(data)
    assert torch.equal(go_on(hf.PagedCache.load(path, model.config)), go_on(cache))


def test_a_missing_file_is_not_found(llama, tmp_path):
    # O-PERS-02
    with pytest.raises(FileNotFoundError):
        hf.PagedCache.load(tmp_path / "missing.kv", llama.config)


@pytest.mark.parametrize("columns", [2**32 - 1, 2**63, -1, "7", 1.5, None, True])
@pytest.mark.parametrize("skipped", [[0, 0], [0, 2**63], [-1, 0], [], "no", [None, 0]])
def test_sizes_that_a_file_claims_are_not_believed(saved, columns, skipped):
    # O-PERS-04
    model, path, *_ = saved()

    def claim(header):
        header["__metadata__"].update(columns=json.dumps(columns), skipped=json.dumps(skipped))

    rewrite(path, claim)
    tracemalloc.start()
    with pytest.raises(ValueError):
        hf.PagedCache.load(path, model.config)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


def test_a_header_size_that_a_file_claims_is_not_believed(tmp_path, llama):
    # O-PERS-04
    path = tmp_path / "rows.kv"
    for size in (2**32 - 1, 2**63, 181):
        path.write_bytes(struct.pack("<Q", size) + b"{" * 180)
        with pytest.raises(ValueError, match="header"):
            hf.PagedCache.load(path, llama.config)


def test_another_version_is_refused_with_both_numbers(saved):
    # O-PERS-07
    model, path, *_ = saved()
    for version in ("0", "2"):
        rewrite(path, lambda header: header["__metadata__"].update(version=version))
        with pytest.raises(ValueError, match=f"version {version}, this build reads 1"):
            hf.PagedCache.load(path, model.config)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("at", ["0", "1", "header", "half", "all but 1", "digest", "fsync", "replace"])
def test_saving_over_a_file_leaves_the_old_or_the_new_one(saved, monkeypatch, at):
    # O-PERS-09, O-PERS-10
    model, path, cache, go_on = saved()
    old = path.read_bytes()
    go_on(cache)
    cache.save(path.with_name("size"))
    size = path.with_name("size").stat().st_size
    path.with_name("size").unlink()
    limit = {"0": 0, "1": 1, "header": 600, "half": size // 2, "all but 1": size - 1,
             "digest": size + 100}.get(at, 1 << 30)

    def fail(*args):
        raise Stop

    class Limited:
        """A file that stops in the middle of a write. The header is written once more at the end, with its digest."""

        def __init__(self, file):
            self.file, self.seek, self.room = file, file.seek, limit

        def write(self, data):
            data = memoryview(data).cast("B")
            self.file.write(data[:self.room])
            if len(data) > self.room:
                raise Stop
            self.room -= len(data)

    whole_file = _safetensors.whole_file

    @contextlib.contextmanager
    def limited(path):
        with whole_file(path) as file:
            yield Limited(file)

    monkeypatch.setattr(_safetensors, "whole_file", limited)
    if at in ("fsync", "replace"):
        monkeypatch.setattr(os, at, fail)
    with pytest.raises(Stop):
        cache.save(path)
    assert path.read_bytes() == old and os.listdir(path.parent) == ["rows.kv"]

    monkeypatch.undo()
    cache.save(path)
    assert hf.PagedCache.load(path, model.config).get_seq_length() == 28


def test_what_a_killed_save_left_is_removed_at_the_next(saved):
    _, path, cache, _ = saved()
    left, others = path.parent / f".{path.name}.abcd.tmp", path.parent / ".other.kv.abcd.tmp"
    held = path.parent / f".{path.name}.held.tmp"
    for file in (left, others, held):
        file.write_bytes(b"half")
    with open(held, "rb") as writer:  # another process is at it
        fcntl.flock(writer, fcntl.LOCK_EX)
        cache.save(path)
    assert not left.exists() and others.exists() and held.exists()


def test_a_full_disk_is_an_error_and_leaves_the_old_file(saved):
    # O-PERS-10
    resource = pytest.importorskip("resource")
    model, path, cache, _ = saved()
    old, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))
    try:
        with pytest.raises(OSError):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == old and os.listdir(path.parent) == ["rows.kv"]


def test_the_file_of_another_model_is_refused(llama, tmp_path):
    # O-PERS-11: of the same shape, other weights.
    other, path = make_model("llama", seed=7), tmp_path / "rows.kv"
    cache = paged(llama, fingerprint=hf.fingerprint(llama))
    forward(llama, tokens(1, 9), cache)
    cache.save(path)
    assert hf.PagedCache.load(path, llama.config, fingerprint=hf.fingerprint(llama)).get_seq_length() == 9
    for fingerprint in (hf.fingerprint(other), ""):
        with pytest.raises(ValueError, match="fingerprint is .* in the file"):
            hf.PagedCache.load(path, other.config, fingerprint=fingerprint)
    with torch.no_grad():  # trained on
        llama.model.layers[2].mlp.down_proj.weight.add_(1e-3)
    assert hf.fingerprint(llama) != cache._fingerprint


@pytest.mark.parametrize("change, named", [(dict(num_hidden_layers=2), "num_hidden_layers is 3 in the file, 2"),
                                           (dict(head_dim=32), "layers is"), (dict(vocab_size=98), "vocab_size"),
                                           (dict(rope_theta=5e5), "rope_parameters")])
def test_the_file_of_another_config_is_refused_by_name(llama, tmp_path, change, named):
    # O-PERS-11
    cache, path = paged(llama), tmp_path / "rows.kv"
    forward(llama, tokens(1, 9), cache)
    cache.save(path)
    other = make_model("llama", **change)
    with pytest.raises(ValueError, match=named):
        hf.PagedCache.load(path, other.config)


def test_what_can_be_used_is_loaded_and_what_cannot_is_refused(llama, tmp_path):
    # O-PERS-12
    path = tmp_path / "rows.kv"
    cache = hf.PagedCache(llama.config, kv_quant="f16", max_context=512)
    forward(llama, tokens(1, 100), cache)
    cache.save(path)
    with pytest.raises(ValueError, match="kv_quant is f16 in the file, q8 was asked"):
        hf.PagedCache.load(path, llama.config, kv_quant="q8")
    assert hf.PagedCache.load(path, llama.config, max_context=256).get_seq_length() == 100
    assert hf.PagedCache.load(path, llama.config, kv_quant="off").get_seq_length() == 100
    forward(llama, tokens(1, 200), cache)
    cache.save(path)
    with pytest.raises(ValueError, match="300 tokens in the file, max_context is 256"):
        hf.PagedCache.load(path, llama.config, max_context=256)
    with pytest.raises(pagedkv.CapacityError):
        hf.PagedCache.load(path, llama.config, num_blocks=3, dynamic=False)


def test_a_cache_is_saved_and_not_pickled(llama):
    with pytest.raises(TypeError, match="save"):
        pickle.dumps(paged(llama))
