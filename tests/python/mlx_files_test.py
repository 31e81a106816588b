"""pagedkv.mlx in files: what is saved, loaded and refused."""

import os
import re
import stat
import struct

import numpy as np
import pytest
from mlx_models import BLOCK, count, logits, make, models, mx, nothing_stays_patched, rows, say, tokens

import pagedkv
import pagedkv.mlx as paged
from mlx_lm.models import cache as own
from pagedkv.mlx import PagedPromptCache
from saved_file import rewrite


@pytest.mark.parametrize("mode", ("f32", "f16", "bf16", "q8", "q6", "q4", "q8:q4", "bf16:q8"))
@pytest.mark.parametrize("name", ("llama", "gemma3_text"))
def test_a_saved_cache_goes_on_with_the_same_bits(models, tmp_path, name, mode):
    model, cache, path = models(name), make(models(name), mode), tmp_path / "prompt.safetensors"
    with paged.patch_attention():
        say(model, cache, tokens(21), 4)
        paged.save(path, cache, {"model": name})
        assert count(cache, "dense_materializations") == (len(cache) if "bf16" in mode else 0)
        loaded, metadata = paged.load(path, model, mode, return_metadata=True)
        assert metadata == {"model": name}
        for a, b in zip(cache, loaded):
            assert a.offset == b.offset == 25 and a.nbytes == b.nbytes and a.sliding_window == b.sliding_window
            stored, again = paged.saved._stored(a), paged.saved._stored(b)
            assert stored.keys() == again.keys()
            for part, tensor in stored.items():
                assert np.array_equal(*tensor.pieces, *again[part].pieces), part
            assert b.keys.dtype == a.keys.dtype and b.paged_stats()["mode"] == mode
        rest = tokens(9, 5)
        assert np.array_equal(logits(model, cache, rest[:8], rest[8:]), logits(model, loaded, rest[:8], rest[8:]))


def test_rows_encode_to_themselves():
    """Why a file's rows may be decoded and stored again (see _loaded): at every size, also below the scale's floor."""
    x = np.random.default_rng(0).standard_normal((60000, 12)).astype(np.float32)
    x *= np.float32(10) ** np.random.default_rng(1).uniform(-8, 8, (60000, 1)).astype(np.float32)
    for mode in ("q8", "q6", "q4"):
        codes, scales = pagedkv.quantize_symmetric(x, mode)
        again = pagedkv.quantize_symmetric(pagedkv.dequantize_symmetric(codes, scales, 12, mode), mode)
        assert np.array_equal(codes, again[0]) and np.array_equal(scales, again[1]), mode


def test_the_file_is_as_small_as_the_rows_and_any_reader_s(models, tmp_path):
    model, cache, path = models("llama"), make(models("llama"), "q4"), tmp_path / "prompt.safetensors"
    logits(model, cache, tokens(200))
    paged.save(path, cache)
    rows_ = 3 * 200 * pagedkv.bytes_per_token("q4", 2, 16)
    assert rows_ <= path.stat().st_size < rows_ + 4096
    arrays, about = mx.load(str(path), return_metadata=True)
    assert about["format"] == "pagedkv.mlx" and arrays["0.keys"].shape == (1, 2, 200, 8)
    assert arrays["2.values.scales"].dtype == mx.float32
    with pytest.raises(Exception):
        own.load_prompt_cache(str(path))


def test_every_setting_survives_or_is_refused(models, tmp_path):  # O-PERS-07
    path = tmp_path / "prompt.safetensors"
    cache = [PagedPromptCache(8, 5, "q8", False, 6), PagedPromptCache(BLOCK, 7, "q4:q8", True, 6, True),
             PagedPromptCache(BLOCK, 64, "f16"), PagedPromptCache()]
    for layer in cache[:3]:
        layer.update_without_fetch(rows(20, dtype=mx.float16), rows(20, seed=1, dtype=mx.float16))
        if layer.is_trimmable():
            layer.trim(3)
            layer.update_without_fetch(rows(3, seed=4, dtype=mx.float16), rows(3, seed=5, dtype=mx.float16))
    paged.save(path, cache)
    loaded = paged.load(path)
    for a, b in zip(cache, loaded, strict=True):
        for name in ("block_size", "num_blocks", "kv_quant_config", "dynamic", "sliding_window", "keep_behind_window",
                     "offset"):
            assert getattr(a, name) == getattr(b, name), name
        if not a.empty():
            assert a.keys.dtype == b.keys.dtype == mx.float16 and mx.array_equal(a.keys, b.keys)
    with pytest.raises(ValueError, match="layer 0 is a KVCache"):
        paged.save(path, [own.KVCache()])
    with pytest.raises(ValueError, match="dict of strings"):
        paged.save(path, cache, {"n": 1})


