"""One suite per protocol: every implementation is tested by deriving from the suite's class."""
