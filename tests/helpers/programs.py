"""Programs in processes of their own, forked from one that has imported torch and dualform: each starts at once.

Such a process ends as a program does: its code is the last that its main module runs. What it does not have is an
interpreter that has just begun; a test of imports or of the interpreter's options starts one by `subprocess`.
"""

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dualform

PROTOTYPE = """
import json, os, sys
import torch
import dualform
from dualform.lazy import compute, parquet
torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # making the first optimizer imports most of torch
names = dualform.record, dualform.open, parquet.write_table, compute.field  # imported when they are asked for
for line in sys.stdin:
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
request = json.loads(line)
for number, path in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
    os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
os.environ.update(request["environment"])
sys.argv = ["-c", *request["arguments"]]
_program = compile(request["code"], "<string>", "exec")
del json, os, sys, torch, dualform, compute, parquet, names, line, child, number, path, request
exec(_program)
"""
PATIENCE_SECONDS = 300.0  # after which a program counts as hung


@functools.cache
def _prototype() -> "subprocess.Popen[str]":
    """Start the process that programs are forked from; it ends with this one, which closes its input."""
    environment = {**os.environ, "PYTHONPATH": str(Path(dualform.__file__).parent.parent)}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # spinning is slow on a busy machine
    found = subprocess.Popen(
        [sys.executable, "-c", PROTOTYPE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(found.communicate)
    return found


def run_program(
    code: str, *arguments: object, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run Python code as `python -c` does, in a process that has imported torch and dualform, and wait for its end.

    Args:
        code: the program.
        arguments: its sys.argv[1:].
        environment: variables that it gets beside those of this process.
    """
    process = _prototype()
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        request: dict[str, Any] = {"code": code, "arguments": [str(one) for one in arguments]}
        request |= {"stdout": str(outputs[0]), "stderr": str(outputs[1]), "environment": dict(environment or {})}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], PATIENCE_SECONDS)[0]:
            _prototype.cache_clear()  # its next answer would be that of this program
            process.kill()
            raise AssertionError("the program hangs")
        status = process.stdout.readline()
        assert status, "the process that programs are forked from has ended"
        texts = [path.read_text() for path in outputs]
    return subprocess.CompletedProcess([sys.executable, "-c", code], int(status), *texts)
