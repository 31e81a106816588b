"""The examples run, and print what their text says."""

import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples/python"


def run(name):
    out = subprocess.run([sys.executable, "-B", EXAMPLES / name], capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


def test_the_tutorial():
    text = run("tutorial.py")
    assert "unpacked copies: 0" in text
    assert "one write copied 1 of them: 1000 tokens here, 1001 there" in text
    assert "again: 99 of 100 tokens were in the cache" in text
