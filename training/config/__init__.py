"""The complete description of a run: its sections, flags, files and schedules. No torch here."""
