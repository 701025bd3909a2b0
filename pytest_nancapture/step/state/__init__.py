"""The state of a step: taken at the instant, put back, compared, written."""
