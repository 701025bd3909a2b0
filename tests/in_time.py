"""Processes that may wait for each other for ever: each is given a time, and is ended with all that it has started."""

import os
import signal
import subprocess
from collections.abc import Sequence

import pytest


def run_in_time(command: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """Run a command to its end, or until its time is over: then all of it is ended, and the test fails.

    Returns:
        Its exit code, and what it wrote to stdout and stderr.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        output, errors = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        output, errors = run.communicate()
        pytest.fail(f"the ranks wait for each other; they had told:\n{output}\n{errors}")
    return run.returncode, output, errors
