"""What a bundle says of its fault holds, wherever the state lies that the fault depends on."""

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from kinds import KINDS
from programs import Program, hand, source
from trials import Trial, carry_out, simplest, wrong

_HAND = 40
"""Programs that share their processes."""


def test_a_claimed_proof_is_one():
    """For any kind of state, set by anybody at any time, and read by any code of the step.

    Where a bundle says that its fault was reproduced, its replay in a fresh process is not finite; where nothing of the
    state is missing, it is red, and green once the code is fixed. No test is green with nothing fixed. Where the state
    can be written, nothing may be missing.
    """
    left = settings.default.max_examples
    kinds = random.sample(list(KINDS), len(KINDS))
    while left > 0:
        size = min(left, _HAND, len(kinds))
        check(hand(kinds[:size]))
        kinds, left = [*kinds[size:], *kinds[:size]], left - size


def check(programs: tuple[Program, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trials = carry_out(programs, Path(folder) / "all")
        found = {p: wrong(p, trial) for p, trial in zip(programs, trials, strict=True) if wrong(p, trial)}
        if found:
            example = simplest(min(found, key=lambda program: program.complexity), Path(folder))
            told = "\n".join(f"{program}: {what}" for program, what in found.items())
            pytest.fail(
                f"{len(found)} of {len(programs)} wrong\n{told}\n\nthe simplest: {example}\n\n{source(example)}",
                pytrace=False,
            )


WRITABLE, UNWRITABLE, OUTSIDE = Program(kind="dict"), Program(kind="lambda"), Program(kind="global")
WELL = {"ended": "NonFiniteError: step 1", "bundles": 1, "batch": 1, "runs": 1, "of": 1, "before": "nonfinite"}


@pytest.mark.parametrize(
    ("program", "became"),
    [
        (WRITABLE, {"after": "passed"}),
        (UNWRITABLE, {"after": "passed"}),
        (UNWRITABLE, {"runs": 0, "missing": ("state",), "before": "cannot gate", "after": "cannot gate"}),
        (UNWRITABLE, {"runs": 0, "log": "nobody can look into state", "before": "cannot gate", "after": "cannot gate"}),
        (OUTSIDE, {"runs": 0, "before": "cannot gate", "after": "cannot gate"}),
    ],
)
def test_what_is_well(program, became):
    """Red and then green; or no claim, and the state that is missing named, if it is the module's."""
    assert wrong(program, Trial(**{**WELL, **became})) == ""


@pytest.mark.parametrize(
    ("program", "became", "what"),
    [
        (WRITABLE, {"bundles": 0, "batch": -1}, "0 bundles"),
        (WRITABLE, {"batch": 2}, "of batch 2"),
        (OUTSIDE, {"before": "passed"}, "green with nothing fixed"),
        (UNWRITABLE, {"before": "finite"}, "but the replay is finite"),
        (WRITABLE, {"missing": ("state",)}, "all of its state could be written"),
        (WRITABLE, {"runs": 0, "before": "cannot gate"}, "all of its state could be written"),
        (UNWRITABLE, {"runs": 0, "before": "cannot gate"}, "does not name the state"),
        (WRITABLE, {"before": "error"}, "not red: error"),
        (WRITABLE, {"after": "nonfinite"}, "the fix is not green"),
    ],
)
def test_the_check_can_fail(program, became, what):
    """On each thing that must not be."""
    assert what in wrong(program, Trial(**{**WELL, "after": "passed", **became}))


def test_a_program_becomes_simpler():
    """Of the same kind, and never one that makes no sense."""
    program = Program(kind="dict", when="forward", owner="child", reader="forward", in_place=True, untouched=("int",))
    simpler = list(program.simpler())
    assert simpler[0] == Program(kind="dict")
    assert {each.kind for each in simpler} == {"dict"}
    assert all(each.makes_sense and each.complexity < program.complexity for each in simpler)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_makes_a_program(kind):
    """Python can read it, and it says what it is."""
    program = hand([kind])[0]
    compile(source(program), "program.py", "exec")
    assert source(program).startswith(f'"""{program}"""')
