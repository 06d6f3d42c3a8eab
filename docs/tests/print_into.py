"""Run a script with its output in a file of this process, so that ranks do not mix theirs.

python print_into.py DIRECTORY SECONDS SCRIPT [ARGUMENTS]...

If it still runs after SECONDS, print the stacks of its threads to standard error.
"""

import faulthandler
import os
import runpy
import sys

if __name__ == "__main__":
    _, directory, seconds, script, *arguments = sys.argv
    faulthandler.dump_traceback_later(float(seconds))
    file = os.open(f"{directory}/{os.getpid()}", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
