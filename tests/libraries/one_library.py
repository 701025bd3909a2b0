"""Train with one library, as a user would: twice in good health, with and without the callback, then with the fault."""

import importlib
import sys
import traceback
import warnings
from pathlib import Path

import torch
from lightning.pytorch import seed_everything

from pytest_nancapture import NaNCapture

warnings.simplefilter("ignore")


def trained(training, callbacks, *, faulty):
    seed_everything(0, verbose=False)
    return training(callbacks, faulty)


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


library = importlib.import_module(f"with_{sys.argv[1]}")
only = sys.argv[2:]
for training in library.TRAININGS:
    name = training.__name__
    if only and name not in only:
        continue
    folder = Path("bundles", sys.argv[1], name)
    print(f"== {sys.argv[1]}.{name}", flush=True)
    plain, watched = (state(trained(training, c, faulty=False)) for c in ([], [NaNCapture(folder)]))
    same = plain.keys() == watched.keys() and all(torch.equal(plain[n], watched[n]) for n in plain)
    finite = all(t.isfinite().all() for t in plain.values() if t.is_floating_point())
    print("same", same, "finite", finite, "early", folder.exists(), flush=True)
    try:
        trained(training, [NaNCapture(folder)], faulty=True)
    except Exception as error:
        print("ended by", type(error).__name__, str(error)[:300])
        if "v" in __import__("os").environ.get("V", ""):
            traceback.print_exc()
    else:
        print("ended by nothing")
