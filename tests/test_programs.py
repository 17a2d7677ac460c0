"""Programs that are forked from a prototype begin and end as programs do."""

from helpers.programs import run_program


def test_a_program_ends_as_one_that_python_starts() -> None:
    code = r"""
import atexit, sys
class Last:
    def __del__(self, write=sys.stderr.write):
        write("global\n")
kept = Last()
atexit.register(print, "atexit")
print(__name__, sys.argv[1:], sorted(n for n in globals() if n[0] != "_"))
raise SystemExit(int(sys.argv[1]))
"""
    for status in (0, 3):
        found = run_program(code, status)
        assert found.returncode == status
        assert found.stdout.splitlines()[1:] == ["atexit"]
        assert found.stdout.startswith(f"__main__ ['{status}'] ['Last', 'atexit', 'kept', 'sys']")
        assert found.stderr == "global\n"


def test_an_error_is_told_and_one_program_knows_nothing_of_another() -> None:
    found = run_program("import os, torch\ntorch.told = 1\nos.environ['TOLD'] = '1'\nraise ValueError('a' + 'b')")
    assert found.returncode == 1
    assert found.stderr.endswith("ValueError: ab\n")
    assert (
        run_program("import os, torch\nassert not hasattr(torch, 'told') and 'TOLD' not in os.environ").returncode == 0
    )
    assert run_program("import os\nassert os.environ['A'] == 'b'", environment={"A": "b"}).returncode == 0


def test_a_program_that_is_killed_has_the_signals_number() -> None:
    assert run_program("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)").returncode == -9
