"""The package as it is installed: what it imports, what it carries, what it says when a part is missing."""

import importlib.metadata
import os
import pathlib
import re

import pytest

import pagedkv
import process


def python(code, **kwargs):
    return process.python(code, "-W", "error", **kwargs)


def test_importing_it_imports_no_framework():
    out = python("import sys, pagedkv, pagedkv.compat.mtplx; "
                 "print([m for m in ('numpy', 'torch', 'mlx', 'transformers', 'pagedkv._engine') if m in sys.modules])")
    assert out.stdout == "[]\n", out.stderr


def test_everything_that_is_named_is_there():
    for name in pagedkv.__all__:
        if name != "LLM":
            assert getattr(pagedkv, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        pagedkv.nonsense


def test_public_things_say_what_they_are():
    for name in pagedkv.__all__:
        if name != "LLM":
            assert getattr(pagedkv, name).__doc__, name


def test_types_are_declared():
    package = pathlib.Path(pagedkv.__file__).parent
    assert (package / "py.typed").exists()
    for stub in ("_core.pyi", "_engine.pyi"):
        text = (package / stub).read_text()
        compile(text, stub, "exec")
        assert "def " in text


def test_versions_agree():
    try:
        installed = importlib.metadata.version("pagedkv")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from the build tree")
    assert installed == pagedkv.__version__


def test_it_runs_from_the_wheel_where_the_wheel_is_tested():
    if "PAGEDKV_WHEEL" in os.environ:
        assert "site-packages" in pagedkv.__file__


def test_without_the_engine_llm_says_what_to_do_and_the_rest_works():
    out = python("""
import sys
sys.modules["pagedkv._engine"] = None
import pagedkv
pagedkv.PagedKVCache()
try:
    pagedkv.LLM("x.gguf")
except ImportError as error:
    print(error)
""")
    assert re.search("tools/setup.*pip install", out.stdout), out


def test_errors_are_of_the_classes_that_callers_catch():
    for error, standard in ((pagedkv.CapacityError, ValueError), (pagedkv.NotFiniteError, ValueError),
                            (pagedkv.StaleError, LookupError), (pagedkv.UnsupportedError, NotImplementedError),
                            (pagedkv.CorruptError, ValueError), (pagedkv.UnavailableError, RuntimeError),
                            (pagedkv.NoMemoryError, MemoryError)):
        assert issubclass(error, standard) and issubclass(error, pagedkv.PagedKVError)


def test_a_kernel_can_be_forced_by_name():
    out = python("import pagedkv; print(pagedkv.Cache(num_kv_heads=1, head_dim=8, num_blocks=4).isa)",
                 env={**os.environ, "PAGEDKV_ISA": "scalar"})
    assert out.stdout == "scalar\n", out.stderr


def test_the_portable_kernels_say_once_that_they_run():
    # No machine of ours lacks the fast ones, so what is checked is that they are in the statistics.
    cache = pagedkv.Cache(num_kv_heads=1, head_dim=8, num_blocks=4, isa="scalar")
    assert "scalar" in cache.stats()["fallbacks"]["attend"]
