"""A run, described completely: its sections, flags, files and schedules. Light: no torch here."""
