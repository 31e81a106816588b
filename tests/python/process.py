"""Python code in a process of its own."""

import subprocess
import sys


def python(code, *options, arguments=(), **kwargs):
    return subprocess.run([sys.executable, *options, "-c", code, *arguments], capture_output=True, text=True, timeout=120, **kwargs)


# Goes behind code that defines attend() and what it gave `before`: both sides of a fork compute the same.
FORK = """
pid = os.fork()
assert (attend() == before).all()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("both")
"""
