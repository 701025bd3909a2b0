"""Train with one library, as its users would: twice in good health, with and without the callback, then with the fault.

Prints a line of JSON for each training.
"""

import importlib
import json
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import seed_everything

from pytest_nancapture import NaNCapture

warnings.simplefilter("ignore")


def trained(training, callbacks, *, faulty):
    seed_everything(0, verbose=False)
    return training(callbacks, faulty)


def healthy(training, callbacks):
    """A copy of the weights after it."""
    module = trained(training, callbacks, faulty=False)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def main(library):
    for training in importlib.import_module(f"with_{library}").TRAININGS:
        folder = Path("bundles", library, training.__name__)
        plain, watched = healthy(training, []), healthy(training, [NaNCapture(folder)])
        print(f"{library}.{training.__name__}", file=sys.stderr)
        told = {
            "training": f"{library}.{training.__name__}",
            "is_finite": all(bool(weight.isfinite().all()) for weight in plain.values() if weight.is_floating_point()),
            "is_same": plain.keys() == watched.keys()
            and all(torch.equal(plain[name], watched[name]) for name in plain),
            "was_quiet": not folder.exists(),
            "ended": "",
        }
        try:
            trained(training, [NaNCapture(folder)], faulty=True)
        except Exception as error:
            told["ended"] = type(error).__name__
        print("TOLD", json.dumps(told), flush=True)


main(sys.argv[1])
