"""How K and V are stored: the mode, from a word or from the environment."""

import warnings
from dataclasses import dataclass

from . import _core


@dataclass(frozen=True)
class PagedKVQuantConfig:
    """The stored formats of K and V.

    mode: `off` (f16), `f32`, `f16`, `bf16`, `q8`, `q6`, `q4`, their other spellings (`int8`, `4bit`, ...), or `K:V`,
    as in `q8:q4`. It is kept under its own name. ValueError lists the modes.
    """

    mode: str = "off"

    def __post_init__(self):
        if not isinstance(self.mode, str):
            raise TypeError(f"kv_quant is {self.mode!r}, of type {type(self.mode).__name__}, allowed are modes such as 'q8'")
        name = _core.parse_kv_quant(self.mode)
        if any(_core.is_foreign_spelling(word) for word in self.mode.split(":")):
            warnings.warn(f"{self.mode} means pagedkv's row-scaled {name} here, not ggml's groups of 32", stacklevel=3)
        object.__setattr__(self, "mode", "off" if name == "f16" and not _names_f16(self.mode) else name)

    @property
    def enabled(self) -> bool:
        """Whether K or V is packed to 8 bits or less."""
        return any(part in ("q8", "q6", "q4") for part in self.mode.split(":"))


def _names_f16(mode):
    return mode.strip().lower() in ("f16", "f16:f16")


def paged_kv_quant_mode_from_env() -> str:
    """The mode that PAGEDKV_QUANT, MTPLX_VLLM_METAL_PAGED_KV_QUANT or MTPLX_PAGED_KV_QUANT names, the first that is set;
    `off` when none is. ValueError for a word that is no mode, with the modes."""
    name = _core.kv_quant_from_env()
    return "off" if name == "f16" else name
