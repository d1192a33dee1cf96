from __future__ import annotations

import subprocess
import sys

# What is imported, after each start of a program was told.
IMPORT = """\
import sys
starts = {"subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.system"}
sys.addaudithook(lambda event, words: event in starts and print(event))
import ctypes.util
find = ctypes.util.find_library
from gpulayer.fleet import ssh
assert ctypes.util.find_library is find
print(*(name for name in sys.modules if name.startswith("cryptography.x509")))
assert "asyncssh.crypto.x509" not in sys.modules
"""


def test_the_library_starts_no_program_and_brings_no_x509_along() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_who_has_imported_the_library_before_keeps_all_of_it() -> None:
    before = "import sys; sys.modules['asyncssh.crypto.x509'] = sys; "
    after = "from gpulayer.fleet import sshlibrary; assert sys.modules['asyncssh.crypto.x509'] is sys"
    done = subprocess.run([sys.executable, "-c", before + after], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
