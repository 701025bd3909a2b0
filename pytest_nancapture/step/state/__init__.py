"""The state of a step: taken at the instant, restored, compared, written.

::

    what                      taken by, when                        given back by                       in the bundle
    ----                      --------------                        -------------                       -------------
    micro-batch, random       TakenBatch.take, at each              Engine.open, in a rerun or          batch, rng
      states                    micro-batch's instant                 a replay
    buffers, weights that     Snapshots.take, at the first          Window.restore_tensors, after       weights
      a step moves              instant of a window                   a dropped step, before a rerun
    weights under code        CopyOnWrite, as they are              the same                            weights
      before the forward        first written
    weights that no update    Untouched.begin, at the first         the same                            weights
      has touched               instant of the run
    weights and optimizer     Keeper.take_before_update, where      the same, and                       weights,
      states                    another look follows the update,      Window.restore_optimizers           optimizer
                                or another evaluation may
    hyperparameters           Keeper, at the first instant,         Window.restore_optimizers           optimizer
                                where hooks may change them
    attributes and what they  AttributeWatch.take, Inventory,       Window.restore_flags, after a       module: what one
      hold, modes,              at the first instant                  dropped step, before a rerun        built anew has
      requires_grad                                                                                       otherwise
    which submodule, which    Structure, when it is another       Window.restore, the same            module, the same
      parameter stands where    than before
    all of the module         preserved, before a rerun             preserved, after it                 never

A *window* is the micro-batches of one optimizer step. The :class:`Keeper` opens it and fills it; all of the above is in
its :class:`Window`. Weights are *compared* by version counters and fingerprints (``moved``), attributes with those of a
module built from the bundle (:class:`Comparison`), and all is *written* by ``capture/export.py``. An
:class:`Inventory` says where a module keeps its tensors; a :class:`Pool` gives copies the memory of earlier ones.
"""
