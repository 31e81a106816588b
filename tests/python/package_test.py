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


MISSING = "raise ModuleNotFoundError(\"No module named '{0}'\", name='{0}')"


@pytest.mark.parametrize("module, stubs, text", [
    ("pagedkv.torch", {"torch": MISSING}, r"torch needs torch 2.6 or later; here: no torch. .* \[torch\]"),
    ("pagedkv.torch", {"torch": "__version__ = '2.5.1+cpu'"}, "here: torch 2.5.1"),
    ("pagedkv.torch", {"torch": "import not_there"}, "here: torch is there and cannot be imported .*not_there"),
    ("pagedkv.hf", {"torch": MISSING, "transformers": "__version__ = '5.24.0'"},
     r"hf needs torch 2.6 or later and transformers 5.24 or later; here: no torch, transformers 5.24.0. .* \[hf\]"),
    ("pagedkv.hf", {"torch": "__version__ = '2.10.0'", "transformers": "__version__ = '5.9.2'"},
     "here: torch 2.10.0, transformers 5.9.2"),
    ("pagedkv.hf", {"torch": "__version__ = '2.6.0'", "transformers": MISSING}, "here: torch 2.6.0, no transformers"),
    ("pagedkv.hf", {"torch": "__version__ = '2.6.0'", "transformers": "__version__ = '4.57.1'"}, "transformers 4.57.1"),
    ("pagedkv.mlx", {"mlx_lm": MISSING}, r"mlx needs mlx-lm 0.32 or later; here: no mlx-lm. .* \[mlx\]"),
    ("pagedkv.mlx", {"mlx_lm": "__version__ = '0.31.3'"}, "here: mlx-lm 0.31.3"),
    ("pagedkv.mlx", {"mlx_lm": "raise ImportError('libmlx.so: no such file')"}, r"cannot be imported \(libmlx.so"),
])
def test_a_framework_that_is_missing_or_old_is_named_with_what_is_needed(tmp_path, module, stubs, text):
    for name, code in stubs.items():
        (tmp_path / f"{name}.py").write_text(code.format(name))
    out = python(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import pagedkv
try:
    import {module}
except ImportError as error:
    print(error)
""")
    assert re.search(text, out.stdout), out


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
