"""Plans and runs as people see them: reports, timelines."""
