"""Python code in a process of its own."""

import subprocess
import sys


def python(code, *options, **kwargs):
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120, **kwargs)
