"""What a shrunk bundle still holds, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_nancapture.bundle.text import some
from pytest_nancapture.shrink.candidate.plan import Part, Plan, Survey, count

_WAYS = {
    "initial": "as the code initialises them",
    "noise": "noise of the same spread",
    "zeros": "zeros",
    "constant": "one value each",
    "rounded": "rounded to a few values",
}


def kept_in_words(plan: Plan, survey: Survey, *, is_through: bool) -> tuple[str, ...]:
    """A sentence for everything there was to make smaller.

    Args:
        plan: the candidate that was written.
        survey: of the captured bundle.
        is_through: whether everything was tried; else what is left need not be what the fault depends on.
    """
    because = "the fault depends on {}" if is_through else "the search was not through"
    return (*_of_batch(plan, survey), *_of_tensors(plan, survey, because), *_of_state(plan, survey, because))


def _of_batch(plan: Plan, survey: Survey) -> Iterator[str]:
    if survey.window > 1:
        yield f"{len(plan.window)} of {survey.window} micro-batches kept"
    sizes = {part.name: part.shape for part in survey.parts}
    for cut in plan.cuts:
        axis = cut.axes[0]
        of = sizes[axis.name][axis.dim]
        if all(axis.dim == 0 for axis in cut.axes):
            yield f"{count(cut.kept)} of {of} samples kept"
        else:
            names = some(sorted({axis.name for axis in cut.axes}))
            yield f"{count(cut.kept)} of {of} kept in dimension {axis.dim} of {names}"


def _of_tensors(plan: Plan, survey: Survey, because: str) -> Iterator[str]:
    ways = plan.ways
    for group, noun in (("weights", "weights"), ("batch", "tensors of the batch"), ("optimizer", "optimizer states")):
        parts = [part for part in survey.parts if part.group == group and _is_there(part, plan)]
        for way, words in _WAYS.items():
            taken = [part.name for part in parts if ways.get(part.name) == way]
            if taken:
                yield f"{len(taken)} of {len(parts)} {noun} are {words}"
    left = [part.name for part in survey.parts if part.group == "weights" and part.name not in ways]
    if left:
        yield f"weights kept, since {because.format('them or little would be gained')}: {some(left)}"


def _is_there(part: Part, plan: Plan) -> bool:
    return {"batch": part.micro in plan.window, "optimizer": plan.optimizer}.get(part.group, True)


def _of_state(plan: Plan, survey: Survey, because: str) -> Iterator[str]:
    if survey.optimizer:
        yield f"the optimizer's state is {'kept: ' + because.format('it') if plan.optimizer else 'not needed'}"
    if plan.seed is not None:
        yield f"the random state is that of seed {plan.seed}"
    else:
        yield f"random state kept: {because.format('it, and did not come under any seed that was tried')}"
    if survey.attributes:
        yield f"attributes that changed in training are {'kept' if plan.attributes else 'not needed'}"
