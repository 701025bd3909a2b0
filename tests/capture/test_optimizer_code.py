"""Of an optimizer, what changes in training is state, and what does not is code, which a fix may change."""

import pytest
import torch
from training import Net, batches, capture_one, fit

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles, replay


class NoEpsilon(Net):
    """Adam without an epsilon divides 0 by 0 where a gradient is 0; its learning rate is scheduled."""

    epsilon = 0.0
    seen: list = []  # noqa: RUF012, the replay's module is another instance

    def training_step(self, batch, batch_idx):
        x, good = batch
        self.seen.append(self.optimizers().param_groups[0]["lr"])
        return (self.layer(x).pow(2).mean() + self.layer.bias.sum()) * good

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1, eps=self.epsilon, betas=(0.0, 0.0))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_fix_of_a_hyperparameter_turns_the_test_green(tmp_path, monkeypatch):
    """The captured state of the optimizer does not bring the old epsilon back."""
    bundle = capture_one(NoEpsilon(), batches(), tmp_path, optimizer_history=True)
    assert (bundle.fault.found_in, replay(bundle).verdict) == (("weights",), "nonfinite")
    monkeypatch.setattr(NoEpsilon, "epsilon", 1e-8)
    assert replay(bundle).verdict == "finite"


def test_a_hyperparameter_that_training_changed_is_as_it_was(tmp_path, monkeypatch):
    """The learning rate after four steps of the schedule."""
    bundle = capture_one(NoEpsilon(), batches(), tmp_path, optimizer_history=True, trace=False)
    monkeypatch.setattr(NoEpsilon, "seen", [])
    replay(bundle)
    assert NoEpsilon.seen == [0.1 * 0.5**4]
    assert "lr" not in bundle.manifest.optimizer.constant[0][0]
    assert {"eps", "betas"} <= set(bundle.manifest.optimizer.constant[0][0])


def test_an_error_that_user_code_swallows_is_raised_again(tmp_path):
    """Under ``raise`` the run ends, whatever an overridden ``optimizer_step`` catches."""

    class Swallows(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            try:
                optimizer.step(closure=optimizer_closure)
            except Exception:
                self.swallowed = True

    module = Swallows()
    with pytest.raises(NonFiniteError, match="step 4: nan in loss"):
        fit(module, batches(), NaNCapture(tmp_path))
    assert module.swallowed
    assert len(find_bundles(tmp_path)) == 1


class Casts(Net):
    """Runs in whatever dtype its weights have."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        return super().training_step((x.to(self.layer.weight.dtype), good), batch_idx)


def test_weights_of_another_dtype_are_told(tmp_path):
    """A script that calls ``double()`` on its module after making it does not do so in a replay."""
    bundle = capture_one(Casts().double(), batches(), tmp_path)
    told = "weights are of another dtype than at capture (float64, now float32): layer.bias, layer.weight"
    assert (replay(bundle).notes, replay(bundle, module=Casts().double()).notes) == ((told,), ())
