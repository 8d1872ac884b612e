"""Running a plan on this machine."""
