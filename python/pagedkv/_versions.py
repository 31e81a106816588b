"""What pagedkv.hf, pagedkv.mlx and pagedkv.torch need beside them, told before an import deep inside fails."""

import importlib


def need(who, extra, **least):
    """Imports what `who` needs, or says with which versions it works and what is here.

      who    the module that is imported
      extra  of pagedkv, which brings them
      least  module="first version that will do"

    Errors: ImportError. Versions are told by their numbers alone: of 5.24.0rc1 that is 5.24.0.
    """
    found, reason = {}, None
    for name in least:
        try:
            found[name] = str(importlib.import_module(name).__version__)
        except ImportError as error:
            reason = reason or error
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            found[name] = "" if missing else f"is there and cannot be imported ({error})"
    if all(text and _numbers(text) >= _numbers(least[name]) for name, text in found.items()):
        return
    wanted = " and ".join(f"{_package(name)} {version} or later" for name, version in least.items())
    here = ", ".join(f"{_package(name)} {text}" if text else f"no {_package(name)}" for name, text in found.items())
    raise ImportError(f"{who} needs {wanted}; here: {here}. The extra of pagedkv that brings them is [{extra}]",
                      name=who) from reason


def _package(module):
    return module.replace("_", "-")


def _numbers(version):
    """[5, 24, 0] of "5.24.0rc1+cpu", [] of what is no version."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        digits = part[:len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return numbers
