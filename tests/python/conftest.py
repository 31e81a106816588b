"""What all tests of the Python package share."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Speed is for benchmarks: no test fails because the machine is busy. Nothing is kept between runs.
settings.register_profile("pagedkv", deadline=None, database=None, derandomize=True,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.load_profile("pagedkv")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in ("PAGEDKV_QUANT", "MTPLX_VLLM_METAL_PAGED_KV_QUANT", "MTPLX_PAGED_KV_QUANT", "PAGEDKV_DYNAMIC",
                 "MTPLX_DYNAMIC_PAGED_KV"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def model_path():
    path = os.environ.get("PAGEDKV_TEST_MODEL")
    if not path:
        pytest.skip("PAGEDKV_TEST_MODEL names no GGUF file (make test sets it)")
    return path
