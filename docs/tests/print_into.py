"""Run a script with what it prints in a file of this process, so that ranks do not mix it up.

python print_into.py DIRECTORY SCRIPT [ARGUMENTS]...
"""

import os
import runpy
import sys

if __name__ == "__main__":
    _, directory, script, *arguments = sys.argv
    file = os.open(f"{directory}/{os.getpid()}", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
