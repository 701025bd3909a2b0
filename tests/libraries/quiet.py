"""What the trainings of all libraries share."""

import os

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
MENDED = "MENDED" in os.environ