def test_other_versions_models_and_modes_are_refused_with_both(models, tmp_path):  # O-PERS-07
    model, path = models("gemma3_text"), tmp_path / "prompt.safetensors"
    cache = make(model, "q8")
    logits(model, cache, tokens(9))
    paged.save(path, cache)
    with pytest.raises(ValueError, match="6 layers in the file, 3 in the model"):
        paged.load(path, models("llama"))
    paged.save(path, cache[:4])
    with pytest.raises(ValueError, match="layer 0 has window 6 in the file, window None in the model"):
        paged.load(path, models("sliding_llama"))
    with pytest.raises(ValueError, match="is q8 in the file, q4 was asked"):
        paged.load(path, kv_quant="q4")
    assert len(paged.load(path, kv_quant="q8:q8")) == 4
    for version in ("0", "2"):
        rewrite(path, lambda header: header["__metadata__"].update(version=version))
        with pytest.raises(ValueError, match=f"version {version}, this build reads 1"):
            paged.load(path)
    mx.save_safetensors(str(path), {"0.keys": mx.zeros((1,))})
    with pytest.raises(ValueError, match="not a file of pagedkv.mlx"):
        paged.load(path)
    with pytest.raises(FileNotFoundError):
        paged.load(tmp_path / "nothing")


def test_damaged_files_are_refused(models, tmp_path):  # O-PERS-01
    model, path = models("llama"), tmp_path / "prompt.safetensors"
    cache = make(model, "q8")
    logits(model, cache, tokens(20))
    paged.save(path, cache)
    whole = path.read_bytes()
    n, = struct.unpack("<Q", whole[:8])
    for place in (0, 3, 8, 9, n // 2, 8 + n, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1:])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            paged.load(path)
    for length in (0, 7, 8, 8 + n // 2, 8 + n, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            paged.load(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="cut short or damaged"):
        paged.load(path)


@pytest.mark.parametrize("change", (
    lambda header: header.pop("0.keys"),
    lambda header: header["0.keys"].update(shape=[1, 2, 21, 16]),
    lambda header: header["0.keys"].update(shape=[1, 2, 20]),
    lambda header: header["0.keys"].update(shape=[1, 2, -20, -16]),
    lambda header: header["0.keys"].update(dtype="U8"),
    lambda header: header["0.keys"].update(data_offsets=[-640, 0]),
    lambda header: header["__metadata__"].update(layers="[{}]"),
    lambda header: header["__metadata__"].update(layers="7"),
    lambda header: header["__metadata__"].update(layers="not json"),
    lambda header: header["__metadata__"].update(
        layers=header["__metadata__"]["layers"].replace('"offset": 20', '"offset": 25')),
    lambda header: header["__metadata__"].update(
        layers=header["__metadata__"]["layers"].replace('"block_size": 4', '"block_size": 0')),
    lambda header: header["__metadata__"].update(
        layers=header["__metadata__"]["layers"].replace('"float32"', '"load"')),
))
def test_files_that_contradict_themselves_are_refused(models, tmp_path, change):
    model, path = models("llama"), tmp_path / "prompt.safetensors"
    cache = make(model, "q8")
    logits(model, cache, tokens(20))
    paged.save(path, cache)
    rewrite(path, change)
    with pytest.raises(ValueError):
        paged.load(path)


def test_a_save_that_fails_leaves_the_old_file(models, tmp_path, monkeypatch):
    model, path = models("llama"), tmp_path / "prompt.safetensors"
    cache = make(model, "q8")
    logits(model, cache, tokens(20))
    paged.save(path, cache)
    old = path.read_bytes()
    logits(model, cache, tokens(3))

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            paged.save(path, cache)
    assert path.read_bytes() == old and os.listdir(tmp_path) == [path.name]
    paged.save(path, cache)
    assert paged.load(path)[0].offset == 23 and os.listdir(tmp_path) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "a conversation is its owner's"
